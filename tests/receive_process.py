"""The real process `receive` for tests: started on free ports, spoken to over real sockets, read back from its journal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
from compiled_scanner import compiled_scan
from otlp_messages import span_message, trace_request

from phasewise.collector.journal import JournalReader
from phasewise.collector.scanners import NotCompiled

RECEIVER = ("-m", "phasewise.collector.receiver")
EXPORT = "/opentelemetry.proto.collector.{0}.v1.{1}Service/Export"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiving:
    """A running process and how to reach it."""

    process: subprocess.Popen[str]
    data: Path
    grpc_port: int
    http_port: int

    def post(
        self, body: bytes, path: str = "/v1/traces", media: str = "application/x-protobuf", **headers: str
    ) -> Answer:
        """One HTTP request on a connection of its own; underscores in header names become dashes."""
        sent = {"content-type": media, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self.ask("POST", path, body, {name: value for name, value in sent.items() if value})

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=120)
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
                connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def export(self, body: bytes, service: str = "Trace", timeout_s: float = 30, **options: Any) -> bytes:
        """One gRPC Export call on raw bytes; raises grpc.RpcError."""
        with grpc.insecure_channel(
            f"127.0.0.1:{self.grpc_port}", options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            call: Any = cast(Any, channel).unary_unary(EXPORT.format(service.lower(), service))
            answer: bytes = call(body, timeout=timeout_s, **options)
            return answer

    def stored(self, kind: str = "spans") -> list[dict[str, Any]]:
        """All rows of the journal, in order."""
        entries = JournalReader(self.data / "journal").read(None, limit=10**9, limit_rows=10**9)
        return [row for entry in entries if entry.kind == kind for row in entry.rows.to_pylist()]

    def span_ids(self) -> set[str]:
        return {row["span_id"] for row in self.stored()}

    def counters(self, fresh: bool = True) -> dict[str, Any]:
        """receive.json; `fresh` waits for one written after now."""
        path = self.data / "receive.json"
        now = time.time_ns()
        while True:
            found: dict[str, Any] = json.loads(path.read_text())
            if not fresh or found["unix_ns"] > now:
                return found
            time.sleep(0.05)

    def rss_bytes(self, name: str = "VmRSS") -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise AssertionError(name)

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=15)


def start(
    data: Path, environment: Mapping[str, str] | None = None, program: Sequence[str] = RECEIVER, **settings: Any
) -> Receiving:
    """Start it and wait until it is ready."""
    process = launch(data, environment, program, **settings)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"ended with {process.wait()}"
    ready = json.loads(line)
    assert ready["ready"] is True
    return Receiving(process, data, ready["otlp_grpc_port"], ready["otlp_http_port"])


def warm() -> None:
    """The cache of compiled code is shared and warm, unless the environment of a process names another: else each would compile."""
    with contextlib.suppress(NotCompiled):
        compiled_scan()


def launch(
    data: Path, environment: Mapping[str, str] | None = None, program: Sequence[str] = RECEIVER, **settings: Any
) -> subprocess.Popen[str]:
    warm()
    given = {"data": str(data), "grpc_port": 0, "http_port": 0, **settings}
    return subprocess.Popen(
        [sys.executable, *program, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


@contextlib.contextmanager
def receiving(data: Path, **settings: Any) -> Iterator[Receiving]:
    running = start(data, **settings)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


def assert_neighbour_is_stored(running: Receiving) -> None:
    """A good request right after is answered with success and is on the disk when the answer comes."""
    for send in (running.post, running.export):
        span = span_message()
        send(trace_request(span).SerializeToString())
        assert span.span_id.hex() in running.span_ids()
