"""Traces of Jaeger and Tempo, and range answers of Prometheus, as files: every field in its place, and what is wrong by name."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from span_tables import at, span_table
from writing import bench, engine_span, rulebook

from phasewise.collector.importers import Imported, import_bytes, kind_of
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError

PROFILES = Profiles(rulebook().engines)
TRACE = "0af7651916cd43dd8448eb211c80319c"


def read(document: object) -> Imported:
    return import_bytes(json.dumps(document).encode(), "f.json", PROFILES, modified_unix_ns=at(1000))


def rows(document: object) -> list[dict[str, Any]]:
    found = read(document)
    assert found.kind == "spans" and found.spans is not None
    return list(found.spans.to_pylist())


def tag(key: str, kind: str, value: object) -> dict[str, object]:
    return {"key": key, "type": kind, "value": value}


JAEGER = {
    "data": [
        {
            "traceID": "af7651916cd43dd8448eb211c80319c",  # without its leading zero
            "spans": [
                {
                    "traceID": "af7651916cd43dd8448eb211c80319c",
                    "spanID": "b7ad6b7169203331",
                    "flags": 1,
                    "operationName": "llm_request",
                    "references": [
                        {"refType": "FOLLOWS_FROM", "traceID": "1", "spanID": "2"},
                        {
                            "refType": "CHILD_OF",
                            "traceID": "af7651916cd43dd8448eb211c80319c",
                            "spanID": "7ad6b7169203331",
                        },
                    ],
                    "startTime": at(1.5) // 1000,
                    "duration": 2_250_000,
                    "tags": [
                        tag("span.kind", "string", "server"),
                        tag("otel.scope.name", "string", "vllm.tracing.otel"),
                        tag("otel.scope.version", "string", "0.32.0"),
                        tag("otel.status_code", "string", "ERROR"),
                        tag("otel.status_description", "string", "out of slots"),
                        tag("internal.span.format", "string", "otlp"),
                        tag("gen_ai.usage.prompt_tokens", "int64", 12),
                        tag("gen_ai.usage.completion_tokens", "int64", "9007199254740993"),
                        tag("gen_ai.latency.e2e", "float64", 2),
                        tag("gen_ai.latency.time_in_queue", "float64", 0.25),
                        tag("sampled", "bool", True),
                        tag("digest", "binary", base64.b64encode(b"\x00\xff").decode()),
                        tag("gen_ai.prompt", "string", "a secret question"),
                    ],
                    "logs": [
                        {
                            "timestamp": at(1.75) // 1000,
                            "fields": [tag("event", "string", "first token"), tag("index", "int64", 3)],
                        }
                    ],
                    "processID": "p1",
                    "warnings": None,
                }
            ],
            "processes": {
                "p1": {
                    "serviceName": "llm",
                    "tags": [tag("service.instance.id", "string", "i-7"), tag("process.pid", "int64", 42)],
                }
            },
        }
    ],
    "total": 0,
    "limit": 0,
    "offset": 0,
    "errors": None,
}


def test_a_jaeger_span_becomes_the_row_that_was_received_then() -> None:
    (row,) = rows(JAEGER)
    assert (row["trace_id"], row["span_id"], row["parent_span_id"]) == (TRACE, "b7ad6b7169203331", "07ad6b7169203331")
    assert (row["name"], row["kind"], row["status_code"], row["status_message"]) == (
        "llm_request",
        2,
        2,
        "out of slots",
    )
    assert (row["start_unix_ns"], row["end_unix_ns"]) == (at(1.5), at(3.75))
    assert (row["scope_name"], row["scope_version"]) == ("vllm.tracing.otel", "0.32.0")
    assert json.loads(row["resource"]) == {"process.pid": 42, "service.instance.id": "i-7", "service.name": "llm"}
    attributes = json.loads(row["attributes"])
    assert attributes == {
        "gen_ai.usage.prompt_tokens": 12,
        "gen_ai.usage.completion_tokens": 9007199254740993,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_in_queue": 0.25,
        "sampled": True,
        "digest": "AP8=",
        "gen_ai.prompt": "[content removed: 17 bytes]",
    }
    assert isinstance(attributes["gen_ai.latency.e2e"], float)
    assert json.loads(row["events"]) == [{"name": "first token", "unix_ns": at(1.75), "attributes": {"index": 3}}]
    (link,) = json.loads(row["links"])
    assert link == {
        "trace_id": f"{1:032x}",
        "span_id": f"{2:016x}",
        "attributes": {"opentracing.ref_type": "follows_from"},
    }


def jaeger_span(**changes: object) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(JAEGER)
    span = document["data"][0]["spans"][0]
    span.update(changes)
    return document


@pytest.mark.parametrize(
    ("references", "legacy", "parent"),
    [
        ([{"refType": "FOLLOWS_FROM", "traceID": TRACE, "spanID": "c"}], "", f"{12:016x}"),
        ([{"refType": "CHILD_OF", "traceID": "1", "spanID": "c"}], "", None),
        ([], "c", f"{12:016x}"),
        (None, "0", None),
        (
            [{"refType": "FOLLOWS_FROM", "traceID": TRACE, "spanID": "d"}, {"refType": "CHILD_OF", "traceID": TRACE, "spanID": "c"}],
            "",
            f"{12:016x}",
        ),
    ],
)  # fmt: skip
def test_the_parent_is_told_by_the_references(references: object, legacy: str, parent: str | None) -> None:
    (row,) = rows(jaeger_span(references=references, parentSpanID=legacy))
    assert row["parent_span_id"] == parent


def test_the_tag_error_is_a_status_where_there_is_no_other() -> None:
    assert [rows(jaeger_span(tags=[tag("error", "bool", value)]))[0]["status_code"] for value in (True, False)] == [
        2,
        0,
    ]
    both = [tag("error", "bool", True), tag("otel.status_code", "string", "OK")]
    assert rows(jaeger_span(tags=both))[0]["status_code"] == 1


def test_a_bad_jaeger_span_is_named_and_its_neighbours_stay() -> None:
    document = jaeger_span()
    good = document["data"][0]["spans"][0]
    document["data"][0]["spans"] += [good | {"spanID": "not hex"}, "text", good | {"spanID": "5", "startTime": None}]
    document["data"].append("no trace")
    found = read(document)
    assert found.spans is not None and found.spans.num_rows == 1
    assert found.counts == {"good": 1, "bad": 4}
    assert "f.json: item 1, trace 1: span 2 ('llm_request'): spanId has" in found.problems[0]
    assert "f.json: item 1, trace 2: holds no trace (write what Jaeger's /api/traces answers)" in found.problems[-1]


def test_one_trace_alone_and_an_index_document_are_jaeger_too() -> None:
    trace = copy.deepcopy(JAEGER["data"][0])  # type: ignore[index]
    assert rows(trace)[0]["span_id"] == "b7ad6b7169203331"
    span = trace["spans"][0]
    span["process"] = trace.pop("processes")["p1"]
    span["tags"] = {"span.kind": "client", "n": 5}
    (row,) = rows(trace)
    assert (row["kind"], json.loads(row["attributes"]), json.loads(row["resource"])["service.name"]) == (
        3,
        {"n": 5},
        "llm",
    )


def tempo(scopes: str = "scopeSpans", scope: str = "scope", ids: str = "base64") -> dict[str, Any]:
    def written(hexadecimal: str) -> str:
        return hexadecimal if ids == "hex" else base64.b64encode(bytes.fromhex(hexadecimal)).decode()

    span = {
        "traceId": written(TRACE),
        "spanId": written("b7ad6b7169203331"),
        "parentSpanId": written("07ad6b7169203331"),
        "name": "llm_request",
        "kind": "SPAN_KIND_SERVER",
        "startTimeUnixNano": str(at(1.5)),
        "endTimeUnixNano": str(at(3.75)),
        "attributes": [
            {"key": "input.value", "value": {"stringValue": "a secret"}},
            {"key": "n", "value": {"intValue": "5"}},
        ],
        "events": [{"timeUnixNano": str(at(1.75)), "name": "first token"}],
        "status": {"code": "STATUS_CODE_ERROR", "message": "m"},
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "llm"}}]}
    return {"resource": resource, scopes: [{scope: {"name": "vllm.tracing.otel"}, "spans": [span]}]}


@pytest.mark.parametrize(
    "document",
    [
        {"batches": [tempo()]},
        {"batches": [tempo(ids="hex")]},
        {"batches": [tempo("instrumentationLibrarySpans", "instrumentationLibrary")]},
        {"trace": {"resourceSpans": [tempo()]}, "metrics": {}},
        {"trace": {"batches": [tempo()]}},
    ],
)
def test_a_tempo_trace_becomes_the_row_that_was_received_then(document: object) -> None:
    (row,) = rows(document)
    assert (row["trace_id"], row["span_id"], row["parent_span_id"]) == (TRACE, "b7ad6b7169203331", "07ad6b7169203331")
    assert (row["kind"], row["status_code"], row["status_message"]) == (2, 2, "m")
    assert (row["start_unix_ns"], row["end_unix_ns"], row["scope_name"]) == (at(1.5), at(3.75), "vllm.tracing.otel")
    assert json.loads(row["attributes"]) == {"input.value": "[content removed: 8 bytes]", "n": 5}
    assert json.loads(row["resource"]) == {"service.name": "llm"}
    assert json.loads(row["events"])[0]["unix_ns"] == at(1.75)


def test_otlp_files_are_redacted_like_what_is_received() -> None:
    group = tempo(ids="hex")
    (row,) = rows({"resourceSpans": [group]})
    assert json.loads(row["attributes"])["input.value"] == "[content removed: 8 bytes]"


def series(name: str, *values: object, **labels: str) -> dict[str, object]:
    return {"metric": {"__name__": name, "job": "j", "instance": "i:1", **labels}, "values": list(values)}


def answer(*found: object) -> dict[str, object]:
    return {"status": "success", "data": {"resultType": "matrix", "result": list(found)}}


def test_a_range_answer_becomes_samples_by_target_and_time() -> None:
    first_s = at(0) // 10**9
    found = read(
        answer(
            series("vllm:num_requests_running", [first_s, "3"], [first_s + 15, "4"], model_name="m"),
            series("vllm:prompt_tokens_total", [first_s + 15.25, "7"], model_name="m"),
            series("vllm:num_requests_running", [first_s, "NaN"], instance="i:2"),
            series("vllm:num_requests_running", [first_s, "1"], cluster="c", instance="", pod="p-0"),
        )
    )
    assert (found.kind, found.format, found.counts) == ("scrapes", "prometheus-json", {"good": 5, "bad": 0})
    made = [
        one.samples.select("instance", "unix_ns", "running", "prompt_tokens", "model").row(0) for one in found.samples
    ]
    assert made == [
        ("j/i:1", at(0), 3.0, None, "m"),
        ("j/i:1", at(15), 4.0, None, "m"),
        ("j/i:1", at(15.25), None, 7.0, "m"),
        ("j/i:2", at(0), None, None, None),
        ("c/j/p-0", at(0), 1.0, None, None),
    ]


def test_bad_series_are_named_and_good_ones_stay() -> None:
    first_s = at(0) // 10**9
    good = series("vllm:num_requests_running", [first_s, "3"], [True, "4"], [first_s, None], "x")
    unnamed = {"metric": {"job": "j"}, "values": [[first_s, "1"]]}
    native = {"metric": {"__name__": "vllm:x", "instance": "i"}, "histograms": []}
    other = series("node_load1", [first_s, "1"], instance="node")
    found = read(answer(good, unnamed, "text", native, other))
    assert found.counts == {"good": 1, "bad": 5}
    told = "\n".join(found.problems)
    for text in ("series 1, values: holds 3 items", "series 2, metric.__name__: is missing", "series 3, metric: is no",
                 "series 4, values: is no list", "target j/node: holds metrics of no known engine"):  # fmt: skip
        assert text in told
    with pytest.raises(InputError, match="query_range"):
        read(answer(unnamed))
    with pytest.raises(InputError, match="resultType: is 'scalar', not matrix"):
        read({"status": "success", "data": {"resultType": "scalar", "result": [1, "2"]}})


def test_the_kind_of_such_files_is_told_by_content(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for document, kind in (
        (JAEGER, "spans"),
        ({"batches": [tempo()]}, "spans"),
        (answer(series("vllm:a", [1e9, "1"])), "scrapes"),
    ):
        path.write_text(json.dumps(document, indent=1))
        assert kind_of(path) == kind


def test_what_was_received_is_not_stored_again_from_jaeger(tmp_path: Path) -> None:
    span = engine_span(start_s=1.5, e2e_s=2.25)
    identity = span_table([span], TRACE).to_pylist()[0]["span_id"]
    document = jaeger_span(
        spanID=identity, references=[], tags=[tag("otel.scope.name", "string", "vllm.tracing.otel")]
        + [tag(key, "float64" if isinstance(value, float) else "int64", value) for key, value in span["attributes"].items()],
    )  # fmt: skip
    with bench(tmp_path) as b:
        b.receive([span], TRACE)
        b.run(60)
        (before,) = b.rows()
        b.writer.add_import(read(document))
        b.writer.add_import(read(document))
        (after,) = b.rows()
        assert (after["request_key"], after["queue_s"], after["e2e_s"]) == (
            before["request_key"],
            0.25,
            before["e2e_s"],
        )
        assert b.counter("spans") == 1


def test_a_jaeger_file_alone_gives_the_rows_of_the_engine(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        for _ in range(2):
            b.writer.add_import(read(JAEGER))
        (row,) = b.rows()
        assert (row["engine"], row["instance"], row["queue_s"], row["input_tokens"]) == ("vllm_v1", "i-7", 0.25, 12)
