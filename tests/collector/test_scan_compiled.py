"""The compiled scanner against the plain one: the same table, counts and errors, on whole, odd, cut and hostile bytes."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections.abc import Iterator

import pytest
from compiled_scanner import compiled_scan
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_messages import RECEIVED_UNIX_NS, START_UNIX_NS, any_value, captured_bodies, span_message, trace_request
from otlp_requests import requests
from shared_data import shared_path
from thorough import examples

from phasewise.collector.records import Scanned
from phasewise.collector.scan import scan_traces
from phasewise.rules.errors import InputError


def outcome(scan: object, body: bytes) -> object:
    try:
        found = scan(body, RECEIVED_UNIX_NS)  # type: ignore[operator]
    except InputError as error:
        return type(error), str(error)
    assert isinstance(found, Scanned)
    found.rows.validate(full=True)
    return found.rows.to_pylist(), found.rows.schema, found.rejected, found.warned, found.first_error


def assert_equal(body: bytes) -> None:
    assert outcome(compiled_scan(), body) == outcome(scan_traces, body)
    with contextlib.suppress(InputError):
        assert_names_are_told(compiled_scan()(body, RECEIVED_UNIX_NS))


def assert_names_are_told(found: Scanned) -> None:
    """All that stand in the rows, where any are told."""
    if found.names is None:
        return
    for column in ("resource", "attributes", "events", "links"):
        for text in found.rows[column].to_pylist():
            assert found.names >= set(names_in(json.loads(text or "null")))


def names_in(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and "unix_ns" in item and "attributes" in item:
                yield str(item["name"])
                yield from names_in(item["attributes"])
            elif isinstance(item, dict) and "trace_id" in item and "attributes" in item:
                yield from names_in(item["attributes"])
            else:
                yield from names_in(item)
    elif isinstance(value, dict):
        yield from value
        yield from names_in(list(value.values()))


HOSTILE = [
    "",
    "\x00",
    '"',
    "\\",
    "\ufffd",
    "\u2028",
    "é",
    "\U0001f600",
    "a" * 7,
    "b" * 8,
    '1234567"',
    "gen_ai.prompt",
    "\x7f\x1f",
]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=24), st.builds("x".__mul__, st.integers(2000, 2100)))
keys = st.one_of(
    st.sampled_from(["a", "b", "phasewise.step.x", "gen_ai.usage.input_tokens", "k" * 256, "k" * 257]), texts
)
doubles = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1e16, 1e-5, 5e-324, math.inf, math.nan, 123456.0]))
scalars = st.one_of(
    texts, st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), doubles, st.binary(max_size=40), st.just(AnyValue())
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
pairs = st.lists(st.builds(lambda key, value: KeyValue(key=key, value=any_value(value)), keys, values), max_size=6)
times = st.one_of(
    st.integers(START_UNIX_NS - 10, START_UNIX_NS + 10), st.sampled_from([0, 1 << 63, (1 << 64) - 1, START_UNIX_NS * 2])
)
usual_times = st.integers(START_UNIX_NS, START_UNIX_NS + 1000)
events = st.lists(st.builds(Span.Event, name=texts, time_unix_nano=times, attributes=pairs), max_size=3)
links = st.lists(
    st.builds(
        Span.Link,
        trace_id=st.sampled_from([b"\1" * 16, bytes(16), b""]),
        span_id=st.sampled_from([b"\2" * 8, b"\2" * 7]),
        trace_state=texts,
        attributes=pairs,
        flags=st.integers(0, (1 << 32) - 1),
    ),
    max_size=3,
)
spans = st.builds(
    Span,
    trace_id=st.one_of(st.binary(min_size=16, max_size=16), st.sampled_from([bytes(16), b"x"])),
    span_id=st.one_of(st.binary(min_size=8, max_size=8), st.sampled_from([bytes(8), b"x"])),
    parent_span_id=st.sampled_from([b"", bytes(8), b"\3" * 8, b"abc"]),
    name=texts,
    kind=st.integers(0, 5),
    start_time_unix_nano=times,
    end_time_unix_nano=times,
    attributes=pairs,
    events=events,
    links=links,
    status=st.one_of(st.none(), st.builds(Status, code=st.integers(0, 2), message=texts)),
    trace_state=texts,
    flags=st.integers(0, (1 << 32) - 1),
    dropped_attributes_count=st.sampled_from([0, 1, (1 << 32) - 1]),
    dropped_events_count=st.integers(0, 3),
)
usual_pairs = st.dictionaries(
    st.sampled_from(["a", "bb", "ccc", "key-that-is-longer"]),
    st.one_of(st.sampled_from(HOSTILE[:4]), doubles, st.integers(-9, 9)),
).map(lambda found: [KeyValue(key=key, value=any_value(value)) for key, value in found.items()])
usual_spans = st.builds(
    Span,
    trace_id=st.just(b"\1" * 16),
    span_id=st.just(b"\2" * 8),
    name=st.sampled_from(["llm_request", "é", ""]),
    start_time_unix_nano=usual_times,
    end_time_unix_nano=st.just(START_UNIX_NS + 2000),
    attributes=usual_pairs,
    events=st.lists(st.builds(Span.Event, name=texts, time_unix_nano=usual_times, attributes=usual_pairs), max_size=2),
)


any_requests = requests(pairs, texts, st.lists(st.one_of(usual_spans, spans), max_size=4))


@settings(max_examples=examples(400), deadline=None)
@given(any_requests)
def test_whole_requests_give_the_same_table(request: ExportTraceServiceRequest) -> None:
    assert_equal(request.SerializeToString())


@settings(max_examples=examples(200), deadline=None)
@given(any_requests, st.data())
def test_a_cut_request_gives_the_same_error(request: ExportTraceServiceRequest, data: st.DataObject) -> None:
    body = request.SerializeToString()
    assert_equal(body[: data.draw(st.integers(0, len(body)))])


@settings(max_examples=examples(400), deadline=None)
@given(any_requests, st.randoms(use_true_random=False), st.integers(1, 6))
def test_changed_bytes_give_the_same(request: ExportTraceServiceRequest, source: random.Random, changes: int) -> None:
    body = bytearray(request.SerializeToString())
    for _ in range(changes if body else 0):
        at = source.randrange(len(body))
        choice = source.randrange(4)
        if choice == 0:
            body[at] ^= 1 << source.randrange(8)
        elif choice == 1:
            body[at] = source.randrange(256)
        elif choice == 2:
            body[at] = min(255, body[at] + 1)
        else:
            body[at : at + 1] = source.randbytes(source.randrange(3))
            body = body or bytearray(b"\n")
    assert_equal(bytes(body))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_inside_a_span_give_the_same(data: bytes) -> None:
    whole = span_message({"a": 1}).SerializeToString()
    assert_equal(data)
    assert_equal(in_request(whole + data))
    assert_equal(in_request(data, whole))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20), st.integers(0, 7), st.binary(max_size=12), st.integers(0, 3))
def test_fields_of_any_number_and_kind_give_the_same(number: int, wire: int, data: bytes, level: int) -> None:
    odd = varint(number << 3 | wire) + (varint(len(data)) if wire == 2 else b"") + data
    pair = length_delimited(1, b"key") + length_delimited(2, length_delimited(1, b"text"))
    event = length_delimited(2, b"name")
    whole = span_message({"a": 1}).SerializeToString()
    extra = (odd, length_delimited(9, pair + odd), length_delimited(11, event + odd), length_delimited(15, odd))[level]
    assert_equal(in_request(whole, whole + extra, whole))
    assert_equal(in_request(whole + length_delimited(9, length_delimited(1, b"v") + length_delimited(2, odd))))
    assert_equal(in_request(whole) + odd)


@pytest.mark.parametrize("count", [127, 128, 129, 700])
def test_as_many_attributes_as_there_may_be_and_more(count: int) -> None:
    many = {f"key.{i}": i for i in range(count)}
    assert_equal(trace_request(span_message(many), span_message({"b": 1}), span_message(many)).SerializeToString())


@pytest.mark.parametrize("size", [2047, 2048, 2049, 65_000, 70_000])
@pytest.mark.parametrize("key", ["x", "gen_ai.x", "phasewise.x"])
def test_long_lists_and_texts(key: str, size: int) -> None:
    assert_equal(trace_request(span_message({key: [1] * (size // 2), "t": "é" * (size // 2)})).SerializeToString())
    assert_equal(trace_request(span_message({key: ["\x01" * 300] * (size // 300)})).SerializeToString())


def test_more_spans_than_a_chunk_holds_with_odd_ones_between() -> None:
    made = [span_message({"i": i}, **({"parent_span_id": b"abc"} if i % 1000 == 7 else {})) for i in range(9000)]
    made[4096].trace_id = b""
    body = trace_request(*made[:5000]).SerializeToString() + trace_request(*made[5000:], scope="b").SerializeToString()
    assert_equal(body)


def test_doubles_are_written_as_python_does() -> None:
    source = random.Random(5)
    bits = [source.getrandbits(64) for _ in range(20_000)]
    numbers = [struct.unpack("<d", struct.pack("<Q", b))[0] for b in bits]
    numbers += [math.ldexp(m, e) for e in range(-1074, 1023, 3) for m in (1.0, -1.0, 1.5)] + [
        10.0**e for e in range(-320, 309)
    ]
    made = [
        span_message({f"{i}": n for i, n in enumerate(numbers[at : at + 100])}) for at in range(0, len(numbers), 100)
    ]
    body = trace_request(*made).SerializeToString()
    assert_equal(body)
    assert compiled_scan()(body, RECEIVED_UNIX_NS).warned == {}


def test_recordings_of_real_engines_give_the_same() -> None:
    bodies = [b for path in sorted(shared_path("captures").glob("*/otlp-traces.ld.gz")) for b in captured_bodies(path)]
    assert bodies
    for body in bodies:
        assert_equal(body)


def in_request(*items: bytes) -> bytes:
    return length_delimited(1, length_delimited(2, b"".join(length_delimited(2, item) for item in items)))


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def length_delimited(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def test_names_are_told_from_wherever_they_stand() -> None:
    span = span_message({"a": 1, "deep": [{"b": {"c": 1}}]})
    span.events.add(name="happened", time_unix_nano=START_UNIX_NS).attributes.add(key="d")
    span.links.add(trace_id=b"\1" * 16, span_id=b"\2" * 8).attributes.add(key="e")
    request = trace_request(span, span_message({"a": 1, "f": 2}), resource={"g": {"h": 1}})
    found = compiled_scan()(request.SerializeToString(), RECEIVED_UNIX_NS)
    assert found.names == frozenset("abcdefgh") | {"deep", "happened"}
    assert_names_are_told(found)


@pytest.mark.parametrize("count", [255, 256, 257, 700])
def test_names_are_told_completely_or_not_at_all(count: int) -> None:
    spans = [span_message({f"key.{i}": 1 for i in range(at, min(at + 100, count))}) for at in range(0, count, 100)]
    found = compiled_scan()(trace_request(*spans, resource={}).SerializeToString(), RECEIVED_UNIX_NS)
    assert found.names == (None if count > 256 else frozenset(f"key.{i}" for i in range(count)))


def test_names_are_not_told_where_a_span_was_read_by_the_plain_scanner() -> None:
    request = trace_request(span_message({"a": 1}), span_message({"b": "x" * 5000}))
    assert compiled_scan()(request.SerializeToString(), RECEIVED_UNIX_NS).names is None


def test_names_of_one_request_are_not_told_of_the_next() -> None:
    for name in ("first", "second"):
        request = trace_request(span_message({name: 1}), resource={})
        assert compiled_scan()(request.SerializeToString(), RECEIVED_UNIX_NS).names == frozenset({name})


def test_rows_stay_as_they_were_when_the_same_thread_reads_on() -> None:
    """Its buffers are filled again."""
    requests = [trace_request(span_message({"key": text * 300}, name=text)) for text in "abc"]
    found = [compiled_scan()(request.SerializeToString(), RECEIVED_UNIX_NS) for request in requests]
    for request, one in zip(requests, found, strict=True):
        assert one.rows.equals(scan_traces(request.SerializeToString(), RECEIVED_UNIX_NS).rows)
