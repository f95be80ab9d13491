"""OTLP traces to columns: what is kept exactly, what is cut, what is refused, and that nothing from outside breaks it."""

from __future__ import annotations

import gzip
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_messages import (
    RECEIVED_UNIX_NS,
    START_UNIX_NS,
    any_value,
    captured_bodies,
    key_values,
    span_message,
    trace_request,
)
from shared_data import shared_path

from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.records import SPAN_SCHEMA, Scanned
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed, TooLarge


def scan(*spans: Span, **request: object) -> Scanned:
    return scan_traces(trace_request(*spans, **request).SerializeToString(), RECEIVED_UNIX_NS)  # type: ignore[arg-type]


def only_row(scanned: Scanned) -> dict[str, object]:
    (row,) = scanned.rows.to_pylist()
    assert isinstance(row, dict)
    return row


def attributes_of(scanned: Scanned) -> dict[str, object]:
    found: dict[str, object] = json.loads(str(only_row(scanned)["attributes"]))
    return found


def flags_of(scanned: Scanned) -> list[str]:
    return json.loads(str(only_row(scanned)["flags"] or "[]"))  # type: ignore[no-any-return]


def test_every_column_of_a_full_span() -> None:
    span = span_message(
        {"gen_ai.usage.prompt_tokens": 97, "gen_ai.latency.e2e": 5.25, "ok": True},
        parent_span_id=bytes.fromhex("00f067aa0ba902b7"),
        trace_id=bytes.fromhex("00000000000000000102030405060708"),  # SGLang: 64-bit ids, padded
        name=" Req 1a2b3c4d",
        status=Status(code=Status.STATUS_CODE_ERROR, message="boom"),
        events=[Span.Event(name="schedule", time_unix_nano=START_UNIX_NS + 1, attributes=key_values({"slot": 3}))],
        links=[Span.Link(trace_id=b"\x01" * 16, span_id=b"\x02" * 8)],
        dropped_attributes_count=37,
        dropped_events_count=1,
    )
    request = trace_request(span, resource={"service.name": "engine", "host.name": "a"})
    request.resource_spans[0].scope_spans[0].scope.version = "1.2"
    scanned = scan_traces(request.SerializeToString(), RECEIVED_UNIX_NS)
    assert scanned.rows.schema.equals(SPAN_SCHEMA)
    assert (scanned.rejected, scanned.warned, scanned.first_error) == ({}, {}, "")
    assert only_row(scanned) == {
        "trace_id": "00000000000000000102030405060708",
        "span_id": span.span_id.hex(),
        "parent_span_id": "00f067aa0ba902b7",
        "name": " Req 1a2b3c4d",
        "kind": 2,
        "start_unix_ns": START_UNIX_NS,
        "end_unix_ns": START_UNIX_NS + 2_000_000_000,
        "status_code": 2,
        "status_message": "boom",
        "scope_name": "vllm.tracing.otel",
        "scope_version": "1.2",
        "resource": '{"host.name":"a","service.name":"engine"}',
        "attributes": '{"gen_ai.usage.prompt_tokens":97,"gen_ai.latency.e2e":5.25,"ok":true}',
        "events": f'[{{"name":"schedule","unix_ns":{START_UNIX_NS + 1},"attributes":{{"slot":3}}}}]',
        "links": f'[{{"trace_id":"{"01" * 16}","span_id":"{"02" * 8}","attributes":{{}}}}]',
        "dropped": 38,
        "flags": None,
        "received_unix_ns": RECEIVED_UNIX_NS,
    }


def test_values_of_every_kind_are_valid_json() -> None:
    scanned = scan(
        span_message(
            {
                "bytes": b"\x00\xff",
                "list": [1, 2.5, "x", [True]],
                "map": {"a": 1, "b": {"c": []}},
                "nothing": AnyValue(),
                "nan": math.nan,
                "up": math.inf,
                "down": -math.inf,
                "nested": [math.nan],
                "big": (1 << 63) - 1,
                "text": 'quote " backslash \\ nul \x00 rtl \u202e four \U0001f600',
            }
        )
    )
    text = str(only_row(scanned)["attributes"])
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == {
        "bytes": "AP8=",
        "list": [1, 2.5, "x", [True]],
        "map": {"a": 1, "b": {"c": []}},
        "nothing": None,
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "nested": ["NaN"],
        "big": (1 << 63) - 1,
        "text": 'quote " backslash \\ nul \x00 rtl \u202e four \U0001f600',
    }


