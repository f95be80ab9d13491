"""F25 to F29: sizes, bombs, many attributes, broken text and broken structure, through the real process or the whole chain to rows."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from large_requests import gzip_of_zeros, padded_request
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_messages import RECEIVED_UNIX_NS, any_value, otlp_json, span_message, trace_request
from receive_process import Receiving, receiving
from writing import Bench, bench, engine_span, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.limits import INTAKE_LIMITS, MIB
from phasewise.collector.otlp_json import json_to_protobuf
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed, TooLarge

PROTOBUF = "application/x-protobuf"


# --- sizes and bombs: F25, F26 ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    with receiving(tmp_path_factory.mktemp("hostile")) as process:
        yield process
        assert process.process.poll() is None, "the process did not survive"


def by_http(running: Receiving, body: bytes) -> int:
    return running.post(body).status


def by_http_gzip(running: Receiving, body: bytes) -> int:
    return running.post(gzip.compress(body, 1), content_encoding="gzip").status


def by_http_chunked(running: Receiving, body: bytes) -> int:
    parts = (body[at : at + MIB] for at in range(0, len(body), MIB))
    return running.ask("POST", "/v1/traces", parts, {"content-type": PROTOBUF}).status


def by_grpc(running: Receiving, body: bytes) -> int:
    return _grpc(running, body)


def by_grpc_gzip(running: Receiving, body: bytes) -> int:
    return _grpc(running, body, compression=grpc.Compression.Gzip)


def _grpc(running: Receiving, body: bytes, **options: Any) -> int:
    try:
        running.export(body, **options)
        return 200
    except grpc.RpcError as error:
        failed: Any = error
        assert failed.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "google.rpc.retryinfo-bin" not in dict(failed.trailing_metadata())
        return 413


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("send", [by_http, by_http_gzip, by_http_chunked, by_grpc, by_grpc_gzip])
def test_sizes_at_and_over_the_limit(running: Receiving, send: Callable[[Receiving, bytes], int]) -> None:
    """F25: 64 MiB less one byte and exactly are taken, one more and 200 MiB are not; neighbours go on, memory stays."""
    limit = INTAKE_LIMITS.request_bytes
    running.post(trace_request(span_message()).SerializeToString())
    before = running.rss_bytes()
    running.reset_peak()
    for size, wanted in ((limit - 1, 200), (limit, 200), (limit + 1, 413), (200 * MIB, 413)):
        assert send(running, padded_request(size)) == wanted, size
    assert running.rss_bytes("VmHWM") - before < 6 * limit
    assert running.post(trace_request(span_message()).SerializeToString()).status == 200


@pytest.mark.live
@pytest.mark.slow
def test_lengths_that_lie(running: Receiving) -> None:
    """F25: a body longer than its length is the next request's problem; a shorter one is nobody's; absurd ones are refused unread."""
    body = trace_request(span_message(name="whole")).SerializeToString()

    def answer(length: str, sent: bytes) -> bytes:
        head = f"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\ncontent-length: {length}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", running.http_port), 20) as connection:
            connection.sendall(head.encode() + sent)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                return connection.recv(4096)
        return b""

    assert answer(str(len(body)), body + b"more than was said").startswith(b"HTTP/1.1 200")
    assert not answer(str(len(body) + 10), body).startswith(b"HTTP/1.1 200")
    assert answer(str(10**12), b"").startswith(b"HTTP/1.1 413")
    for absurd in ("-1", "many", "99999999999999999999999999"):
        assert not answer(absurd, body).startswith(b"HTTP/1.1 200")
    assert sum(row["name"] == "whole" for row in running.stored()) == 1


MEMBER = gzip.compress(bytes(8 * MIB))
BOMBS = {
    "a GiB of zeros in a MiB": (gzip_of_zeros(1024), 150 * MIB),
    # Ten MiB each: what may be held at once, in parts and joined, and what is inflated of it.
    "many members, each small": (MEMBER * (10 * MIB // len(MEMBER)), 2 * INTAKE_LIMITS.queue_bytes + 64 * MIB),
}


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_fifty_bombs_at_once_cost_little_memory(running: Receiving, name: str) -> None:
    """F26."""
    bomb, at_most_bytes = BOMBS[name]
    assert running.post(bomb, content_encoding="gzip").status == 413
    before = running.rss_bytes()
    running.reset_peak()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: running.post(bomb, content_encoding="gzip").status, range(50)))
    assert set(answers) <= {413, 503}  # 503: together they are more than may wait
    assert answers.count(413) >= 8
    more = running.rss_bytes("VmHWM") - before
    print(f"50 bombs ({name}): {more / MIB:.0f} MiB more, {answers.count(413)} refused for good")
    assert more < at_most_bytes
    assert running.post(trace_request(span_message()).SerializeToString()).status == 200


# --- attributes: F27 --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_keys_and_a_hundred_thousand_values_cost_no_row_and_no_column(tmp_path: Path) -> None:
    """F27 (a), (b), (c): one span of 10,000 keys, 10,000 keys over all spans, and a value of its own in each span."""
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        columns = len(b.rows("SELECT * FROM duckdb_columns()"))
        plain = timed(b)
        for first in range(0, 10_000, 1000):
            take(b, *(span_message({f"key.{n}": n, "user.id": f"u{n}"}) for n in range(first, first + 1000)))
            b.run(1.5)
        take(b, span_message({f"many.{n}": n for n in range(10_000)}))
        b.run(1.5)
        assert b.counter("spans") == 10_001
        assert b.counter("broken_traces") == 0
        assert len(b.rows("SELECT * FROM duckdb_columns()")) == columns
        assert timed(b) < max(2.0, 20 * plain)


def take(b: Bench, *spans: Span) -> int:
    """Spans as they come over the wire; how many of them are kept."""
    scanned = scan_traces(trace_request(*spans).SerializeToString(), b.clock.now)
    b.journal.append("spans", scanned.rows)
    b.journal.sync()
    return int(scanned.rows.num_rows)


def timed(b: Bench) -> float:
    began = time.monotonic()
    b.rows("SELECT engine, count(*) AS n, quantile_cont(e2e_s, 0.95) AS p FROM requests GROUP BY ALL")
    return time.monotonic() - began


# --- text: F28 --------------------------------------------------------------------------------------------------------

TEXTS = {
    "nul": "a\0b",
    "right to left": "\u202eabc\u202c \u05e9\u05dc\u05d5\u05dd",
    "four bytes": "\U0001f600\U00010348",
    "line ends": "a\r\nb\u2028c",
    "not a character": "\ufffe\uffff",
}


def everywhere(text: str) -> Any:
    """A request with this text in every field that takes one."""
    event = Span.Event(name=text, attributes=span_message({text: text}).attributes, time_unix_nano=RECEIVED_UNIX_NS)
    link = Span.Link(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, trace_state=text)
    link.attributes.extend(span_message({"k": text}).attributes)
    span = span_message(
        {text: 1, "value": text, "list": [text, {text: text}]},
        name=text,
        trace_state=text,
        status=Status(message=text),
        events=[event],
        links=[link],
    )
    request = trace_request(span, resource={text: text, "service.name": text}, scope=text)
    request.resource_spans[0].schema_url = request.resource_spans[0].scope_spans[0].schema_url = text
    request.resource_spans[0].scope_spans[0].scope.version = text
    return request


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_text_is_kept_as_it_is_in_both_encodings(text: str) -> None:
    request = everywhere(text)
    scanned = scan_traces(request.SerializeToString(), RECEIVED_UNIX_NS)
    (row,) = scanned.rows.to_pylist()
    assert (row["name"], row["scope_name"], row["status_message"]) == (text, text, text)
    assert json.loads(row["attributes"])["list"] == [text, {text: text}]
    assert json.loads(row["resource"])[text] == text
    assert not scanned.warned
    twin = json_to_protobuf(json.dumps(otlp_json(request)).encode(), "traces")
    assert scan_traces(twin, RECEIVED_UNIX_NS).rows.to_pylist() == [row]


@pytest.mark.parametrize("encoding", ["protobuf", "json"])
def test_bytes_that_are_no_text_are_repaired_wherever_they_stand(encoding: str) -> None:
    """In JSON they are lone surrogates, escaped."""
    request = everywhere("BAD!")
    if encoding == "protobuf":
        body = request.SerializeToString().replace(b"BAD!", b"\xc3\x28\xff\xfe")
    else:
        body = json_to_protobuf(json.dumps(otlp_json(request)).replace("BAD!", "\\ud800(\\udfff").encode(), "traces")
    scanned = scan_traces(body, RECEIVED_UNIX_NS)
    (row,) = scanned.rows.to_pylist()
    assert scanned.warned == {"sanitised": 1}
    assert not scanned.rejected
    for column in ("name", "scope_name", "status_message", "attributes", "resource", "events"):
        assert "\ufffd" in row[column], column
        assert not any("\ud800" <= letter <= "\udfff" for letter in row[column])


# --- structure: F29 ---------------------------------------------------------------------------------------------------


def deep(levels: int) -> AnyValue:
    value = any_value("bottom")
    for _ in range(levels):
        value = any_value([value])
    return value


def odd_spans() -> list[Span]:
    """Spans that break one rule each, most of them still to be kept."""
    event = Span.Event(name="e", time_unix_nano=1)
    late = (1 << 64) - 1
    return [
        *(span_message(trace_id=b"\x01" * n) for n in (0, 15, 17, 32)),
        *(span_message(span_id=b"\x01" * n) for n in (0, 7, 9, 16)),
        span_message(trace_id=bytes(16)),
        span_message(span_id=bytes(8)),
        span_message(parent_span_id=b"\x01" * 3),
        span_message(end_time_unix_nano=1),
        span_message(start_time_unix_nano=late),
        span_message(end_time_unix_nano=late),
        span_message(start_time_unix_nano=0),
        span_message({"deep": deep(30)}),
        span_message(events=[event] * 10_000),
        span_message(links=[Span.Link(trace_id=b"\x01" * 16, span_id=b"\x02" * 8)] * 10_000),
        span_message({"nan": float("nan"), "inf": float("inf"), "minus": float("-inf"), "big": (1 << 63) - 1}),
        span_message({"gen_ai.usage.prompt_tokens": -(1 << 63), "gen_ai.latency.e2e": float("inf")}),
        span_message({"gen_ai.latency.time_in_queue": float("nan"), "gen_ai.usage.completion_tokens": 1e300}),
        span_message(kind=77, flags=(1 << 32) - 1, dropped_attributes_count=(1 << 32) - 1),
        Span(),
    ]


def test_odd_spans_cost_themselves_at_most_all_the_way_to_rows(tmp_path: Path) -> None:
    with bench(tmp_path, attribute=attributor(rulebook())) as b:
        b.receive([engine_span()])
        scanned = scan_traces(trace_request(*odd_spans()).SerializeToString(), b.clock.now)
        assert sum(scanned.rejected.values()) == 14
        assert set(scanned.rejected) == {"trace_id", "span_id", "time_range", "start_missing"}
        b.journal.append("spans", scanned.rows)
        b.journal.sync()
        b.run(1.5)
        b.run(700.0)
        assert b.counter("spans") == 1 + scanned.rows.num_rows
        assert b.counter("broken_traces") == 0
        for row in b.rows():
            assert row["e2e_s"] is None or 0 <= row["e2e_s"] < 1e12
            assert row["input_tokens"] is None or row["input_tokens"] >= 0


def fuzzed(draw: random.Random, body: bytes) -> bytes:
    """Bits turned, pieces cut out, doubled or exchanged."""
    changed = bytearray(body)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed))
        to = min(len(changed), at + draw.randint(1, 24))
        how = draw.randrange(4)
        if how == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 1 and len(changed) > 100:
            del changed[at:to]
        elif how == 2:
            changed[at:at] = changed[at:to]
        else:
            changed[at:to] = draw.randbytes(to - at)
    return bytes(changed)


def through_the_chain(folder: Path, cases: int, seed: int) -> None:
    """Broken requests never break the scanner, the writer or a neighbour, and none takes a second."""
    draw = random.Random(seed)
    with bench(folder, attribute=attributor(rulebook())) as b:
        kept = 0
        for number in range(cases):
            good = trace_request(
                *odd_spans()[8:16], span_message({"gen_ai.usage.prompt_tokens": number, "l": [1, "x"]})
            )
            began = time.process_time()
            with contextlib.suppress(Malformed, TooLarge):
                scanned = scan_traces(fuzzed(draw, good.SerializeToString()), b.clock.now)
                kept += scanned.rows.num_rows
                if scanned.rows.num_rows:
                    b.journal.append("spans", scanned.rows)
            assert time.process_time() - began < 1.0, f"seed {seed}, case {number}"
            if number % 50 == 49:
                b.receive([engine_span()])
                b.run(1.5)
        b.run(700.0)
        assert kept > cases // 5, f"seed {seed}"
        assert b.counter("broken_traces") == 0, f"seed {seed}"
        assert sum(map(b.counter, COUNTED)) == kept + cases // 50, f"seed {seed}"


COUNTED = ("spans", "duplicate_spans", "conflicting_duplicate")


def test_broken_requests_break_nothing(tmp_path: Path) -> None:
    through_the_chain(tmp_path, 100, random.randrange(2**32))


@pytest.mark.nightly
def test_ten_thousand_broken_requests_break_nothing(tmp_path: Path) -> None:
    through_the_chain(tmp_path, 10_000, random.randrange(2**32))


@pytest.mark.live
def test_http_requests_that_are_none(running: Receiving) -> None:
    """Heads that no client should write: an answer of 400 or a closed connection, and the next request is served."""
    for head in (
        b"\0" * 200,
        b"POST\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/traces HTTP/1.1\r\n" + b"a: b\r\n" * 5000,
    ):
        address = ("127.0.0.1", running.http_port)
        with socket.create_connection(address, 20) as connection, contextlib.suppress(OSError):
            connection.sendall(head)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert running.post(trace_request(span_message()).SerializeToString()).status == 200
