"""F04 and F36: a collector that is started again, by signals of every kind, while clients go on sending."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_ports
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from process_tree import children, gone
from serving import serving
from span_ledger import Ledger, Sender, assert_account, sending, settle

from phasewise.collector.store import Store

pytestmark = [pytest.mark.live, pytest.mark.slow]


@contextmanager
def sdk_clients(ports: list[int]) -> Iterator[list[TracerProvider]]:
    """Four clients of the OpenTelemetry SDK with its default queue, tries and time-outs."""
    exporters: list[SpanExporter] = [
        GrpcExporter(endpoint=f"http://127.0.0.1:{ports[1]}", insecure=True) for _ in range(2)
    ]
    exporters += [HttpExporter(endpoint=f"http://127.0.0.1:{ports[2]}/v1/traces") for _ in range(2)]
    providers = []
    for number, exporter in enumerate(exporters):
        provider = TracerProvider(resource=Resource({"service.name": "vllm", "service.instance.id": str(number)}))
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        providers.append(provider)
    yield providers


@pytest.mark.parametrize("pause_s", [0.0, 3.0])
def test_clients_of_the_sdk_lose_nothing_over_a_restart(
    tmp_path: Path, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """F04: 50 spans a second each, SIGTERM, a pause, a new start: the exporters' own retries bridge it."""
    ports = free_ports(3)
    made: set[str] = set()

    def finish(providers: list[TracerProvider], seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for provider in providers:
                tracer = provider.get_tracer("vllm.tracing.otel")
                with tracer.start_as_current_span("llm_request", kind=SpanKind.SERVER) as span:
                    span.set_attribute("gen_ai.latency.time_in_queue", 0.0)
                    span.set_attribute("gen_ai.usage.prompt_tokens", 3)
                made.add(format(span.get_span_context().span_id, "016x"))
            time.sleep(0.02)

    with sdk_clients(ports) as providers:
        with serving(tmp_path / "data", ports=ports) as server:
            finish(providers, 1.5)
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 10
        finish(providers, pause_s)
        with serving(tmp_path / "data", ports=ports) as server:
            finish(providers, 1.5)
            for provider in providers:
                provider.shutdown()
            assert server.stop() == 0
    settle(tmp_path / "data")
    with Store(tmp_path / "data" / "phasewise.duckdb") as store:
        found = store.query("SELECT span_id FROM requests")["span_id"].to_list()
    assert len(found) == len(set(found))
    assert made == set(found), f"{len(made - set(found))} of {len(made)} spans are lost"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_stop_under_load_keeps_the_account(tmp_path: Path, number: signal.Signals) -> None:
    ledger = Ledger()
    with serving(tmp_path / "data") as server:
        ports = {"grpc": server.ready["otlp_grpc_port"], "http": server.ready["otlp_http_port"]}
        senders = [Sender(ledger, lambda p=port: p, name, tries=1, pause_s=0.01) for name, port in ports.items()]  # type: ignore[misc, arg-type]
        with sending(*senders):
            time.sleep(1.5)
            parts = children(server.process.pid)
            assert server.stop(number) == 0
        assert all(gone(pid) for pid in parts.values())
    assert len(ledger.acknowledged) > 100
    assert_account(tmp_path / "data", ledger)


def test_a_second_interrupt_ends_at_once_and_loses_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    with serving(tmp_path / "data") as server:
        sender = Sender(ledger, lambda: server.ready["otlp_http_port"], "http", tries=1, pause_s=0.01)
        with sending(sender):
            time.sleep(1.0)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            server.process.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert server.process.wait(10) in (0, 128 + signal.SIGINT)
            assert time.monotonic() - began < 5
    time.sleep(0.5)
    (tmp_path / "data" / "receive.json").unlink(missing_ok=True)  # of a process that was killed
    assert len(ledger.acknowledged) > 20
    assert_account(tmp_path / "data", ledger)