def test_last_of_equal_keys_wins_and_is_counted() -> None:
    span = span_message()
    span.attributes.extend([KeyValue(key="a", value=any_value(1)), KeyValue(key="a", value=any_value(2))])
    scanned = scan(span, span_message())
    assert json.loads(scanned.rows["attributes"][0].as_py()) == {"a": 2}
    assert scanned.warned == {"duplicate_key": 1}
    assert scanned.rows["flags"].to_pylist() == ['["duplicate_key"]', None]


def test_too_many_attributes_are_cut_but_known_keys_stay() -> None:
    many: dict[str, object] = {f"noise.{i}": i for i in range(10_000)}
    scanned = scan(span_message({**many, "gen_ai.usage.input_tokens": 7, "phasewise.queue.kv_s": 0.5}))
    kept = attributes_of(scanned)
    assert len(kept) == SPAN_LIMITS.attributes + 2
    assert kept["gen_ai.usage.input_tokens"] == 7
    assert scanned.warned == {"attributes_cut": 1}
    assert flags_of(scanned) == ["attributes_cut"]


def test_even_known_keys_are_bounded() -> None:
    scanned = scan(span_message({f"gen_ai.request.{i}": i for i in range(5_000)}))
    assert len(attributes_of(scanned)) == SPAN_LIMITS.attributes + SPAN_LIMITS.known_attributes


def test_long_keys_go_and_long_values_are_marked() -> None:
    scanned = scan(span_message({"k" * 257: 1, "": 2, "é" * 128: 3, "text": "ä" * 3000, "list": ["x" * 100] * 100}))
    kept = attributes_of(scanned)
    assert set(kept) == {"é" * 128, "text", "list"}
    assert kept["text"] == "ä" * 1024 + "…[cut from 6000 bytes]"
    assert str(kept["list"]).startswith('["xxx')
    assert "…[cut from" in str(kept["list"])
    assert sorted(flags_of(scanned)) == ["key_dropped", "truncated"]


def test_step_arrays_of_our_own_engine_are_never_cut() -> None:
    starts = [START_UNIX_NS + i for i in range(256)]
    scanned = scan(span_message({"phasewise.step.start_unix_ns": starts}, name="engine.steps"))
    assert attributes_of(scanned)["phasewise.step.start_unix_ns"] == starts
    assert not scanned.warned


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"trace_id": b""}, "trace_id", "has 0 bytes"),
        ({"trace_id": bytes(16)}, "trace_id", "all zero"),
        ({"trace_id": b"\x01" * 17}, "trace_id", "has 17 bytes"),
        ({"span_id": b"\x01" * 7}, "span_id", "has 7 bytes"),
        ({"span_id": bytes(8)}, "span_id", "all zero"),
        ({"start_time_unix_nano": 0}, "start_missing", "startTimeUnixNano"),
        ({"start_time_unix_nano": 1 << 63}, "time_range", "2262"),
        ({"end_time_unix_nano": (1 << 64) - 1}, "time_range", "2262"),
    ],
)
def test_a_bad_span_is_refused_and_its_neighbours_stay(fields: dict[str, object], reason: str, words: str) -> None:
    bad = span_message(None, name="bad\x1b[31m", **fields)
    scanned = scan(span_message(), bad, span_message())
    assert scanned.rows.num_rows == 2
    assert scanned.rejected == {reason: 1}
    assert scanned.first_error.startswith("span 2 ('bad\\x1b[31m'): ")
    assert words in scanned.first_error


def test_an_end_before_its_start_is_kept_and_flagged() -> None:
    scanned = scan(span_message(end_time_unix_nano=START_UNIX_NS - 37_000_000))
    assert only_row(scanned)["end_unix_ns"] == START_UNIX_NS - 37_000_000
    assert flags_of(scanned) == ["negative_duration"]


def test_odd_parents() -> None:
    scanned = scan(span_message(parent_span_id=bytes(8)), span_message(parent_span_id=b"abc"))
    assert scanned.rows["parent_span_id"].to_pylist() == [None, None]
    assert scanned.rows["flags"].to_pylist() == [None, '["parent_invalid"]']


