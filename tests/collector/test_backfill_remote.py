"""Jaeger and Tempo by their recorded shapes, refusals in words, and what is not asked twice."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from local_http import Answer, Query, answering
from span_tables import BASE_UNIX_NS, at
from writing import rulebook

from phasewise.collector.backfill import Coverage, Page, Remote, Source, pages
from phasewise.collector.backfill.jaeger import Jaeger
from phasewise.collector.backfill.prometheus import Prometheus
from phasewise.collector.backfill.tempo import Tempo
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError, MachineError, PhasewiseError

pytestmark = pytest.mark.live
PROFILES = Profiles(rulebook().engines)
BASE_MS = BASE_UNIX_NS // 10**6
MINUTE_MS = 60_000


def jaeger_trace(number: int, at_s: float) -> dict[str, Any]:
    span = {
        "traceID": f"{number:x}",
        "spanID": "b",
        "operationName": "llm_request",
        "references": [],
        "startTime": at(at_s) // 1000,
        "duration": 2_000_000,
        "tags": [{"key": "otel.scope.name", "type": "string", "value": "vllm.tracing.otel"}],
        "logs": [],
        "processID": "p1",
    }
    return {"traceID": f"{number:x}", "spans": [span], "processes": {"p1": {"serviceName": "llm", "tags": []}}}


def jaeger(traces: Mapping[int, float]) -> Callable[[str, Query], Answer]:
    """A Jaeger that knows traces by number and second, which two services share."""

    def answers(path: str, query: Query) -> Answer:
        if path == "/api/services":
            return 200, {"data": ["gateway", "llm", "jaeger-all-in-one"], "errors": None}
        assert path == "/api/traces" and query["service"] in ("gateway", "llm")
        low, high = int(query["start"]) * 1000, int(query["end"]) * 1000
        found = [jaeger_trace(n, s) for n, s in sorted(traces.items()) if low <= at(s) <= high]
        return 200, {
            "data": found[: int(query["limit"])],
            "total": 0,
            "limit": 0,
            "offset": 0,
            "errors": None,
        }

    return answers


def read(source: Source, from_ms: int, to_ms: int) -> tuple[list[str], list[Page]]:
    """Trace ids that a source holds in a window, in order, and the pages they came in."""
    found = list(pages(source, from_ms, to_ms))
    tables = [import_bytes(page.body, source.url, PROFILES).spans for page in found if page.body]
    return [name for table in tables if table is not None for name in table["trace_id"].to_pylist()], found


def covers(found: list[Page], from_ms: int, to_ms: int) -> bool:
    """No gap and no overlap."""
    edges = [page.from_ms for page in found] + [to_ms]
    return edges[0] == from_ms and [page.to_ms for page in found] == edges[1:]


def test_jaeger_pages_hold_every_trace_once_however_small_its_limit() -> None:
    traces = {number + 1: 10.0 * number + (number % 7) for number in range(60)}
    with answering(jaeger(traces)) as server:
        names, found = read(Jaeger(Remote(server.url, "Jaeger", {}), limit=5), BASE_MS, BASE_MS + 10 * MINUTE_MS)
        assert sorted(names) == [f"{number:032x}" for number in traces]
        assert covers(found, BASE_MS, BASE_MS + 10 * MINUTE_MS)
        one, _ = read(Jaeger(Remote(server.url, "Jaeger", {}), "llm", limit=100), BASE_MS, BASE_MS + 10 * MINUTE_MS)
        assert sorted(one) == sorted(names)
        with pytest.raises(InputError, match=r"is no service of .*it knows gateway, jaeger"):
            read(Jaeger(Remote(server.url, "Jaeger", {}), "nothing"), BASE_MS, BASE_MS + 1)


def tempo(traces: Mapping[int, float], gone: int = 0) -> Callable[[str, Query], Answer]:
    """A Tempo that knows traces by number and second; its search gives ids without leading zeros."""

    def answers(path: str, query: Query) -> Answer:
        if path == "/api/search":
            low, high = int(query["start"]) * 10**9, int(query["end"]) * 10**9
            found = [{"traceID": f"{n:x}"} for n, s in traces.items() if low <= at(s) < high]
            return 200, {"traces": found[: int(query["limit"])], "metrics": {"inspectedTraces": len(found)}}
        number = int(path.removeprefix("/api/traces/"), 16)
        return (404, "trace not found") if number == gone else (200, tempo_trace(number, traces[number]))

    return answers


def tempo_trace(number: int, at_s: float) -> dict[str, Any]:
    span = {
        "traceId": base64.b64encode(number.to_bytes(16)).decode(),
        "spanId": base64.b64encode(b"\x00" * 7 + b"\x0b").decode(),
        "name": "llm_request",
        "kind": "SPAN_KIND_SERVER",
        "startTimeUnixNano": str(at(at_s)),
        "endTimeUnixNano": str(at(at_s + 2)),
        "attributes": [{"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "7"}}],
        "status": {},
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "llm"}}]}
    return {
        "batches": [{"resource": resource, "scopeSpans": [{"scope": {"name": "vllm.tracing.otel"}, "spans": [span]}]}]
    }


def test_tempo_pages_hold_every_trace_once_and_name_those_that_are_gone() -> None:
    traces = {number + 1: 10.0 * number for number in range(60)}
    with answering(tempo(traces, gone=4)) as server:
        names, found = read(Tempo(Remote(server.url, "Tempo", {}), limit=5), BASE_MS, BASE_MS + 10 * MINUTE_MS)
        assert sorted(names) == [f"{number:032x}" for number in traces if number != 4]
        assert covers(found, BASE_MS, BASE_MS + 10 * MINUTE_MS)
        assert [text for page in found for text in page.problems] == [
            f"{server.url}: trace 4 is found but not there any more"
        ]
        assert {one.query["q"] for one in server.of("/api/search")} == {"{}"}


def test_a_tempo_second_with_very_many_traces_is_read_whole() -> None:
    with answering(tempo({number + 1: 30.5 for number in range(12)})) as server:
        names, _ = read(Tempo(Remote(server.url, "Tempo", {}), limit=3), BASE_MS, BASE_MS + MINUTE_MS)
        assert len(names) == 12


def matrix(path: str, query: Query) -> Answer:
    """A Prometheus without range selectors, with a value a minute of a gauge."""
    if path != "/api/v1/query_range":
        return 404, "404 page not found"
    if "process_start" in query["query"]:
        return 200, {"status": "success", "data": {"resultType": "matrix", "result": []}}
    assert query["query"].startswith("last_over_time({__name__=~")
    start, end, step = (float(query[name]) for name in ("start", "end", "step"))
    times = [start + number * step for number in range(int((end - start) / step) + 1)]
    series = {
        "metric": {"__name__": "vllm:num_requests_running", "job": "j", "instance": "i"},
        "values": [[time, "3"] for time in times if time % 60 == 0],
    }
    summed = {"metric": {"__name__": "vllm:num_requests_running"}, "values": series["values"]}
    return 200, {"status": "success", "data": {"resultType": "matrix", "result": [series, summed]}}


def test_a_server_with_query_range_only_is_read_by_steps() -> None:
    with answering(matrix) as server:
        found = list(
            pages(Prometheus(Remote(server.url, "Prometheus", {}), ["vllm:"]), BASE_MS, BASE_MS + 10 * MINUTE_MS)
        )
        samples = [one.samples for page in found if page.body for one in import_bytes(page.body, "p", PROFILES).samples]
        minutes = [unix_ms for unix_ms in range(BASE_MS, BASE_MS + 10 * MINUTE_MS) if unix_ms % MINUTE_MS == 0]
        assert [one["unix_ns"].item() for one in samples] == [unix_ms * 10**6 for unix_ms in minutes]
        assert {one["instance"].item() for one in samples} == {"j/i"}
        assert len(server.of("/api/v1/query")) == 1  # known to be missing after that


@pytest.mark.parametrize(
    ("status", "value", "kind", "said", "remedy"),
    [
        (401, "no org id", InputError, "refuses with 401: no org id", "X-Scope-OrgID"),
        (403, {"error": "forbidden\x1b[31m"}, InputError, "refuses with 403: forbidden [31m", "Authorization: Bearer"),
        (404, "<html>no</html>", InputError, "404", "name what stands before"),
        (302, "", InputError, "redirects to http://login/", "name that address"),
        (200, "<html>Grafana</html>", InputError, "does not answer like", "is another server there"),
        (200, {"hello": 1}, InputError, "does not answer like", "is another server there"),
        (
            422,
            {"error": "the query hit the max number of series limit: too many series"},
            InputError,
            "too many",
            "--match",
        ),
        (400, {"error": "parse error"}, InputError, "400: parse error", "--match"),
        (500, "broken", MachineError, "500: broken", "run it again"),
    ],
)
@pytest.mark.parametrize("kind_of_source", [Prometheus, Jaeger, Tempo])
def test_a_refusal_says_what_to_do(
    kind_of_source: type, status: int, value: object, kind: type[PhasewiseError], said: str, remedy: str
) -> None:
    with answering(lambda *_: (status, value, {"Location": "http://login/"})) as server:
        remote = Remote(server.url, kind_of_source.__name__, {})
        source = Prometheus(remote, ["vllm:"]) if kind_of_source is Prometheus else kind_of_source(remote)
        with pytest.raises(kind) as raised:
            list(pages(source, BASE_MS, BASE_MS + MINUTE_MS))
    assert server.url in str(raised.value)
    assert said in str(raised.value)
    assert remedy in str(raised.value)


def test_nobody_there_is_a_matter_of_the_machine() -> None:
    with answering(lambda *_: (200, {})) as server:
        url = server.url
    with pytest.raises(MachineError, match=r"no answer from .*can this machine reach it"):
        Remote(url, "Jaeger", {}).ask("/api/services")


def test_a_busy_server_is_asked_again_after_what_it_says_and_headers_go_along() -> None:
    pauses: list[float] = []
    answers: list[Answer] = [
        (503, "", {"Retry-After": "²"}),
        (429, "slow down", {"Retry-After": "7"}),
        (200, {"data": ["llm"]}),
    ]
    with answering(lambda *_: answers.pop(0)) as server:
        remote = Remote(server.url + "/", "Jaeger", {"X-Scope-OrgID": "team-a"}, sleep=pauses.append)
        assert remote.ask("/api/services") == {"data": ["llm"]}
    assert pauses == [0.5, 7.0]
    assert {one.headers["X-Scope-OrgID"] for one in server.asked} == {"team-a"}


def test_a_password_in_the_address_is_used_and_never_shown() -> None:
    with answering(lambda *_: (403, "no")) as server:
        remote = Remote(server.url.replace("//", "//me:s3cret@") + "/api/v1/", "Prometheus", {})
        with pytest.raises(InputError) as raised:
            remote.ask("/api/v1/query")
        assert base64.b64decode(server.asked[0].headers["Authorization"].removeprefix("Basic ")) == b"me:s3cret"
        assert (server.asked[0].path, remote.url) == ("/api/v1/query", server.url)
    assert "s3cret" not in str(raised.value)


def test_a_long_question_goes_into_the_body() -> None:
    with answering(lambda _, query: (200, {"length": len(query["query"])})) as server:
        assert Remote(server.url, "Prometheus", {}).ask("/x", [("query", "x" * 9000)]) == {"length": 9000}


def test_coverage_names_what_is_missing(tmp_path: Path) -> None:
    coverage = Coverage(tmp_path / "new" / "backfill.json")
    assert list(coverage.missing("a", 0, 100)) == [(0, 100)]
    coverage.add("a", 10, 20)
    coverage.add("a", 40, 60)
    coverage.add("a", 20, 30)
    coverage.add("a", 70, 70)
    coverage.add("b", 0, 100)
    again = Coverage(tmp_path / "new" / "backfill.json")
    assert list(again.missing("a", 0, 100)) == [(0, 10), (30, 40), (60, 100)]
    assert list(again.missing("a", 15, 50)) == [(30, 40)]
    assert list(again.missing("a", 12, 28)) == []
    assert json.loads((tmp_path / "new" / "backfill.json").read_text())["a"] == [[10, 30], [40, 60]]
    (tmp_path / "new" / "backfill.json").write_text("{broken")
    assert list(Coverage(tmp_path / "new" / "backfill.json").missing("a", 0, 9)) == [(0, 9)]
