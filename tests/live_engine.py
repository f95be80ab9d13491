"""The engine's real server on a free port, in a thread of the test, and small real OTLP receivers to send to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
from local_http import serving_aside
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.export import ExportSettings
from phasewise.instrumented_engine.server import EngineServer, listen
from phasewise.instrumented_engine.serving.server_settings import ServerSettings

MODEL = "llama-3.1-8b"
SMALL = EngineConfig(max_num_seqs=4, kv_blocks=256, max_model_tokens=1024, step_token_budget=512)
WAIT_S = 15.0


@dataclass(slots=True)
class Engine:
    """A running server. url: its base address."""

    server: EngineServer
    url: str
    client: httpx.Client
    thread: threading.Thread

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.client.post(path, json={"model": MODEL, **body}, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of /metrics."""
        for line in self.client.get("/metrics").text.splitlines():
            found = line.startswith((f"{name}{{", f"{name} "))
            if found and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no series {name} {labels}")

    def end(self) -> None:
        self.server.end()
        self.thread.join(WAIT_S)


@contextmanager
def engine(**settings: Any) -> Iterator[Engine]:
    """A simulated engine ten times as fast as its accelerator, unless told otherwise."""
    chosen = {
        "executor": "simulated",
        "config": SMALL,
        "time_scale": 0.1,
        "port": 0,
        "drain_s": 5.0,
        "gpu_metrics": False,
    }
    opened = listen("127.0.0.1", 0)
    server = EngineServer(ServerSettings(**{**chosen, **settings}))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(opened)), daemon=True)
    thread.start()
    until(lambda: server.ready is not None)
    assert server.ready is not None
    url = str(server.ready["url"])
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        running = Engine(server, url, client, thread)
        try:
            yield running
        finally:
            running.end()
            opened.close()
    assert not thread.is_alive(), "the server did not end"


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits for something that other threads bring about."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


def pieces(response: httpx.Response) -> list[dict[str, Any]]:
    """Documents of a stream that has ended, without its [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# --- receivers -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Received:
    """Bodies as they came, and how many of the first to refuse."""

    endpoint: str = ""
    bodies: list[bytes] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        found: list[Span] = []
        for body in self.bodies:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in group.scope_spans:
                    found += scope.spans
        return found

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    @property
    def resource(self) -> dict[str, Any]:
        group = ExportTraceServiceRequest.FromString(self.bodies[0]).resource_spans[0]
        return {pair.key: plain(pair.value) for pair in group.resource.attributes}


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    received = Received()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            received.bodies.append(request.SerializeToString())
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def http_receiver() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Encoding"] in (None, "identity")
            if self.path == "/v1/traces":
                received.bodies.append(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    with serving_aside(server):
        yield received


def plain(value: AnyValue) -> Any:
    """An attribute's value as Python has it."""
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind)


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in span.attributes}


def sending(received: Received, **settings: Any) -> Any:
    return engine(export=ExportSettings(endpoint=received.endpoint, delay_s=0.05), **settings)


def tree(received: Received) -> dict[str, Span]:
    """Spans of the only request, by name; the last of each name."""
    until(lambda: bool(received.named("llm_request")))
    assert len(received.named("llm_request")) == 1
    root = received.named("llm_request")[0]
    return {span.name: span for span in received.spans if span.trace_id == root.trace_id}


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def failed(spans: dict[str, Span]) -> dict[str, str]:
    return {name: span.status.message for name, span in spans.items() if span.status.code == Status.STATUS_CODE_ERROR}