def test_a_start_far_in_the_future_is_kept_and_flagged() -> None:
    ahead = RECEIVED_UNIX_NS + 601 * 10**9
    assert flags_of(scan(span_message(start_time_unix_nano=ahead, end_time_unix_nano=ahead))) == ["future"]


def test_many_events_and_links_are_bounded() -> None:
    span = span_message(
        events=[Span.Event(name="e", time_unix_nano=START_UNIX_NS)] * 10_000,
        links=[Span.Link(trace_id=b"\x01" * 16, span_id=b"\x02" * 8)] * 10_000,
    )
    scanned = scan(span)
    assert len(json.loads(str(only_row(scanned)["events"]))) == SPAN_LIMITS.events
    assert len(json.loads(str(only_row(scanned)["links"]))) == SPAN_LIMITS.links
    assert flags_of(scanned) == ["events_cut", "links_cut"]


def damaged(span: Span, **request: object) -> bytes:
    """The request with each text `BAD!` made invalid UTF-8 of the same length."""
    return trace_request(span, **request).SerializeToString().replace(b"BAD!", b"\xc3\x28\xff\xfe")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "span",
    [
        span_message(name="BAD!"),
        span_message({"BAD!": 1}),
        span_message({"key": "BAD!"}),
        span_message({"key": [{"deep": "BAD!"}]}),
        span_message(status=Status(message="BAD!")),
        span_message(events=[Span.Event(name="BAD!")]),
        span_message(trace_state="BAD!"),
    ],
)
def test_invalid_utf8_in_a_span_is_repaired(span: Span) -> None:
    request = ExportTraceServiceRequest()
    request.ParseFromString(trace_request(span_message(), span_message()).SerializeToString())
    body = damaged(span) + request.SerializeToString()
    scanned = scan_traces(body, RECEIVED_UNIX_NS)
    assert scanned.rows.num_rows == 3
    assert not scanned.rejected
    if not span.trace_state:  # not kept, so nothing of it shows
        assert scanned.warned == {"sanitised": 1}
        assert scanned.rows["flags"].to_pylist() == ['["sanitised"]', None, None]


@pytest.mark.parametrize("request_part", [{"resource": {"service.name": "BAD!"}}, {"scope": "BAD!"}])
def test_invalid_utf8_beside_the_spans_is_repaired(request_part: dict[str, object]) -> None:
    scanned = scan_traces(damaged(span_message(), **request_part), RECEIVED_UNIX_NS)
    assert scanned.rows.num_rows == 1
    assert "\ufffd" in str(only_row(scanned)["resource"]) + str(only_row(scanned)["scope_name"])


def nested(depth: int) -> AnyValue:
    value = any_value("bottom")
    for _ in range(depth):
        value = any_value([value])
    return value


@pytest.mark.parametrize("depth", [33, 34, 60, 90])
def test_deep_nesting_costs_the_value_and_not_the_batch(depth: int) -> None:
    # Built by hand: protobuf itself would refuse to parse it, and may refuse to write it.
    value = b"\x0a\x01x"
    for _ in range(depth):
        value = length_delimited(5, length_delimited(1, value))
    pair = length_delimited(1, b"deep") + length_delimited(2, value)
    span = span_message({"flat": 1}).SerializeToString() + length_delimited(9, pair)
    body = length_delimited(1, length_delimited(2, length_delimited(2, span)))
    scanned = scan_traces(body + trace_request(span_message()).SerializeToString(), RECEIVED_UNIX_NS)
    assert scanned.rows.num_rows == 2
    assert json.loads(scanned.rows["attributes"][0].as_py())["flat"] == 1
    assert scanned.warned == {"too_deep": 1}


def length_delimited(number: int, data: bytes) -> bytes:
    size, length = b"", len(data)
    while length > 0x7F:
        size += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + data


@pytest.mark.parametrize(
    "body", [b"\xff" * 50, b"not otlp at all", b"\x0a\x05hello", b"\x0a", b"\x0a\xff\xff\xff\xff\x0f"]
)
def test_garbage_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed, match="OTLP request"):
        scan_traces(body, RECEIVED_UNIX_NS)


def test_an_empty_request_has_no_rows() -> None:
    assert scan_traces(b"", RECEIVED_UNIX_NS).rows.num_rows == 0
    assert scan().rows.num_rows == 0


