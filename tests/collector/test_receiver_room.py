"""Senders that announce, begin and never end, over real sockets: they hold what they have sent, and keep nobody else out."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from http2_client import DATA, END_HEADERS, HEADERS, OPENING, Connection, frame, header_block, message
from large_requests import gzip_of_zeros, padded_request
from otlp_messages import span_message, trace_request
from receive_process import EXPORT, Receiving, assert_neighbour_is_stored, receiving
from thin_line import thin_line
from waiting import wait_for

from phasewise.collector.limits import INTAKE_LIMITS as LIMITS
from phasewise.collector.limits import MIB

pytestmark = pytest.mark.live
SMALL = trace_request(span_message()).SerializeToString()
BATCH = padded_request(4 * MIB)
OWN_LINE = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Receiving]:
    with receiving(tmp_path) as running:
        assert_neighbour_is_stored(running)
        yield running
        assert_neighbour_is_stored(running)


def head(length: int | None, **more: str) -> bytes:
    fields = {"host": "x", "content-type": "application/x-protobuf", **more}
    fields |= {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join(["POST /v1/traces HTTP/1.1", *lines, "\r\n"]).encode()


def statuses(process: Receiving, bodies: list[bytes]) -> Counter[int]:
    """What neighbours are answered over HTTP. Over gRPC a refusal raises."""
    for body in bodies:
        process.export(body)
    return Counter(process.post(body).status for body in bodies)


@contextmanager
def announcing(process: Receiving, count: int) -> Iterator[None]:
    """So many connections that send headers alone, of bodies of all sizes, and come again when they have been waited for."""
    stop = threading.Event()

    def again(number: int) -> None:
        while not stop.is_set():
            with socket.create_connection(("127.0.0.1", process.http_port)) as connection:
                connection.sendall(head((number % 64 + 1) * MIB))
                stop.wait(LIMITS.expected_s * 1.02)

    with ThreadPoolExecutor(count) as pool:
        for number in range(count):
            pool.submit(again, number)
        try:
            time.sleep(0.3)
            yield
        finally:
            stop.set()


@pytest.mark.alone
def test_headers_alone_keep_nobody_out(process: Receiving) -> None:
    whole = bytes(60 * MIB)
    with announcing(process, 64):
        assert statuses(process, [SMALL, BATCH] * 10) == {200: 20}
        assert process.post(whole).status == 400, "taken, and no protobuf"
    assert wait_for(lambda: process.post(whole).status == 400, 20.0)
    # Where announcements come true, more is kept for them.
    assert [process.post(whole[: 30 * MIB]).status for _ in range(3)] == [400] * 3
    with announcing(process, 64):
        assert statuses(process, [SMALL] * 10) == {200: 10}
        assert wait_for(lambda: process.post(BATCH).status == 200, 20.0)
        assert statuses(process, [BATCH] * 10) == {200: 10}, "until they do not"


def half_sent_over_http(length: int | None, **more: str) -> Callable[[Receiving], Any]:
    @contextmanager
    def begun(process: Receiving) -> Iterator[None]:
        """Of 20 MiB each all but the end, at once and then nothing."""
        part = bytes(20 * MIB)
        sent = part if length is not None else b"%x\r\n" % (len(part) + 1) + part
        whole = head(length, **more) + sent
        with ExitStack() as open_ones, ThreadPoolExecutor(6) as pool:
            for _ in range(6):
                connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", process.http_port)))
                pool.submit(connection.sendall, whole)  # it may be closed before it has read all
            yield

    return begun


@contextmanager
def half_sent_over_grpc(process: Receiving) -> Iterator[None]:
    with thin_line(process.grpc_port, 400 * MIB, 20 * MIB) as port, ExitStack() as open_ones:
        calls = []  # one that nobody holds is cancelled
        for _ in range(6):
            channel = open_ones.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=OWN_LINE))
            export = cast(Any, channel).unary_unary(EXPORT.format("trace", "Trace"))
            calls.append(export.future(bytes(21 * MIB), timeout=60))
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun",
    [
        half_sent_over_http(20 * MIB + 1),
        half_sent_over_http(None),
        half_sent_over_http(20 * MIB + 1, content_encoding="gzip"),
        half_sent_over_grpc,
    ],
    ids=["length", "chunked", "gzip", "grpc"],
)
def test_requests_that_are_half_sent_leave_room_for_others(process: Receiving, begun: Callable[[Receiving], Any]) -> None:  # fmt: skip
    with begun(process):
        # Three of them are all that may be held once they are late.
        assert wait_for(lambda: process.counters(fresh=False)["requests"].get("refused_queue_full", 0) >= 3, 20.0)
        assert statuses(process, [SMALL, BATCH] * 5) == {200: 10}
    assert wait_for(lambda: process.post(padded_request(LIMITS.request_bytes)).status == 200, 20.0), "all is given back"


def test_a_call_that_does_not_end_is_not_charged_with_its_neighbours(process: Receiving) -> None:
    """One connection, a call that sends nothing, and others beside it that send more than may be held."""
    stop = threading.Event()

    def endless() -> Iterator[bytes]:
        stop.wait(60)
        yield SMALL

    address = f"127.0.0.1:{process.grpc_port}"
    with grpc.insecure_channel(address, options=OWN_LINE) as shared, grpc.insecure_channel(address, options=OWN_LINE) as own:  # fmt: skip
        method = EXPORT.format("trace", "Trace")
        stalled = cast(Any, shared).stream_unary(method).future(endless(), timeout=60)
        began, sent = time.monotonic(), 0
        while sent < 2 * LIMITS.queue_bytes or time.monotonic() - began < 2.0:
            cast(Any, shared).unary_unary(method)(BATCH, timeout=20)
            cast(Any, own).unary_unary(method)(SMALL, timeout=20)
            sent += len(BATCH)
        assert process.post(padded_request(LIMITS.request_bytes)).status == 200, "there is room for the largest"
        if time.monotonic() - began < LIMITS.body_s:  # then it is cut off, whatever its neighbours do
            assert not stalled.done()
        stop.set()
        if time.monotonic() - began < LIMITS.body_s:
            stalled.result(timeout=20)
    assert "refused_queue_full" not in process.counters()["requests"]


@pytest.mark.slow
def test_packed_messages_are_unpacked_a_few_at_a_time(process: Receiving) -> None:
    """gRPC would unpack any number at once, and only then say how much they are."""
    bomb, count = gzip_of_zeros(60), 10
    assert len(bomb) < 65_000, "more would have to wait for leave to send"
    block = header_block({b"grpc-encoding": b"gzip"})
    before = process.rss_bytes()
    process.reset_peak()
    call = OPENING + frame(HEADERS, END_HEADERS, 1, block)
    content = message(bomb, packed=True)
    call += b"".join(frame(DATA, 0, 1, content[at : at + 16_384]) for at in range(0, len(content), 16_384))
    with ExitStack() as open_ones:
        bombs = [open_ones.enter_context(closing(Connection(process.grpc_port, call))) for _ in range(count)]

        def answered() -> bool:
            for one in bombs:
                one.step()
            return bool(process.counters(fresh=False)["requests"].get("malformed", 0) >= count)

        assert wait_for(answered, 60.0)
    assert process.rss_bytes("VmHWM") - before < 4 * LIMITS.request_bytes


def test_gzip_and_deflate_over_grpc_are_known_by_how_they_begin(process: Receiving) -> None:
    names = {grpc.Compression.Gzip: "by gzip", grpc.Compression.Deflate: "by deflate", grpc.Compression.NoCompression: "plain"}  # fmt: skip
    for compression, name in names.items():
        body = trace_request(*[span_message(name=name) for _ in range(50)]).SerializeToString()
        process.export(body, compression=compression)
    assert Counter(row["name"] for row in process.stored()) >= Counter(dict.fromkeys(names.values(), 50))
    with pytest.raises(grpc.RpcError) as raised:
        process.export(gzip.compress(SMALL)[:-5])
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
