"""Answers of real servers with traces, as public repositories keep them: what they hold besides what we need, and leave out.

Written anew with an engine's facts in the shape that was recorded. Read 2026-11-30:
- Jaeger: jaegertracing/jaeger @6c766650 cmd/jaeger/internal/extension/jaegerquery/internal/fixture/otlp2jaeger-out.json, and an answer
  saved by its user interface, Hubert-bor/my-vue-app @5503fbae src/jaeger/mock/mockTraces.ts
- Tempo: the search answer in kgateway-dev/kgateway's proposal on tracing of AI gateways; grafana/tempo @0d58ec8f
  cmd/tempo-vulture/testdata/trace.json
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from local_http import Answer, Query, answering
from span_tables import BASE_UNIX_NS, at
from writing import bench, rulebook

from phasewise.collector.backfill import Remote, Source, pages
from phasewise.collector.backfill.jaeger import Jaeger
from phasewise.collector.backfill.tempo import Tempo
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles

pytestmark = pytest.mark.live
PROFILES = Profiles(rulebook().engines)
BASE_MS = BASE_UNIX_NS // 10**6
TRACE, SPAN, PARENT = "83a9efd15c1c98a977e0711cc93ee28b", "e127af99e3b3e074", "909541b92cf05311"
LATENCIES = {
    "e2e": 2.0,
    "time_to_first_token": 0.5,
    "time_in_queue": 0.25,
    "time_in_model_prefill": 0.125,
    "time_in_model_decode": 1.5,
}


def rows_of(source: Source, folder: Path) -> list[dict[str, Any]]:
    """Rows of requests that a store holds after all pages of an hour."""
    with bench(folder) as opened:
        for page in pages(source, BASE_MS, BASE_MS + 3_600_000):
            if page.body:
                opened.writer.add_import(import_bytes(page.body, source.url, PROFILES))
        return opened.rows()


# --- Jaeger ------------------------------------------------------------------------------------------------------------


def jaeger_span() -> dict[str, Any]:
    """`warnings` is null, and its parent is not in the trace."""
    latencies = [
        {"key": f"gen_ai.latency.{name}", "type": "float64", "value": value} for name, value in LATENCIES.items()
    ]
    return {
        "traceID": TRACE,
        "spanID": SPAN,
        "operationName": "llm_request",
        "references": [{"refType": "CHILD_OF", "traceID": TRACE, "spanID": PARENT}],
        "startTime": at(1) // 1000,
        "duration": 2_000_123,
        "tags": [
            {"key": "otel.scope.name", "type": "string", "value": "vllm.tracing.otel"},
            {"key": "gen_ai.usage.prompt_tokens", "type": "int64", "value": 97},
            {"key": "gen_ai.usage.completion_tokens", "type": "int64", "value": 4},
            {"key": "gen_ai.request.id", "type": "string", "value": "chatcmpl-1"},
            *latencies,
            {"key": "span.kind", "type": "string", "value": "server"},
            {"key": "internal.span.format", "type": "string", "value": "otlp"},
        ],
        "logs": [],
        "processID": "p1",
        "warnings": None,
    }


def jaeger_answer(*spans: dict[str, Any], **trace: Any) -> dict[str, Any]:
    processes = {"p1": {"serviceName": "vllm-server", "tags": [{"key": "host.name", "type": "string", "value": "h"}]}}
    found = {"traceID": TRACE, "spans": list(spans), "processes": processes, "warnings": None, **trace}
    return {"data": [found], "total": 0, "limit": 0, "offset": 0, "errors": None}


def jaeger(answer: dict[str, Any], services: dict[str, Any]) -> Any:
    def answers(path: str, query: Query) -> Answer:
        return 200, services if path == "/api/services" else answer

    return answers


SERVICES = {"data": ["vllm-server"], "total": 1, "limit": 0, "offset": 0, "errors": None}


def checked(row: dict[str, Any]) -> None:
    assert (row["engine"], row["trace_id"], row["span_id"]) == ("vllm_v1", TRACE, SPAN)
    assert (row["service"], row["request_id"]) == ("vllm-server", "chatcmpl-1")
    assert (row["input_tokens"], row["output_tokens"]) == (97, 4)
    assert (row["queue_s"], row["prefill_s"], row["decode_s"], row["e2e_s"]) == (0.25, 0.125, 1.5, 2.0)


def test_a_span_that_jaeger_holds_twice_is_one_request(tmp_path: Path) -> None:
    with answering(jaeger(jaeger_answer(jaeger_span(), jaeger_span()), SERVICES)) as server:
        (row,) = rows_of(Jaeger(Remote(server.url, "Jaeger", {})), tmp_path)
    checked(row)
    assert row["instance"] == "h"


def test_an_answer_saved_by_the_user_interface_is_read(tmp_path: Path) -> None:
    """With what the page worked out: process beside processID, services, names, depths."""
    saved = jaeger_span() | {
        "warnings": [],
        "process": {"serviceName": "vllm-server", "tags": [{"key": "host.name", "type": "string", "value": "h"}]},
        "relativeStartTime": 0,
        "depth": 0,
        "hasChildren": False,
        "childSpanIds": [],
    }
    page = {"services": [{"name": "vllm-server", "numberOfSpans": 1}], "traceName": "vllm-server: llm_request"}
    trace = jaeger_answer(saved, **page, duration=2_000_123, startTime=at(1) // 1000)["data"][0]
    with bench(tmp_path) as opened:
        opened.writer.add_import(import_bytes(json.dumps(trace).encode(), "saved.json", PROFILES))
        (row,) = opened.rows()
    checked(row)


def test_a_jaeger_that_knows_nothing_says_null(tmp_path: Path) -> None:
    nothing = {"data": None, "total": 0, "limit": 0, "offset": 0, "errors": None}
    with answering(jaeger(nothing, nothing)) as server:
        assert rows_of(Jaeger(Remote(server.url, "Jaeger", {})), tmp_path / "a") == []
    with answering(jaeger(nothing | {"data": []}, SERVICES)) as server:
        assert rows_of(Jaeger(Remote(server.url, "Jaeger", {})), tmp_path / "b") == []


# --- Tempo -------------------------------------------------------------------------------------------------------------


def tempo_search() -> dict[str, Any]:
    """What was found beside the id: the spans that matched, twice, and how many each service has; numbers as texts."""
    own = {"spanID": SPAN, "name": "llm_request", "startTimeUnixNano": str(at(1)), "durationNanos": "2000000000"}
    matched = {"spans": [own], "matched": 1}
    return {
        "traces": [
            {
                "traceID": TRACE,
                "rootServiceName": "<root span not yet received>",
                "rootTraceName": "",
                "startTimeUnixNano": str(at(1)),
                "durationMs": 2000,
                "spanSet": matched,
                "spanSets": [matched],
                "serviceStats": {"vllm-server": {"spanCount": 1}},
            }
        ],
        "metrics": {"inspectedBytes": "53751", "completedJobs": 1, "totalJobs": 1},
    }


def tempo_groups() -> list[dict[str, Any]]:
    """Ids in base64, numbers as texts, no kind, an empty status, events without names."""
    attributes = [
        {"key": "gen_ai.request.id", "value": {"stringValue": "chatcmpl-1"}},
        {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "97"}},
        {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": "4"}},
        *({"key": f"gen_ai.latency.{name}", "value": {"doubleValue": value}} for name, value in LATENCIES.items()),
    ]
    span = {
        "traceId": base64.b64encode(bytes.fromhex(TRACE)).decode(),
        "spanId": base64.b64encode(bytes.fromhex(SPAN)).decode(),
        "parentSpanId": base64.b64encode(bytes.fromhex(PARENT)).decode(),
        "name": "llm_request",
        "startTimeUnixNano": str(at(1)),
        "endTimeUnixNano": str(at(3)),
        "attributes": attributes,
        "events": [{"timeUnixNano": str(at(2)), "attributes": [{"key": "a", "value": {"intValue": "424354"}}]}],
        "status": {},
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm-server"}}]}
    scope = {"scope": {"name": "vllm.tracing.otel"}, "spans": [span]}
    return [{"resource": resource, "scopeSpans": [scope, {"scope": {}, "spans": []}]}]


@pytest.mark.parametrize(
    "trace",
    [
        {"batches": tempo_groups()},
        {"resourceSpans": tempo_groups()},
        {"trace": {"resourceSpans": tempo_groups()}, "metrics": {"inspectedBytes": "1234567"}},
        {"trace": {"batches": tempo_groups()}, "metrics": {"inspectedBytes": "1234567", "inspectedTraces": 5}},
    ],
    ids=["first API", "its newer name", "second API", "second API, older name"],
)
def test_a_trace_of_tempo_is_read_whatever_its_release_calls_its_parts(tmp_path: Path, trace: dict[str, Any]) -> None:
    def answers(path: str, query: Query) -> Answer:
        return 200, tempo_search() if path == "/api/search" else trace

    with answering(answers) as server:
        (row,) = rows_of(Tempo(Remote(server.url, "Tempo", {})), tmp_path)
        assert {one.path for one in server.asked} == {"/api/search", f"/api/traces/{TRACE}"}
    checked(row)


@pytest.mark.parametrize(
    "nothing",
    [
        {"traces": [], "metrics": {"inspectedTraces": 703, "inspectedBytes": "0"}},
        {"metrics": {"inspectedBytes": "0", "totalBlocks": 3}},
        {"traces": None, "metrics": {"completedJobs": 1, "totalJobs": 1}},
        {"metrics": {}},
    ],
)
def test_a_search_of_tempo_that_finds_nothing_is_no_fault(tmp_path: Path, nothing: dict[str, Any]) -> None:
    with answering(lambda *_: (200, nothing)) as server:
        assert rows_of(Tempo(Remote(server.url, "Tempo", {})), tmp_path) == []
