"""OTLP over HTTP: a raw ASGI application (POST /v1/traces, /v1/metrics, /v1/logs) and the server under it.

Timers: the server closes a connection that has sent no complete header within 10 s, which holds for idle ones too (HTTP clients
reconnect); the application cuts off a body that takes over 30 s, or falls under 1 kB/s. The kernel closes the connection of a
client that leaves its replies unread for 30 s; until then it costs a few hundred bytes, since replies are that small. Connections
are not limited by address: a front end that does belongs before this port where it faces the internet.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from phasewise.collector.access import ANYBODY, Caller, Door, Refused
from phasewise.collector.idle_connections import UnderWay
from phasewise.collector.intake import Body, Encoding, Intake, Reply
from phasewise.collector.limits import IntakeLimits
from phasewise.collector.open_sockets import bare_address
from phasewise.collector.otlp_json import Signal
from phasewise.collector.room import Holding
from phasewise.collector.tls import Tls

PROTOBUF, JSON = "application/x-protobuf", "application/json"
_PATHS: dict[str, Signal] = {"/v1/traces": "traces", "/v1/metrics": "metrics", "/v1/logs": "logs"}
_ENCODINGS: Mapping[str, Encoding] = {
    "": "identity",
    "identity": "identity",
    "gzip": "gzip",
    "deflate": "deflate",
}
_RPC_CODES = {
    400: 3,
    404: 12,
    405: 12,
    408: 4,
    413: 8,
    415: 3,
    401: 16,
    403: 7,
    429: 8,
    500: 13,
    503: 14,
}  # google.rpc.Code
# Why the door refused, to the status, what is counted, and headers.
_REFUSALS: Mapping[str, tuple[int, str, Mapping[str, str]]] = {
    "missing": (401, "unauthenticated", {"www-authenticate": "Bearer"}),
    "wrong": (401, "unauthenticated", {"www-authenticate": "Bearer"}),
    "forbidden": (403, "forbidden", {}),
    "too_many_wrong": (429, "unauthenticated", {}),
    "too_fast": (429, "refused_rate", {}),
}
_BACKLOG = 1024
_HANDOVER_S = 0.5  # until the new worker surely accepts
# Through importlib, since parts of it have no types: a socket holder is made of (descriptor, is a Unix socket, backlog).
_embedded: Any = importlib.import_module("granian.server.embed")
_SocketHolder: Any = importlib.import_module("granian.net").SocketHolder

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Refused(Exception):
    """The request ends here, with this status."""

    def __init__(self, status: int, outcome: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        self.message = message
        self.headers = headers or {}


class _Gone(Exception):
    """The client closed the connection before its body was complete."""


def partial_success(signal: Signal, reply: Reply) -> Message:
    """The Export response; without partial_success where there is nothing to say."""
    if signal == "traces":
        traces = ExportTraceServiceResponse()
        if reply.rejected or reply.message:
            traces.partial_success.rejected_spans = reply.rejected
            traces.partial_success.error_message = reply.message
        return traces
    if signal == "metrics":
        metrics = ExportMetricsServiceResponse()
        if reply.rejected or reply.message:
            metrics.partial_success.rejected_data_points = reply.rejected
            metrics.partial_success.error_message = reply.message
        return metrics
    logs = ExportLogsServiceResponse()
    if reply.rejected or reply.message:
        logs.partial_success.rejected_log_records = reply.rejected
        logs.partial_success.error_message = reply.message
    return logs


class HttpFront:
    """The ASGI application. door: who may send; None lets anybody."""

    def __init__(self, intake: Intake, door: Door | None = None) -> None:
        self._intake = intake
        self._door = door
        self._limits = intake.limits
        self.under_way = UnderWay()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        client = scope.get("client")
        peer = bare_address(str(client[0]), int(client[1])) if client else None
        self.under_way.begin(peer)
        try:
            await self._answer(scope, receive, send)
        finally:
            self.under_way.end(peer)

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        answer_in = PROTOBUF if _media_type(headers) == PROTOBUF else JSON
        held = Holding(self._intake.room)
        try:
            caller = self._admitted(headers, scope)
            signal = _signal(scope)
            encoding = _encoding(headers)
            data = await self._read_body(headers, receive, held)
            tenant = caller.tenant if caller.key else None
            body = Body(signal, data, answer_in == JSON, encoding, _peer(scope), tenant)
            if self._door:
                self._door.sent(caller, len(data))
            del data
            reply = await self._intake.take(body)
            await _respond(send, *_answer(signal, reply), answer_in)
        except _Refused as refused:
            if refused.outcome:
                self._intake.receipts.request(refused.outcome)
            headers_out = {**refused.headers, "connection": "close"}
            await _respond(send, refused.status, _status(refused.status, refused.message), headers_out, answer_in)
        except _Gone:
            self._intake.receipts.request("cancelled")
        finally:
            held.release()

    def _admitted(self, headers: Mapping[str, str], scope: Mapping[str, Any]) -> Caller:
        """Before anything of the body is read: a stranger's 64 MiB cost a header."""
        if self._door is None:
            return ANYBODY
        found = self._door.admit(headers.get("authorization"), _peer(scope), "ingest")
        refused = found if isinstance(found, Refused) else self._door.too_fast(found)
        if isinstance(refused, Refused):
            status, outcome, more = _REFUSALS[refused.reason]
            again = {"retry-after": str(refused.retry_after_s)} if refused.retry_after_s else {}
            raise _Refused(status, outcome, refused.message, {**more, **again})
        assert isinstance(found, Caller)
        return found

    async def _read_body(self, headers: Mapping[str, str], receive: Receive, held: Holding) -> bytes:
        declared = headers.get("content-length", "")
        limit = self._limits.request_bytes
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        if declared.isdecimal() and not held.expect(int(declared)):
            raise self._full()  # unread: under overload the most of what comes is refused, and must cost little
        parts: list[bytes] = []
        total = 0
        started = time.monotonic()
        while True:
            message = await self._next_part(receive, started, total, held)
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            total += len(part)
            if total > limit:
                raise _too_large(limit)
            if not held.more(len(part)):
                raise self._full()
            parts.append(part)
            if not message.get("more_body", False):
                held.come_whole()
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _full(self) -> _Refused:
        reply = self._intake.refusal("queue_full")
        return _Refused(503, "", reply.message, _retry_after(reply))

    async def _next_part(self, receive: Receive, started: float, total: int, held: Holding) -> dict[str, Any]:
        limits = self._limits
        # Slower than the minimum rate shows when the part after which the rate would be kept again is late.
        allowed_s = min(limits.body_s, max(limits.slow_after_s, (total + 1) / limits.body_bytes_per_s))
        part = asyncio.ensure_future(receive())
        try:
            for until_s in (limits.expected_s, allowed_s):
                left_s = started + until_s - time.monotonic()
                if left_s > 0:
                    await asyncio.wait({part}, timeout=left_s)
                if part.done():
                    return part.result()
                if not held.turn_late():
                    raise self._full()
        finally:
            part.cancel()
        words = f"the body came too slowly: {total} bytes in {time.monotonic() - started:.1f} s"
        raise _Refused(408, "slow", words)


