"""Sending OTLP bodies that are there already as bytes, over the real sockets."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.dashboard.commands.connection import trust
from phasewise.rules.errors import MachineError

if TYPE_CHECKING:
    import grpc

EXPORT_TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
TIMEOUT_S = 10.0  # an SDK exporter gives up at the same time
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}


def reachable(host: str) -> str:
    """Where a client on this machine finds a server that listens on `host`, as it stands in a URL."""
    return _ANY_ADDRESS.get(host, host)


def _channel(address: str, port: int, pinned: Path | None) -> grpc.Channel:
    import grpc

    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if pinned is None:
        return grpc.insecure_channel(f"{address}:{port}", options=options)
    # gRPC always compares names: it is told the one that the certificate carries, which is known by its bytes anyway.
    try:
        options.append(("grpc.ssl_target_name_override", _name_shown(address, port, pinned)))
        own = os.environ.get("PHASEWISE_CLIENT_CERT")
        pair = Path(own).read_bytes() if own else None
        credentials = grpc.ssl_channel_credentials(pinned.read_bytes(), pair, pair)
    except OSError as error:
        raise MachineError(f"OTLP over gRPC to port {port}: TLS failed: {error}") from None
    return grpc.secure_channel(f"{address}:{port}", credentials, options)


def _name_shown(address: str, port: int, pinned: Path) -> str:
    context = trust(pinned)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((address.strip("[]"), port), TIMEOUT_S) as plain,
        context.wrap_socket(plain) as secured,
    ):
        told: Any = secured.getpeercert() or {}
    names = [name for kind, name in told.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    return str(names[0]).replace("*.", "any.") if names else address


@contextmanager
def trace_sender(
    host: str, grpc_port: int, http_port: int, *, key: str = "", pinned: Path | None = None
) -> Iterator[Callable[[str, bytes], None]]:
    """Gives a function that sends one ExportTraceServiceRequest over "grpc" or "http"; MachineError where it is refused.

    key: for a server that asks for one; pinned: the certificate that the server shows.
    """
    import grpc

    address = reachable(host)
    url = f"{'https' if pinned else 'http'}://{address}:{http_port}/v1/traces"
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if pinned:
        handlers.append(urllib.request.HTTPSHandler(context=trust(pinned)))
    opener = urllib.request.build_opener(*handlers)
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    with _channel(address, grpc_port, pinned) as channel:
        export = channel.unary_unary(EXPORT_TRACES, request_serializer=bytes, response_deserializer=bytes)

        def send(transport: str, body: bytes) -> None:
            try:
                if transport == "grpc":
                    export(body, timeout=TIMEOUT_S, metadata=tuple(authorization.items()))
                else:
                    headers = {"Content-Type": "application/x-protobuf", **authorization}
                    request = urllib.request.Request(url, data=body, headers=headers)
                    with opener.open(request, timeout=TIMEOUT_S) as answer:
                        answer.read()
            except grpc.RpcError as error:
                reason = error.details() if isinstance(error, grpc.Call) else str(error)
                raise MachineError(f"OTLP over gRPC to port {grpc_port} was refused: {reason}") from None
            except OSError as error:
                raise MachineError(f"OTLP over HTTP to {url} was refused: {error}") from None

        yield send
