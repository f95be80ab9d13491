"""OTLP over gRPC: the Export methods of traces, metrics and logs, on raw bytes.

A generated servicer would answer INTERNAL for a whole request with one bad byte in it, so bytes are taken as they come. The
methods are registered as client-streaming although OTLP's are unary: on the wire one message is one message, and only so can
a call be refused, or cut off for slowness, before its message has been read into memory.

Timers: gRPC closes a connection that is not set up within 10 s, that had no call for 12 s (one whose headers never end has none, so
this holds whatever it sends), that acknowledges no ping for 30 s, and, where calls never end, one of 5 minutes and what a body may
take. A body is cut off by the same rules as over HTTP: after 30 s, or once it is slower than 1 kB/s. An exporter that finds its
connection closed opens another: it is told which calls were not looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from phasewise.collector.access import ANYBODY, Caller, Door, Refused
from phasewise.collector.arrivals import Arrivals, Unread
from phasewise.collector.idle_connections import UnderWay
from phasewise.collector.intake import Body, Encoding, Intake, Reply
from phasewise.collector.limits import IntakeLimits
from phasewise.collector.open_sockets import address_of
from phasewise.collector.otlp_json import Signal
from phasewise.collector.receiver_http import partial_success
from phasewise.collector.room import Holding
from phasewise.collector.tls import Tls

_METHODS: dict[str, Signal] = {
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": "traces",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": "logs",
}
_READS = 32  # messages that come at once being read at once
_AT_ONCE_S = 0.1  # a message that takes longer makes room for others
_LOOK_EVERY_S = 0.5  # at what came of it meanwhile
_RESPONSE_BYTES = 4 << 20
_CODES = {
    "missing": grpc.StatusCode.UNAUTHENTICATED,
    "wrong": grpc.StatusCode.UNAUTHENTICATED,
    "forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "too_many_wrong": grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Context = grpc.aio.ServicerContext[bytes, bytes]
Export = Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]


class GrpcServer:
    """The gRPC server on the running event loop. `bind` tells the port, or raises RuntimeError."""

    def __init__(self, intake: Intake, door: Door | None = None) -> None:
        self._next: grpc.ServerCertificateConfiguration | None = None
        self._server = grpc.aio.server(options=_options(intake.limits))
        self._reads = _Reads(intake)
        self.under_way = UnderWay()
        self._server.add_generic_rpc_handlers([_Handlers(intake, self._reads, door, self.under_way)])

    def bind(self, address: str, tls: Tls | None = None) -> int:
        if tls is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._certificates(tls))
        self._reads.arrivals = Arrivals(port)
        return port

    def renew(self, tls: Tls) -> None:
        """Another certificate for connections from now on."""
        self._next = _pair(tls)

    def _certificates(self, tls: Tls) -> grpc.ServerCredentials:
        # gRPC asks at every handshake; what is returned once holds until something else is.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._take_next)  # None is allowed, says gRPC
        return grpc.dynamic_ssl_server_credentials(_pair(tls), fetch, require_client_authentication=bool(tls.client_ca))

    def _take_next(self) -> grpc.ServerCertificateConfiguration | None:
        found, self._next = self._next, None
        return found

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, within_s: float) -> None:
        await self._server.stop(within_s)


def _options(limits: IntakeLimits) -> list[tuple[str, int]]:
    seconds = {
        "grpc.server_handshake_timeout_ms": limits.header_s,
        "grpc.http2.settings_timeout": limits.header_s,  # for the acknowledgement of ours
        "grpc.max_connection_idle_ms": limits.idle_s,
        "grpc.max_connection_age_ms": limits.age_s,
        "grpc.max_connection_age_grace_ms": limits.body_s + limits.header_s,
        # Together what a client may leave unread.
        "grpc.keepalive_time_ms": limits.unread_s * 2 / 3,
        "grpc.keepalive_timeout_ms": limits.unread_s / 3,
        "grpc.http2.min_recv_ping_interval_without_data_ms": 10.0,
    }
    return [
        ("grpc.max_receive_message_length", limits.request_bytes),  # over it: RESOURCE_EXHAUSTED, no RetryInfo
        (
            "grpc.per_message_decompression",
            0,
        ),  # else any number at once would be unpacked, before we see how much it is
        ("grpc.max_send_message_length", _RESPONSE_BYTES),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.so_reuseport", 0),  # else a second process on this port would silently take half the traffic
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # else only the first of ours would be sent
        *((name, round(value * 1000)) for name, value in seconds.items()),
    ]


def _pair(tls: Tls) -> grpc.ServerCertificateConfiguration:
    roots = tls.client_ca.read_bytes() if tls.client_ca else None
    return grpc.ssl_server_certificate_configuration([(tls.key.read_bytes(), tls.cert.read_bytes())], roots)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, intake: Intake, reads: _Reads, door: Door | None, under_way: UnderWay) -> None:
        self._receipts = intake.receipts
        self._handlers = {
            method: grpc.stream_unary_rpc_method_handler(_noted(_export(signal, intake, reads, door), under_way))
            for method, signal in _METHODS.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        found = self._handlers.get(handler_call_details.method)
        if found is None:  # UNIMPLEMENTED
            self._receipts.request("bad_request")
        return found


def _noted(export: Export, under_way: UnderWay) -> Export:
    async def noted(calls: AsyncIterator[bytes], context: Context) -> bytes:
        peer = address_of(context.peer())
        under_way.begin(peer)
        try:
            return await export(calls, context)
        finally:
            under_way.end(peer)

    return noted


def _export(signal: Signal, intake: Intake, reads: _Reads, door: Door | None) -> Export:
    async def export(_: AsyncIterator[bytes], context: Context) -> bytes:
        caller = await _admitted(door, context, intake) if door else ANYBODY
        if intake.draining:
            await _abort(context, intake.refusal("draining"))
        data = await reads.message(context)
        size = len(data)
        if door:
            door.sent(caller, size)
        held = Holding(intake.room)
        try:
            if not held.more(size):
                await _abort(context, intake.refusal("queue_full"))
            tenant = caller.tenant if caller.key else None
            body = Body(signal, data, encoding=_encoding(data), peer=_peer(context), tenant=tenant)
            del data
            reply = await intake.take(body)
        finally:
            held.release()
        if reply.status != "ok":
            await _abort(context, reply)
        return partial_success(signal, reply).SerializeToString()

    return export


async def _admitted(door: Door, context: Context, intake: Intake) -> Caller:
    """Before the message is read. Metadata keys are lower case on the wire."""
    told = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), None)
    found = door.admit(told if isinstance(told, str) else None, _peer(context), "ingest")
    refused = found if isinstance(found, Refused) else door.too_fast(found)
    if isinstance(refused, Refused):
        if refused.reason == "too_fast":
            intake.receipts.request("refused_rate")
            await _abort(context, Reply("refused", message=refused.message, retry_after_s=refused.retry_after_s))
        intake.receipts.request("forbidden" if refused.reason == "forbidden" else "unauthenticated")
        await context.abort(_CODES[refused.reason], refused.message)
    assert isinstance(found, Caller)
    return found


def _encoding(data: bytes) -> Encoding:
    """gRPC does not say whether a message is packed. No message of OTLP begins as gzip or zlib do: they have field 1 only."""
    if data[:1] == b"\x1f":
        return "gzip"
    return "deflate" if data[:1] == b"\x78" else "identity"


class _Line:
    """A connection with calls that take long to come."""

    def __init__(self, intake: Intake) -> None:
        self._limit_bytes = intake.limits.request_bytes
        self._held = Holding(intake.room)
        self._held.turn_late()
        self.calls = 0

    def hold(self, unread_bytes: int | None) -> bool:
        """Whether what was not read of it may be held: of None, not known, all that its calls may take."""
        most = self.calls * self._limit_bytes
        return self._held.become(most if unread_bytes is None else min(unread_bytes, most))

    def leave(self) -> None:
        self.calls -= 1
        self._held.become(min(self._held.held_bytes, self.calls * self._limit_bytes))


class _Reads:
    """Messages that are being read. Each may take the size limit while it arrives, so few are at once; what takes longer gives its
    place away, so that slow clients hold nobody up, and from then on what has come on its connection and was not read counts as held."""

    def __init__(self, intake: Intake) -> None:
        self.arrivals: Arrivals | None = None
        self._intake = intake
        self._places = asyncio.Semaphore(_READS)
        self._unread = Unread(self._received_bytes)
        self._lines: dict[str, _Line] = {}  # by peer

    async def message(self, context: Context) -> bytes:
        """The one message of a call. Ends the call where it comes too slowly, is too much to hold, or is none."""
        peer, data = context.peer(), None
        self._unread.begin(peer)
        try:
            data = await self._read(context, peer)
            return data
        finally:
            self._unread.end(peer, data)

    async def _read(self, context: Context, peer: str) -> bytes:
        await self._places.acquire()
        read = asyncio.ensure_future(context.read())
        try:
            try:
                await asyncio.wait({read}, timeout=_AT_ONCE_S)
            finally:
                self._places.release()
            if not read.done():
                await self._patiently(context, peer, read)
        except asyncio.CancelledError:  # its sender went, or it is over the size limit
            self._intake.receipts.request("unread")
            raise
        finally:
            read.cancel()
        data = read.result()
        if not isinstance(data, bytes):  # the end of the call, without a message
            self._intake.receipts.request("unread")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        return data

    async def _patiently(self, context: Context, peer: str, read: asyncio.Future[Any]) -> None:
        """Until it is read, within the time and above the rate for a body."""
        line = self._lines.setdefault(peer, _Line(self._intake))
        line.calls += 1
        try:
            await self._look(context, peer, read, line)
        finally:
            line.leave()
            if not line.calls:
                del self._lines[peer]

    async def _look(self, context: Context, peer: str, read: asyncio.Future[Any], line: _Line) -> None:
        limits, started = self._intake.limits, time.monotonic()
        before = came = self._received_bytes(peer)
        if came is None:  # perhaps since the connection is new
            await asyncio.wait({read}, timeout=_LOOK_EVERY_S)
            before = came = self._received_bytes(peer)
        while not read.done():
            spent_s = time.monotonic() - started
            slow = spent_s > limits.body_s
            if came is not None and before is not None and spent_s > limits.slow_after_s:
                slow |= came - before < spent_s * limits.body_bytes_per_s
            if slow:
                self._intake.receipts.request("slow")
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request came too slowly")
            if not line.hold(None if came is None else self._unread.of(peer, came)):
                await _abort(context, self._intake.refusal("queue_full"))
            await asyncio.wait({read}, timeout=_LOOK_EVERY_S)
            came = self._received_bytes(peer)

    def _received_bytes(self, peer: str) -> int | None:
        return self.arrivals.received_bytes(peer) if self.arrivals else None


async def _abort(context: Context, reply: Reply) -> NoReturn:
    """End the call with the code of the reply. Retry hints go in both places that senders look at: the status details, and
    the RetryInfo trailer that the Python exporter reads."""
    code = {
        "malformed": grpc.StatusCode.INVALID_ARGUMENT,
        "too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "refused": grpc.StatusCode.UNAVAILABLE,
        "internal": grpc.StatusCode.INTERNAL,
    }[reply.status]
    trailers: tuple[tuple[str, bytes], ...] = ()
    if reply.status == "refused":
        hint = RetryInfo(retry_delay=Duration())
        hint.retry_delay.FromMilliseconds(round(reply.retry_after_s * 1e3))
        packed = AnyMessage()
        packed.Pack(hint)
        status = Status(code=code.value[0], message=reply.message, details=[packed])
        trailers = (
            ("google.rpc.retryinfo-bin", hint.SerializeToString()),
            ("grpc-status-details-bin", status.SerializeToString()),
        )
    await context.abort(code, reply.message, trailers)
    raise AssertionError("abort returned")


def _peer(context: Context) -> str:
    """The address without its port: `ipv4:127.0.0.1:4711` is 127.0.0.1."""
    return context.peer().partition(":")[2].rpartition(":")[0]
