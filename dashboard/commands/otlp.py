"""Sending OTLP bodies that are there already as bytes, over the real sockets."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phasewise.rules.errors import MachineError

EXPORT_TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
TIMEOUT_S = 10.0  # an SDK exporter gives up at the same time
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}


def reachable(host: str) -> str:
    """Where a client on this machine finds a server that listens on `host`, as it stands in a URL."""
    return _ANY_ADDRESS.get(host, host)


@contextmanager
def trace_sender(host: str, grpc_port: int, http_port: int) -> Iterator[Callable[[str, bytes], None]]:
    """Gives a function that sends one ExportTraceServiceRequest over "grpc" or "http"; MachineError where it is refused."""
    import grpc

    address = reachable(host)
    url = f"http://{address}:{http_port}/v1/traces"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with grpc.insecure_channel(f"{address}:{grpc_port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        export = channel.unary_unary(EXPORT_TRACES, request_serializer=bytes, response_deserializer=bytes)

        def send(transport: str, body: bytes) -> None:
            try:
                if transport == "grpc":
                    export(body, timeout=TIMEOUT_S)
                else:
                    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/x-protobuf"})
                    with opener.open(request, timeout=TIMEOUT_S) as answer:
                        answer.read()
            except grpc.RpcError as error:
                reason = error.details() if isinstance(error, grpc.Call) else str(error)
                raise MachineError(f"OTLP over gRPC to port {grpc_port} was refused: {reason}") from None
            except OSError as error:
                raise MachineError(f"OTLP over HTTP to {url} was refused: {error}") from None

        yield send
