"""OTLP/JSON gives the same rows as its protobuf twin, and bad values cost as little as possible."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_messages import (
    RECEIVED_UNIX_NS,
    START_UNIX_NS,
    captured_bodies,
    key_values,
    otlp_json,
    span_message,
    trace_request,
)
from shared_data import shared_path
from thorough import examples

from phasewise.collector.otlp_json import json_to_protobuf
from phasewise.collector.records import Scanned
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed

TRACE_ID, SPAN_ID = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"


def scan_json(document: object) -> Scanned:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return scan_traces(json_to_protobuf(body, "traces"), RECEIVED_UNIX_NS)


def request_with(*spans: object) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": list(spans)}]}]}


def span_json(**fields: object) -> dict[str, object]:
    return {
        "traceId": TRACE_ID,
        "spanId": SPAN_ID,
        "name": "I'm a server span",
        "kind": 2,
        "startTimeUnixNano": str(START_UNIX_NS),
        "endTimeUnixNano": str(START_UNIX_NS + 10**9),
        **fields,
    }


def attribute(value: object) -> dict[str, object]:
    return {"attributes": [{"key": "my.span.attr", "value": value}]}


def attribute_after(value: object) -> object:
    row = scan_json(request_with(span_json(**attribute(value)))).rows.to_pylist()[0]
    return json.loads(row["attributes"]).get("my.span.attr", "absent")


values = st.recursive(
    st.one_of(st.text(max_size=8), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.binary(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
attributes = st.dictionaries(st.text(min_size=1, max_size=6), values, max_size=4)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    return span_message(
        draw(attributes),
        name=draw(st.text(max_size=5)),
        kind=draw(st.integers(0, 7)),
        trace_id=draw(st.binary(min_size=15, max_size=17)),
        span_id=draw(st.binary(min_size=7, max_size=9)),
        parent_span_id=draw(st.sampled_from([b"", b"\x01" * 8, b"\x01"])),
        start_time_unix_nano=draw(st.integers(0, 2**64 - 1)),
        end_time_unix_nano=draw(st.integers(0, 2**64 - 1)),
        dropped_attributes_count=draw(st.integers(0, 2**32 - 1)),
        status=Status(code=draw(st.integers(0, 2)), message=draw(st.text(max_size=3))),  # type: ignore[arg-type]
        events=[Span.Event(name="e", time_unix_nano=5, attributes=key_values(draw(attributes)))],
        links=[Span.Link(trace_id=draw(st.binary(min_size=16, max_size=16)), span_id=b"\x09" * 8)],
    )


def wobbled(document: object, data: st.DataObject) -> object:
    """The same document as other senders write it: numbers for texts of integers, capitals in hex, unknown fields."""
    if isinstance(document, list):
        return [wobbled(item, data) for item in document]
    if not isinstance(document, dict):
        return document
    changed: dict[str, object] = {}
    for name, value in document.items():
        if name in ("traceId", "spanId", "parentSpanId") and data.draw(st.booleans()):
            changed[name] = str(value).upper()
        elif name in ("intValue", "startTimeUnixNano", "endTimeUnixNano", "timeUnixNano") and data.draw(st.booleans()):
            changed[name] = int(str(value))
        else:
            changed[name] = wobbled(value, data)
    if data.draw(st.booleans()):
        changed["notInTheSpecification"] = {"a": [1]}
    return changed


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_rows_equal_those_of_the_protobuf_twin(data: st.DataObject) -> None:
    request = trace_request(*data.draw(st.lists(spans(), max_size=3)), resource=data.draw(attributes))
    document = wobbled(otlp_json(request), data)
    twin = scan_traces(request.SerializeToString(), RECEIVED_UNIX_NS)
    scanned = scan_json(document)
    assert scanned.rows.to_pylist() == twin.rows.to_pylist()
    assert scanned.rejected == twin.rejected
    assert scanned.warned == twin.warned


def test_recordings_give_the_same_rows_in_both_encodings() -> None:
    files = sorted(shared_path("captures").glob("vllm-*/otlp-traces.ld.gz"))
    assert files
    for file in files:
        for body in captured_bodies(file):
            request = ExportTraceServiceRequest.FromString(body)
            assert scan_json(otlp_json(request)).rows.equals(scan_traces(body, RECEIVED_UNIX_NS).rows)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"intValue": "1523"}, 1523),
        ({"intValue": 1523}, 1523),
        ({"intValue": 1523.0}, 1523),
        ({"intValue": "9223372036854775807"}, 2**63 - 1),
        ({"intValue": "12.5"}, 12.5),
        ({"intValue": "many"}, "many"),
        ({"intValue": "9" * 25}, 1e25),
        ({"intValue": []}, None),
        ({"doubleValue": 1}, 1.0),
        ({"doubleValue": "0.25"}, 0.25),
        ({"doubleValue": "NaN"}, "NaN"),
        ({"doubleValue": {}}, None),
        ({"boolValue": True}, True),
        ({"boolValue": "true"}, True),
        ({"bytesValue": "AP8="}, "AP8="),
        ({"bytesValue": "AP8"}, "AP8="),
        ({"bytesValue": "***"}, None),
        ({"arrayValue": {"values": [{"intValue": "1"}, {"stringValue": "a"}, {}]}}, [1, "a", None]),
        ({"arrayValue": {}}, []),
        ({"kvlistValue": {"values": [{"key": "k", "value": {"boolValue": False}}]}}, {"k": False}),
        ({"unheardOf": 1}, None),
        ({}, None),
        (None, None),
        ({"stringValue": "lone \ud800 half"}, "lone \ufffd half"),
        ({"stringValue": "pair \U0001f600"}, "pair \U0001f600"),
    ],
)
def test_values(value: object, expected: object) -> None:
    assert attribute_after(value) == expected


def test_a_lone_surrogate_counts_as_sanitised() -> None:
    assert scan_json(request_with(span_json(name="\ud800"))).warned == {"sanitised": 1}


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    body = json.dumps(request_with(span_json(name="BAD!"))).encode().replace(b"BAD!", b"\xc3\x28\xff\xfe")
    scanned = scan_json(body)
    assert scanned.rows["name"].to_pylist() == ["\ufffd(\ufffd\ufffd"]
    assert scanned.warned == {"sanitised": 1}


def test_a_byte_order_mark_is_ignored() -> None:
    assert scan_json(b"\xef\xbb\xbf" + json.dumps(request_with(span_json())).encode()).rows.num_rows == 1


@pytest.mark.parametrize("trace_id", [TRACE_ID.upper(), "W47/95gDgQPSabYzgT/GDA=="])
def test_ids_in_capitals_or_base64_are_the_same_id(trace_id: str) -> None:
    assert scan_json(request_with(span_json(traceId=trace_id))).rows["trace_id"].to_pylist() == [TRACE_ID]


@pytest.mark.parametrize("trace_id", ["", "5b8efff7", "zz" * 16, "not an id at all", 7, None, "0" * 32, TRACE_ID[:-1]])
def test_other_ids_refuse_the_span_and_keep_its_neighbour(trace_id: object) -> None:
    scanned = scan_json(request_with(span_json(traceId=trace_id), span_json()))
    assert scanned.rows.num_rows == 1
    assert scanned.rejected == {"trace_id": 1}
    assert "traceId" in scanned.first_error


def test_names_of_enums_and_snake_case_are_understood() -> None:
    span = {
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "kind": "SPAN_KIND_CLIENT",
        "start_time_unix_nano": START_UNIX_NS,
        "status": {"code": "STATUS_CODE_ERROR"},
    }
    (row,) = scan_json({"resource_spans": [{"scope_spans": [{"spans": [span]}]}]}).rows.to_pylist()
    assert (row["kind"], row["status_code"]) == (3, 2)


@pytest.mark.parametrize("span", [None, 7, "text", [], {}])
def test_something_else_among_the_spans_costs_itself(span: object) -> None:
    scanned = scan_json(request_with(span, span_json()))
    assert (scanned.rows.num_rows, scanned.rejected) == (1, {"trace_id": 1})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\x0a\x05hello",
        b'{"resourceSpans": 1}',
        b'{"resourceSpans": {"a": 1}}',
        b'{"resourceSpans": [{"scopeSpans": "x"}]}',
        b'{"resourceSpans":' + b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_other_shapes_are_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        json_to_protobuf(body, "traces")


def test_an_empty_object_is_an_empty_request() -> None:
    assert json_to_protobuf(b"{}", "traces") == b""


def test_deep_values_are_cut() -> None:
    value: dict[str, object] = {"stringValue": "bottom"}
    for _ in range(60):
        value = {"arrayValue": {"values": [value]}}
    scanned = scan_json(request_with(span_json(**attribute(value)), span_json()))
    assert scanned.rows.num_rows == 2
    assert scanned.warned == {"too_deep": 1}
