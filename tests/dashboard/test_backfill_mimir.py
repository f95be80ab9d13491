"""`phasewise ingest` from Mimir: its API stands below /prometheus and answers nobody without a tenant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from local_http import Answer, LocalServer, Query, answering

from phasewise.dashboard import cli

pytestmark = pytest.mark.live
FROM_S = 1_795_972_000
STEP_S = 15
COUNT = 30  # scrapes, one every fifteen seconds
TENANT = "team-a"
LABELS = {"job": "engines", "instance": "vllm-0:8000", "cluster": "c1", "__tenant_id__": TENANT}


def series(name: str, value: float, growth: float = 0.0, **labels: str) -> dict[str, Any]:
    """As Mimir's JSON has it: values are texts, times seconds with a fraction."""
    values = [[FROM_S + STEP_S * n + 0.25, f"{value + growth * n}"] for n in range(COUNT)]
    return {"metric": {"__name__": name, **LABELS, **labels}, "values": values}


STORED = [
    series("vllm:num_requests_running", 3, model_name="m", engine="0"),
    series("vllm:prompt_tokens_total", 100, 7, model_name="m", engine="0"),
    series("vllm:request_success_total", 10, 1, model_name="m", finished_reason="stop"),
    series("vllm:request_success_total", 2, model_name="m", finished_reason="abort"),
]
STARTS = [series("process_start_time_seconds", FROM_S - 60)]


@contextmanager
def mimir(*, has_query: bool = True) -> Iterator[LocalServer]:
    """Refuses as Mimir does: without a tenant 401 `no org id`, elsewhere 404, a window that is too long 422."""
    held: list[LocalServer] = []

    def answers(path: str, query: Query) -> Answer:
        asked = held[0].asked[-1]
        if not path.startswith("/prometheus/api/v1/"):
            return 404, "404 page not found\n"
        tenant = {name.lower(): text for name, text in asked.headers.items()}.get("x-scope-orgid")
        if tenant is None:
            return 401, "no org id"
        if tenant != TENANT:
            return 200, matrix([])
        found = STARTS if "process_start" in query["query"] else STORED
        if path.endswith("/query_range"):
            return stepped(found, query)
        return selected(found, query) if path.endswith("/query") and has_query else (404, "404 page not found\n")

    with answering(answers) as server:
        held.append(server)
        yield server


def matrix(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": found}}


def selected(found: list[dict[str, Any]], query: Query) -> Answer:
    """A range selector: the stored values of the time before `time`."""
    length_s = int(query["query"].rpartition("[")[2].removesuffix("ms]")) / 1000
    if length_s > 300:
        limit = "the query time range exceeds the limit (query length: 10m0s, limit: 5m0s) (err-mimir-max-query-length)"
        return 422, {"status": "error", "errorType": "execution", "error": limit}
    end = float(query["time"])
    kept = [one | {"values": [v for v in one["values"] if end - length_s < v[0] <= end]} for one in found]
    return 200, matrix([one for one in kept if one["values"]])


def stepped(found: list[dict[str, Any]], query: Query) -> Answer:
    """The last value within a step before each time."""
    start, end, step = (float(query[name]) for name in ("start", "end", "step"))
    assert query["query"].startswith("last_over_time(")
    result = []
    for one in found:
        values = []
        for number in range(math.floor((end - start) / step) + 1):
            at = start + number * step
            before = [v for v in one["values"] if at - step < v[0] <= at]
            values += [[at, before[-1][1]]] if before else []
        result += [one | {"values": values}] if values else []
    return 200, matrix(result)


def ingest(data: Path, url: str, *more: str) -> int:
    window = ("--from", str(FROM_S), "--to", str(FROM_S + STEP_S * COUNT))
    return cli.main(["ingest", "--data", str(data), *window, "--prometheus", url, *more])


def rows(data: Path) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(data / "phasewise.duckdb"), read_only=True) as store:
        columns = "instance, unix_ns, running, prompt_tokens, finished, aborted, process_start_unix_s"
        return store.execute(f"SELECT {columns} FROM engine_samples ORDER BY unix_ns").fetchall()


HEADER = ("--header", f"X-Scope-OrgID: {TENANT}")


def test_what_was_scraped_comes_with_its_own_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mimir() as server:
        assert ingest(tmp_path, f"{server.url}/prometheus", *HEADER) == 0
        assert {one.path for one in server.asked} == {"/prometheus/api/v1/query"}
    expected = [
        ("c1/engines/vllm-0:8000", (FROM_S + STEP_S * n) * 10**9 + 250_000_000, 3.0, 100.0 + 7 * n, 10.0 + n, 2.0, FROM_S - 60.0)
        for n in range(COUNT)
    ]  # fmt: skip
    assert rows(tmp_path) == expected
    assert f"{COUNT} samples" in capsys.readouterr().out


@pytest.mark.parametrize("more", [("--step", "15"), ()], ids=["asked for", "all it has"])
def test_query_range_gives_a_value_a_step(tmp_path: Path, more: tuple[str, ...]) -> None:
    with mimir(has_query=False) as server:
        assert ingest(tmp_path, f"{server.url}/prometheus/api/v1/", *HEADER, *more) == 0
        assert "/prometheus/api/v1/query_range" in {one.path for one in server.asked}
    found = rows(tmp_path)
    first_s = -(-FROM_S // STEP_S) * STEP_S
    assert [row[1] for row in found] == [(first_s + STEP_S * n) * 10**9 for n in range(COUNT)]
    assert [row[3] for row in found] == [100.0 + 7 * n for n in range(COUNT)]


@pytest.mark.parametrize(
    ("below", "more", "said"),
    [
        ("/prometheus", (), ("refuses with 401: no org id", "X-Scope-OrgID: NAME")),
        ("", HEADER, ("404", "of Mimir that ends in /prometheus")),
    ],
    ids=["without a tenant", "without the prefix"],
)
def test_what_mimir_insists_on_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str, more: tuple[str, ...], said: tuple[str, str]
) -> None:
    with mimir() as server:
        assert ingest(tmp_path, server.url + below, *more) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


def test_another_tenants_samples_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mimir() as server:
        assert ingest(tmp_path, f"{server.url}/prometheus", "--header", "X-Scope-OrgID: team-b") == 3
    assert "hold nothing of a known engine" in capsys.readouterr().err
