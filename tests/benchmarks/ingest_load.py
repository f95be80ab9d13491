"""The load generator, a process of its own: `python tests/benchmarks/ingest_load.py '{"port": 4317, "seconds": 10}'`.

A closed loop on each connection: the next body goes out when the one before was answered, and not before its time where the load
has a rate. Bodies are built before (ingest_spans.py).
A sender that is told to retry sends the same body again, as exporters do. SIGTERM ends it early. The first line says that it sends;
the last is one JSON object: what was acknowledged, what was refused, latencies of the answered, and the CPU time of this process.
"""

from __future__ import annotations

import http.client
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ingest_spans import BATCH_SPANS, Batch, Shape, Template

SENDING = "sending"  # the first line: connections are there and bodies built
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_TIMEOUT_S = 60.0
_RETRY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
Send = Callable[[bytes], bool]  # True: acknowledged, False: try again later; anything else raises


@dataclass(frozen=True, slots=True)
class Load:
    """port: of 127.0.0.1; connections: each with a loop of its own; retry_s: wait after "retry later"; pause_s: after an answer;
    limit_spans: stop after about so many, None where only the time ends it; rate_spans_per_s: of all connections together, None for
    as many as are answered; what is late is sent at once; seed: other seeds send other ids."""

    port: int
    seconds: float
    shape: Shape = "tree"
    transport: Literal["grpc", "http"] = "grpc"
    connections: int = 32
    batch_spans: int = BATCH_SPANS
    retry_s: float = 1.0
    pause_s: float = 0.0
    limit_spans: int | None = None
    rate_spans_per_s: float | None = None
    seed: int = 1

    def due_s(self, connection: int, body: int, spans: int) -> float:
        """When the n-th body of a connection goes out, after the beginning: those of all connections evenly one after the other."""
        if self.rate_spans_per_s is None:
            return 0.0
        return (body * self.connections + connection) * spans / self.rate_spans_per_s


@dataclass(slots=True)
class Sent:
    """What one connection did."""

    bodies: int = 0  # begun
    spans: int = 0
    requests: int = 0
    refused: int = 0
    error: str = ""
    ack_s: list[float] = field(default_factory=list)


def run(load: Load, stop: threading.Event) -> dict[str, Any]:
    """Send until the time is over or somebody says stop; figures over all connections."""
    sent = [Sent() for _ in range(load.connections)]
    template = Template(load.shape, load.seed, load.batch_spans)
    batches = [Batch(template, number, load.seed) for number in range(load.connections)]
    begin = threading.Barrier(load.connections + 1)
    threads = [
        threading.Thread(target=_loop, args=(load, number, batch, own, begin, stop), daemon=True)
        for number, (batch, own) in enumerate(zip(batches, sent, strict=True))
    ]
    for thread in threads:
        thread.start()
    begin.wait()
    print(SENDING, flush=True)
    started, used = time.monotonic(), time.process_time()
    for thread in threads:
        thread.join()
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - used
    ack_s = np.array([latency for own in sent for latency in own.ack_s])
    return {
        "spans": sum(own.spans for own in sent),
        "requests": sum(own.requests for own in sent),
        "refused": sum(own.refused for own in sent),
        "errors": sorted({own.error for own in sent if own.error}),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "answers": len(ack_s),
        "ack_p50_ms": _percentile_ms(ack_s, 50),
        "ack_p99_ms": _percentile_ms(ack_s, 99),
        "ack_max_ms": _percentile_ms(ack_s, 100),
    }


def _percentile_ms(seconds: np.ndarray[Any, Any], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else None


def _loop(load: Load, number: int, batch: Batch, sent: Sent, begin: threading.Barrier, stop: threading.Event) -> None:
    open_sender = _grpc_sender if load.transport == "grpc" else _http_sender
    send, close = open_sender(load.port)
    begin.wait()
    start = time.monotonic()
    until = start + load.seconds
    most = None if load.limit_spans is None else load.limit_spans / load.connections
    try:
        while time.monotonic() < until and not stop.is_set() and (most is None or sent.spans < most):
            due = start + load.due_s(number, sent.bodies, batch.spans)
            if due >= until or stop.wait(max(0.0, due - time.monotonic())):
                break
            sent.bodies += 1
            body = batch.unique()
            while True:
                started = time.monotonic()
                if send(body):
                    break
                sent.refused += 1
                if time.monotonic() > until or stop.wait(load.retry_s):
                    return
            sent.ack_s.append(time.monotonic() - started)
            sent.spans += batch.spans
            sent.requests += batch.requests
            if load.pause_s:
                stop.wait(load.pause_s)
    except Exception as error:  # told, and counted as nothing
        sent.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        close()


def _grpc_sender(port: int) -> tuple[Send, Callable[[], None]]:
    # A pool of its own makes each channel a connection of its own.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
    call: Any = cast(Any, channel).unary_unary(EXPORT)

    def send(body: bytes) -> bool:
        try:
            call(body, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            if cast(grpc.Call, error).code() in _RETRY:
                return False
            raise
        return True

    return send, channel.close


def _http_sender(port: int) -> tuple[Send, Callable[[], None]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)

    def send(body: bytes) -> bool:
        connection.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
        answer = connection.getresponse()
        told = answer.read()
        if answer.status in (429, 502, 503, 504):
            return False
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}: {told[:200]!r}")
        return True

    return send, connection.close


class Generator:
    """A load that runs in a process of its own."""

    def __init__(self, load: Load) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(load))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_sending(self, within_s: float) -> None:
        """SystemExit where it has not begun by then."""
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], within_s)
        if not ready or stdout.readline().strip() != SENDING:
            self._process.kill()
            _, problem = self._process.communicate()
            raise SystemExit(f"the load generator did not begin within {within_s:.0f} s: {problem.strip()[-2000:]}")

    def result(self) -> dict[str, Any]:
        """What it says at its end."""
        told, problem = self._process.communicate()
        if self._process.returncode:
            raise SystemExit(f"the load generator failed: {problem.strip()[-2000:]}")
        found: dict[str, Any] = json.loads(told.splitlines()[-1])
        return found

    def stop(self) -> dict[str, Any]:
        """End it before its time, with what it did so far."""
        self._process.terminate()
        return self.result()


def main(settings: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(json.dumps(run(Load(**json.loads(settings)), stop)))


if __name__ == "__main__":
    main(sys.argv[1])
