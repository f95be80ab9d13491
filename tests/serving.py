"""A real `phasewise serve` on free ports, for tests that are marked live."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASEWISE = (sys.executable, "-m", "phasewise.dashboard.cli")
READY_S = 90.0


def phasewise(*arguments: object, timeout_s: float = 120, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """One run of the command line."""
    command = [*PHASEWISE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, input=stdin)


@dataclass(slots=True)
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    data: Path
    ready: Mapping[str, Any]
    log: Path

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def get(self, path: str, parameters: Sequence[tuple[str, object]] = ()) -> Any:
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        with _open(f"{self.url}{path}{query}") as answer:
            return json.load(answer)

    def send_traces(self, body: bytes) -> None:
        address = f"http://127.0.0.1:{self.ready['otlp_http_port']}/v1/traces"
        request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/x-protobuf"})
        with _open(request) as answer:
            answer.read()

    def verdict(self, requests: int, timeout_s: float = 30, f: str = "") -> dict[str, Any]:
        """The verdict over everything, once that many requests are counted and two answers are equal, or time is up."""
        until = time.monotonic() + timeout_s
        asked = [("from", "0"), ("to", str(4_102_444_800 * 10**9)), *([("f", f)] if f else [])]
        before: dict[str, Any] = {}
        while True:
            told: dict[str, Any] = self.get("/api/v1/verdict", asked)
            if (told["requests"] == requests and told == before) or time.monotonic() > until:
                return told
            before = told
            time.sleep(0.5)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(15)


def _open(request: str | urllib.request.Request) -> Any:
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


@contextmanager
def serving(data: Path, *options: str, ports: Sequence[int] = (0, 0, 0)) -> Iterator[Served]:
    """Starts, waits for the ready line, and ends with SIGTERM; its log is `log` beside the data."""
    data.parent.mkdir(parents=True, exist_ok=True)
    log = data.parent / f"{data.name}.log"
    names = ("--port", "--otlp-grpc-port", "--otlp-http-port")
    arguments = [part for name, port in zip(names, ports, strict=True) for part in (name, str(port))]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*PHASEWISE, "serve", "--data", str(data), *arguments, *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            yield Served(process, data, _ready(process, log), log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _ready(process: subprocess.Popen[str], log: Path) -> Mapping[str, Any]:
    lines: list[str] = []
    stdout = process.stdout
    assert stdout is not None
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    reader.join(READY_S)
    assert lines and lines[0].startswith("{"), f"no ready line; stderr: {log.read_text()[-3000:]}"
    told: Mapping[str, Any] = json.loads(lines[0])
    return told
