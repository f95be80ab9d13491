"""F21: two hundred clients of the OpenTelemetry SDK that are refused at the same moment come back by the hints they were given: spread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from receive_process import receiving

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.slow]
CLIENTS = 200
WATCHED_S = 10.0
WINDOW_S = 0.4


class Noting(OTLPSpanExporter):
    """The exporter as it is, but that it notes each try."""

    def __init__(self, endpoint: str, gate: threading.Barrier) -> None:
        self.tries_s: list[float] = []
        self.told: Counter[str] = Counter()
        self._gate = gate
        # A connection of its own: in one process they would share one otherwise.
        super().__init__(endpoint=endpoint, insecure=True, channel_options=(("grpc.use_local_subchannel_pool", 1),))  # type: ignore[arg-type]

    @property
    def _client(self) -> Any:
        return self if self._made else None

    @_client.setter
    def _client(self, stub: Any) -> None:
        self._made = stub

    def Export(self, **call: Any) -> Any:
        self.tries_s.append(time.monotonic())
        try:
            return self._made.Export(**call)
        except grpc.RpcError as error:
            failed: Any = error
            hinted = any(key == "google.rpc.retryinfo-bin" for key, _ in failed.trailing_metadata() or ())
            self.told["hinted" if hinted else f"{failed.code()}: {failed.details()}"] += 1
            raise

    def run(self, span: ReadableSpan) -> None:
        """All at once, and again with the next batch as long as somebody watches."""
        self.tries_s.clear()
        self._gate.wait()
        until = time.monotonic() + WATCHED_S
        with contextlib.suppress(ValueError):  # the channel is closed at the end
            while time.monotonic() < until:
                self.export([span])


def peak(times_s: NDArray[np.float64]) -> int:
    """The most in any window."""
    found = np.sort(times_s)
    return int(max(np.searchsorted(found, found + WINDOW_S) - np.arange(len(found))))


def test_the_peak_knows_a_storm_from_a_spread() -> None:
    mean = CLIENTS * WINDOW_S / 1.5  # each every second and a half, as the hints are
    assert peak(np.repeat(np.arange(0.0, 10.0, 1.5), CLIENTS)) > 3 * mean
    assert peak(np.linspace(0.0, 10.0, round(10 * CLIENTS / 1.5))) < 1.1 * mean


def storm(port: int, span: ReadableSpan) -> float:
    """The peak over the mean of how often they come again."""
    gate = threading.Barrier(CLIENTS + 1)
    clients = [Noting(f"http://127.0.0.1:{port}", gate) for _ in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, args=(span,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.monotonic()
    time.sleep(WATCHED_S)
    told = sum((client.told for client in clients), Counter[str]())
    again = np.array([at - began for client in clients for at in client.tries_s[1:] if at - began < WATCHED_S])
    for client in clients:
        client.shutdown()
    for thread in threads:
        thread.join(10)
    mean, most = len(again) * WINDOW_S / WATCHED_S, peak(again)
    print(
        f"{CLIENTS} clients refused at once came {len(again)} times again in {WATCHED_S:.0f} s: at most {most} in {WINDOW_S} s, "
        f"{most / mean:.1f} times the mean"
    )
    assert len(again) > 2 * CLIENTS
    assert told["hinted"] > 0.98 * told.total(), told  # a few may give up by their own clock
    return most / mean


def test_two_hundred_clients_come_back_spread(tmp_path: Path) -> None:
    with TracerProvider().get_tracer("vllm.tracing.otel").start_as_current_span("llm_request") as span:
        assert isinstance(span, ReadableSpan)
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # each refusal is a line
    try:
        with receiving(tmp_path, journal_limit_bytes=1) as process:
            # A machine that stands still for a moment makes a peak of any spread; clients that come together do so each time.
            assert any(storm(process.grpc_port, span) < 3 for _ in range(3))
    finally:
        logging.getLogger("opentelemetry").setLevel(logging.NOTSET)