class HttpServer:
    """The server: one worker on the running event loop, on a socket that is already bound.

    With `tls`, another certificate is taken (`renew`) by a second worker on the same socket, after which the first one ends: its
    requests are answered, idle connections are closed as after a pause, and a handshake under way is broken off, which exporters
    try again.
    """

    def __init__(self, listener: socket.socket, front: HttpFront, limits: IntakeLimits, tls: Tls | None = None) -> None:
        self.front = front
        self._listener, self._limits, self._tls = listener, limits, tls
        self._server: Any = self._made()
        self._task: asyncio.Task[None] | None = None
        self._old: set[asyncio.Task[None]] = set()

    def _made(self) -> Any:
        host, port = self._listener.getsockname()[:2]
        # Its own way of binding neither tells the port of 0 nor refuses a busy one, so it is given our socket instead.
        server = _embedded.Server(
            self.front,
            host,
            port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            log_enabled=False,
            backlog=_BACKLOG,
            backpressure=self._limits.connections,
            http1_settings=HTTP1Settings(header_read_timeout=int(self._limits.header_s * 1000)),
            **self._certificate(),
        )
        server._init_shared_socket = lambda: self._use(server)
        return server

    def _certificate(self) -> dict[str, Any]:
        tls = self._tls
        if tls is None:
            return {}
        pair = {"ssl_cert": tls.cert, "ssl_key": tls.key, "ssl_protocol_min": SSLProtocols.tls12}
        return pair | ({"ssl_ca": tls.client_ca, "ssl_client_verify": True} if tls.client_ca else {})

    def _use(self, server: Any) -> None:
        descriptor = os.dup(self._listener.fileno())  # it is closed with the worker, and the next one needs its own
        server._ssp = None
        server._sfd = descriptor
        server._shd = _SocketHolder(descriptor, False, _BACKLOG)

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve())

    async def renew(self) -> None:
        """Takes the certificate as its files are now."""
        old, old_task = self._server, self._task
        self._server = self._made()
        self.start()
        await asyncio.sleep(_HANDOVER_S)
        old.stop()
        if old_task is not None:
            self._old.add(old_task)
            old_task.add_done_callback(self._old.discard)

    async def stop(self, within_s: float) -> None:
        """Stop accepting, and give open replies that long."""
        self._server.stop()
        self._listener.close()  # else who comes now would wait for an answer instead of being refused
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within_s)

    @property
    def failed(self) -> bool:
        return self._task is not None and self._task.done()


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _peer(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _signal(scope: Mapping[str, Any]) -> Signal:
    signal = _PATHS.get(scope["path"])
    if signal is None:
        raise _Refused(404, "bad_request", f"no such path; OTLP is taken at {', '.join(_PATHS)}")
    if scope["method"] != "POST":
        raise _Refused(405, "bad_request", "only POST is answered here", {"allow": "POST"})
    return signal


def _encoding(headers: Mapping[str, str]) -> Encoding:
    """How the body is packed; refuses media and packings that are not known."""
    media = _media_type(headers)
    if media not in (PROTOBUF, JSON):
        raise _Refused(415, "bad_request", f"content-type {media[:60]!r} is not {PROTOBUF} or {JSON}")
    told = headers.get("content-encoding", "").strip().lower()
    if told not in _ENCODINGS:
        raise _Refused(415, "bad_request", f"content-encoding {told[:60]!r} is not gzip, deflate or identity")
    return _ENCODINGS[told]


def _too_large(limit: int) -> _Refused:
    return _Refused(413, "too_large", f"the body is over {limit:,} bytes; send smaller batches")


def _status(status: int, message: str) -> Status:
    return Status(code=_RPC_CODES[status], message=message)


def _answer(signal: Signal, reply: Reply) -> tuple[int, Message, dict[str, str]]:
    if reply.status == "ok":
        return 200, partial_success(signal, reply), {}
    status = {"malformed": 400, "too_large": 413, "refused": 503, "internal": 500}[reply.status]
    headers = _retry_after(reply) if reply.status == "refused" else {}
    return status, _status(status, reply.message), headers


def _retry_after(reply: Reply) -> dict[str, str]:
    return {"retry-after": str(round(reply.retry_after_s))}


async def _respond(send: Send, status: int, message: Message, headers: Mapping[str, str], answer_in: str) -> None:
    if answer_in == PROTOBUF:
        body = message.SerializeToString()
    else:
        body = json_format.MessageToJson(message, indent=None).encode()
    every = {"content-type": answer_in, "content-length": str(len(body)), **headers}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
