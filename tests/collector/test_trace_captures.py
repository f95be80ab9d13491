"""Recorded spans of real engines, written as Tempo and Jaeger would give them, become the rows that were received then."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from captures import bodies
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from shared_data import shared_path
from writing import rulebook

from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.collector.redact import redact_spans
from phasewise.collector.scan import scan_traces

PROFILES = Profiles(rulebook().engines)
CAPTURES = ["vllm-light", "vllm-client-openai-v2", "vllm-startup-grpc", "sglang-light"]
KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
TYPES = {"string_value": "string", "bool_value": "bool", "int_value": "int64", "double_value": "float64"}


def recorded(capture: str) -> tuple[pa.Table, list[ExportTraceServiceRequest]]:
    """Rows as the receiver makes them, and the requests they came in."""
    sent = [body for _, body in bodies(shared_path("captures", capture))]
    rows = pa.concat_tables([redact_spans(scan_traces(body, time.time_ns()).rows)[0] for body in sent])
    return rows, [ExportTraceServiceRequest.FromString(body) for body in sent]


def imported(text: str) -> pa.Table:
    found = import_bytes(text.encode(), "f", PROFILES)
    assert found.problems == [] and found.spans is not None
    return found.spans


def told(table: pa.Table, whole_us: bool = False) -> list[dict[str, Any]]:
    """Rows without the time of receipt, JSON read, in an order of their own; times in whole microseconds where asked."""
    rows = []
    for row in table.drop_columns(["received_unix_ns"]).to_pylist():
        for name in ("resource", "attributes", "events", "links", "flags"):
            row[name] = json.loads(row[name] or "[]")
        if whole_us:
            row["start_unix_ns"] //= 1000
            row["end_unix_ns"] //= 1000
            for event in row["events"]:
                event["unix_ns"] //= 1000
        rows.append(row)
    return sorted(rows, key=lambda row: (row["trace_id"], row["span_id"]))


@pytest.mark.parametrize("capture", CAPTURES)
def test_tempo_gives_back_what_was_received(capture: str) -> None:
    rows, requests = recorded(capture)
    lines = [json.dumps({"batches": MessageToDict(request)["resourceSpans"]}) for request in requests]
    assert told(imported("\n".join(lines))) == told(rows)


@pytest.mark.parametrize("capture", CAPTURES)
def test_jaeger_gives_back_what_was_received(capture: str) -> None:
    rows, requests = recorded(capture)
    traces: dict[str, dict[str, Any]] = {}
    for request in requests:
        for group in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            process = {
                "serviceName": names.get("service.name", ""),
                "tags": [tag(pair) for pair in group.resource.attributes if pair.key != "service.name"],
            }
            for scoped in group.scope_spans:
                for span in scoped.spans:
                    trace = traces.setdefault(span.trace_id.hex(), {"spans": [], "processes": {}})
                    name = f"p{len(trace['processes']) + 1}"
                    trace["processes"][name] = process
                    scope = {"otel.scope.name": scoped.scope.name, "otel.scope.version": scoped.scope.version}
                    trace["spans"].append(jaeger_span(span, name, scope))
    text = json.dumps({"data": [{"traceID": name.lstrip("0"), **trace} for name, trace in traces.items()]})
    expected = told(rows, whole_us=True)
    found = told(imported(text), whole_us=True)
    for row in found:  # what Jaeger adds to a link, and an end it keeps as a whole number of microseconds
        for link in row["links"]:
            assert link["attributes"].pop("opentracing.ref_type") == "follows_from"
    for row, other in zip(found, expected, strict=True):
        assert abs(row.pop("end_unix_ns") - other.pop("end_unix_ns")) <= 1
        for link in other["links"]:
            link["attributes"] = {}  # Jaeger keeps none
        lists = {key: json.dumps(value) for key, value in other["attributes"].items() if isinstance(value, list)}
        other["attributes"] |= lists
        assert row == other


def tag(pair: KeyValue) -> dict[str, Any]:
    which = pair.value.WhichOneof("value")
    assert which is not None
    if which == "array_value":  # Jaeger knows no lists: they arrive as their JSON text
        return text_tag(pair.key, json.dumps([value.string_value for value in pair.value.array_value.values]))
    return {"key": pair.key, "type": TYPES[which], "value": getattr(pair.value, which)}


def text_tag(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "type": "string", "value": value}


def jaeger_span(span: Span, process: str, scope: Mapping[str, str]) -> dict[str, Any]:
    """As the Collector's translation writes it: ids without leading zeros, whole microseconds, OTLP's own fields as tags."""
    trace_id = span.trace_id.hex().lstrip("0")
    references = [
        {"refType": "FOLLOWS_FROM", "traceID": link.trace_id.hex().lstrip("0"), "spanID": link.span_id.hex()}
        for link in span.links
    ]
    if span.parent_span_id:
        parent = {"refType": "CHILD_OF", "traceID": trace_id, "spanID": span.parent_span_id.hex().lstrip("0")}
        references.insert(0, parent)
    tags = [tag(pair) for pair in span.attributes]
    tags += [text_tag(key, value) for key, value in scope.items() if value]
    if span.kind:
        tags.append(text_tag("span.kind", KINDS[span.kind]))
    if span.status.code:
        tags.append(text_tag("otel.status_code", {1: "OK", 2: "ERROR"}[span.status.code]))
    if span.status.message:
        tags.append(text_tag("otel.status_description", span.status.message))
    logs = [
        {
            "timestamp": event.time_unix_nano // 1000,
            "fields": [text_tag("event", event.name), *(tag(pair) for pair in event.attributes)],
        }
        for event in span.events
    ]
    return {
        "traceID": trace_id,
        "spanID": span.span_id.hex().lstrip("0"),
        "operationName": span.name,
        "references": references,
        "startTime": span.start_time_unix_nano // 1000,
        "duration": (span.end_time_unix_nano - span.start_time_unix_nano) // 1000,
        "tags": tags,
        "logs": logs,
        "processID": process,
    }
