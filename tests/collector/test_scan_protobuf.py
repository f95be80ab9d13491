"""Both scanners against the objects that protobuf's own library makes of the same bytes, on requests within every limit."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import Any

from compiled_scanner import compiled_scan
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_messages import RECEIVED_UNIX_NS, START_UNIX_NS, any_value
from otlp_requests import requests
from thorough import examples

from phasewise.collector.scan import scan_traces

texts = st.text(max_size=30)
keys = st.text(min_size=1, max_size=20)
scalars = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(),
    st.binary(max_size=20),
    st.just(AnyValue()),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=10,
)
pairs = st.lists(st.builds(lambda key, value: KeyValue(key=key, value=any_value(value)), keys, values), max_size=8)
ids = st.tuples(st.binary(min_size=16, max_size=16).filter(any), st.binary(min_size=8, max_size=8).filter(any))
times = st.integers(START_UNIX_NS, START_UNIX_NS + 10**12)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    trace_id, span_id = draw(ids)
    start, end = sorted((draw(times), draw(times)))
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=draw(st.one_of(st.just(b""), st.binary(min_size=8, max_size=8).filter(any))),
        name=draw(texts),
        kind=draw(st.sampled_from(Span.SpanKind.values())),
        start_time_unix_nano=start,
        end_time_unix_nano=end,
        attributes=draw(pairs),
        events=draw(st.lists(st.builds(Span.Event, name=texts, time_unix_nano=times, attributes=pairs), max_size=3)),
        links=[
            Span.Link(trace_id=one, span_id=two, attributes=draw(pairs)) for one, two in draw(st.lists(ids, max_size=2))
        ],
        status=draw(st.one_of(st.none(), st.builds(Status, code=st.integers(0, 2), message=texts))),
        dropped_attributes_count=draw(st.integers(0, 9)),
        dropped_events_count=draw(st.integers(0, 9)),
    )


any_requests = requests(pairs, texts, st.lists(spans(), max_size=3))


def plain(value: AnyValue) -> Any:
    """What JSON has for it: bytes as base64, and a text for what is no number there."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return table(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    found = getattr(value, kind)
    if kind == "double_value" and not math.isfinite(found):
        return "NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity"
    return found


def table(found: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: plain(one.value) for one in found}


def expected(request: ExportTraceServiceRequest) -> list[dict[str, Any]]:
    parsed = ExportTraceServiceRequest.FromString(request.SerializeToString())
    return [
        {
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_span_id": span.parent_span_id.hex() or None,
            "name": span.name,
            "kind": span.kind,
            "start_unix_ns": span.start_time_unix_nano,
            "end_unix_ns": span.end_time_unix_nano,
            "status_code": span.status.code,
            "status_message": span.status.message or None,
            "scope_name": scope.scope.name or None,
            "scope_version": scope.scope.version or None,
            "resource": table(group.resource.attributes),
            "attributes": table(span.attributes),
            "events": [
                {"name": one.name, "unix_ns": one.time_unix_nano, "attributes": table(one.attributes)}
                for one in span.events
            ],
            "links": [
                {"trace_id": one.trace_id.hex(), "span_id": one.span_id.hex(), "attributes": table(one.attributes)}
                for one in span.links
            ],
            "dropped": span.dropped_attributes_count + span.dropped_events_count,
        }
        for group in parsed.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


@settings(max_examples=examples(100), deadline=None)
@given(any_requests)
def test_rows_are_what_protobuf_decodes(request: ExportTraceServiceRequest) -> None:
    wanted = expected(request)
    for scan in (scan_traces, compiled_scan()):
        found = scan(request.SerializeToString(), RECEIVED_UNIX_NS)
        assert found.rejected == {}
        rows = found.rows.to_pylist()
        for row in rows:
            for name, empty in (("resource", "{}"), ("attributes", "{}"), ("events", "[]"), ("links", "[]")):
                row[name] = json.loads(row[name] or empty)
            for name in ("status_message", "scope_name", "scope_version"):
                row[name] = row[name] or None
        assert [{name: row[name] for name in wanted[0]} for row in rows] == wanted if wanted else rows == []
