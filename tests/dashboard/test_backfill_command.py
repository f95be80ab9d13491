"""`phasewise ingest` from other systems: stored once, gone on with after an interruption, refused in one line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from local_http import Answer, Query, answering
from serving import serving

from phasewise.dashboard import cli

pytestmark = pytest.mark.live
NOW_S = int(time.time())
FIRST_S = NOW_S - 7200


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test, not of its collection, which may be many minutes earlier."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "NOW_S", int(time.time()))
    monkeypatch.setattr(here, "FIRST_S", NOW_S - 7200)


def traces_between(low_us: int, high_us: int) -> list[dict[str, object]]:
    """A request every minute for two hours."""
    found: list[dict[str, object]] = []
    for number in range(120):
        start_us = (FIRST_S + 60 * number) * 10**6
        if low_us <= start_us <= high_us:
            span = {
                "traceID": f"{number + 1:x}",
                "spanID": "b",
                "operationName": "llm_request",
                "startTime": start_us,
                "duration": 2_000_000,
                "processID": "p",
                "tags": [
                    {"key": "otel.scope.name", "type": "string", "value": "vllm.tracing.otel"},
                    {"key": "gen_ai.latency.e2e", "type": "float64", "value": 2.0},
                ],
            }
            found.append({"traceID": f"{number + 1:x}", "spans": [span], "processes": {"p": {"serviceName": "llm"}}})
    return found


def jaeger(path: str, query: Query) -> Answer:
    if path == "/api/services":
        return 200, {"data": ["llm"]}
    return 200, {"data": traces_between(int(query["start"]), int(query["end"]))}


def failing_after(calls: int) -> Callable[[str, Query], Answer]:
    left = [calls]

    def answers(path: str, query: Query) -> Answer:
        left[0] -= path == "/api/traces"
        return (500, "the disk is full") if left[0] < 0 else jaeger(path, query)

    return answers


def requests_in(data: Path) -> int:
    with duckdb.connect(str(data / "phasewise.duckdb"), read_only=True) as store:
        found = store.execute("SELECT count(*), count(DISTINCT request_key) FROM requests").fetchone()
    assert found is not None and found[0] == found[1]
    return int(found[0])


def ingest(data: Path, *arguments: str) -> int:
    return cli.main(["ingest", "--data", str(data), "--from", str(FIRST_S), *arguments])


def test_a_window_is_stored_once_and_only_what_is_new_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(jaeger) as server:
        to = str(FIRST_S + 3600)
        assert ingest(tmp_path, "--jaeger", server.url, "--to", to, "--json") == 0
        assert json.loads(capsys.readouterr().out)["counts"]["good"] == 60
        asked = len(server.of("/api/traces"))
        assert ingest(tmp_path, "--jaeger", server.url, "--to", to) == 0
        assert "stored by an earlier run (--again" in capsys.readouterr().err
        assert len(server.of("/api/traces")) == asked
        assert ingest(tmp_path, "--jaeger", server.url, "--to", to, "--again") == 0
        assert requests_in(tmp_path) == 60
        assert ingest(tmp_path, "--jaeger", server.url) == 0  # to now: the second hour
        assert requests_in(tmp_path) == 120
        assert min(int(one.query["start"]) for one in server.of("/api/traces")[2 * asked :]) == int(to) * 10**6
        before = len(server.of("/api/traces"))
        assert ingest(tmp_path, "--jaeger", server.url) == 0  # the last minutes may not have been whole
        (last, *_) = server.of("/api/traces")[before:]
        assert NOW_S - 310 <= int(last.query["start"]) / 10**6 <= time.time() - 299


@pytest.mark.slow
def test_after_a_failure_the_next_run_goes_on_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(failing_after(3)) as server:
        assert ingest(tmp_path, "--jaeger", server.url) == 4
        told = capsys.readouterr().err
        assert "500: the disk is full" in told and "not asked again" in told and "stored" in told
        stored = requests_in(tmp_path)
        assert 0 < stored < 120
        port = int(server.url.rpartition(":")[2])
    with answering(jaeger, port) as server:
        assert ingest(tmp_path, "--jaeger", server.url) == 0
        assert requests_in(tmp_path) == 120
        assert int(server.of("/api/traces")[0].query["start"]) > FIRST_S * 10**6


@pytest.mark.slow
def test_a_running_server_takes_it_in_and_the_user_keeps_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with answering(jaeger) as server, serving(tmp_path / "data") as served:
        options = ["--server", served.url, "--jaeger", server.url, "--to", str(FIRST_S + 3600)]
        assert ingest(tmp_path / "elsewhere", *options) == 0
        assert "60 good" in capsys.readouterr().out
        assert served.verdict(60)["requests"] == 60
        asked = len(server.asked)
        assert ingest(tmp_path / "elsewhere", *options) == 0
        assert len(server.asked) == asked
    assert (tmp_path / "state" / "phasewise" / "backfill.json").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_headers_go_along_and_a_refusal_does_not_show_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda *_: (401, "no")) as server:
        assert ingest(tmp_path, "--tempo", server.url, "--header", "Authorization: Bearer k-3y") == 2
        (asked,) = server.asked
        assert asked.headers["Authorization"] == "Bearer k-3y"
    told = capsys.readouterr().err
    assert "refuses with 401" in told and "--header" in told and "k-3y" not in told and len(told.splitlines()) == 1


def test_nothing_in_the_window_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"status": "success", "data": {"resultType": "matrix", "result": []}}
    with answering(lambda *_: (200, nothing)) as server:
        assert ingest(tmp_path, "--prometheus", server.url) == 3
    assert "hold nothing of a known engine in that window" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "now-1h", "x.json"], "--from: says nothing about files"),
        (["--header", "secret", "--jaeger", "http://h"], "--header: is no header"),
        (["--step", "soon", "--prometheus", "http://h"], "--step: soon: is no duration"),
        (["--step", "15s", "--tempo", "http://h"], "is for --prometheus only"),
        (["--match", "a", "--tempo", "http://h", "--jaeger", "http://h"], "run them one after another"),
        (["--jaeger", "http://h", "--from", "now", "--to", "now-1h"], "is not before --to"),
        (["--jaeger", "http://h", "--from", "soon"], "is not a time"),
        (["--jaeger", "http:///x"], "names no host"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ingest", "--data", str(tmp_path), *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 1
    assert "secret" not in told
    assert not list(tmp_path.iterdir())  # refused before anything is opened