def test_a_truncated_request_is_malformed() -> None:
    body = trace_request(*[span_message({"a": 1}) for _ in range(5)]).SerializeToString()
    for cut in range(1, len(body)):
        with pytest.raises(Malformed):
            scan_traces(body[:cut], RECEIVED_UNIX_NS)


def test_fields_of_a_group_may_come_in_any_order_and_in_parts() -> None:
    request = trace_request(span_message(), resource={"a": 1, "b": 2})
    group = request.resource_spans[0]
    first, second = (length_delimited(1, length_delimited(1, p.SerializeToString())) for p in group.resource.attributes)
    scope = length_delimited(2, group.scope_spans[0].SerializeToString())
    body = length_delimited(1, first + scope + second)
    assert only_row(scan_traces(body, RECEIVED_UNIX_NS))["resource"] == '{"a":1,"b":2}'


def test_a_span_that_cannot_be_decoded_costs_itself_alone() -> None:
    request = trace_request(span_message(), span_message())
    group = request.resource_spans[0]
    spans = length_delimited(2, b"\x0a\x10short") + length_delimited(2, span_message().SerializeToString())
    body = length_delimited(1, length_delimited(1, group.resource.SerializeToString()) + length_delimited(2, spans))
    scanned = scan_traces(body, RECEIVED_UNIX_NS)
    assert scanned.rows.num_rows == 1
    assert scanned.rejected == {"undecodable": 1}


def test_ten_thousand_spans_keep_their_order() -> None:
    spans = [span_message({"i": i}) for i in range(10_000)]
    scanned = scan(*spans)
    assert scanned.rows["span_id"].to_pylist() == [span.span_id.hex() for span in spans]


@pytest.mark.parametrize("part", [b"\x0a\x00", b"\x10\x01", b"\x0a\x02\x12\x00"])
def test_millions_of_empty_parts_are_too_large(part: bytes) -> None:
    with pytest.raises(TooLarge, match="smaller batches"):
        scan_traces(part * 1_000_000, RECEIVED_UNIX_NS)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_flipped_bits_never_do_more_than_refuse(random_source: random.Random, flips: int) -> None:
    body = bytearray(
        trace_request(
            *[span_message({"a": "text", "b": [1, 2], "c": {"d": 1.5}}) for _ in range(3)]
        ).SerializeToString()
    )
    for _ in range(flips):
        body[random_source.randrange(len(body))] ^= 1 << random_source.randrange(8)
    try:
        scanned = scan_traces(bytes(body), RECEIVED_UNIX_NS)
    except Malformed:
        return
    for row in scanned.rows.to_pylist():
        assert len(row["trace_id"]) == 32
        for column in ("attributes", "resource", "events", "links", "flags"):
            json.loads(row[column] or "null", parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_rows_or_malformed(body: bytes) -> None:
    try:
        scan_traces(body, RECEIVED_UNIX_NS)
    except Malformed:
        return


def test_recordings_of_real_engines_are_read_as_they_were_decoded() -> None:
    folders = sorted(path.parent for path in shared_path("captures").glob("*/otlp-traces.ld.gz"))
    assert folders
    for folder in folders:
        with gzip.open(folder / "spans.jsonl.gz", "rt") as lines:
            expected = [json.loads(line) for line in lines]
        rows: list[dict[str, object]] = []
        for body in captured_bodies(folder / "otlp-traces.ld.gz"):
            scanned = scan_traces(body, RECEIVED_UNIX_NS + 10**18)
            assert (scanned.rejected, scanned.warned) == ({}, {})
            rows += scanned.rows.to_pylist()
        assert len(rows) == len(expected)
        for row, span in zip(rows, expected, strict=True):
            assert json.loads(str(row["attributes"])) == span["attrs"]
            assert json.loads(str(row["resource"])) == span["resource"]
            assert len(json.loads(str(row["events"] or "[]"))) == len(span["events"])
            assert len(json.loads(str(row["links"] or "[]"))) == span["links"]
            for column, name in (("trace_id", "trace_id"), ("span_id", "span_id"), ("name", "name"), ("kind", "kind")):
                assert row[column] == span[name]
            assert (row["start_unix_ns"], row["end_unix_ns"]) == (span["start"], span["end"])
            assert (row["parent_span_id"] or "", row["scope_name"] or "") == (span["parent"], span["scope"])
            assert row["status_code"] == span["status"]
