"""The loads of `ingest.py`: each on a server of its own, until what it sent is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ingest_load import Generator, Load
from benchmarks.ingest_server import Measured, Probe, measured, memory_mb
from benchmarks.ingest_spans import Template

_SEEN_S = 10.0  # for the last probes, once the backlog is gone


@dataclass(slots=True)
class Run:
    """One load on one server. spans: acknowledged; cpu_s: of both processes until the backlog was gone; drain_s: None where it was
    not gone in time, and then indexed_per_cpu_s too; backlog_spans: not yet counted by the store at the end of the load; missing:
    acknowledged spans less those it counted in the end."""

    load: dict[str, Any]
    spans: int
    cpu_s: float
    backlog_spans: int
    drain_s: float | None
    missing: int
    unsettled_requests: int
    probes_failed: list[str]
    visible_p99_s: float | None
    receive_rss_mb: float
    store_rss_mb: float

    @property
    def indexed_per_cpu_s(self) -> float | None:
        return None if self.drain_s is None else self.spans / self.cpu_s

    def failures(self, name: str) -> list[str]:
        """What does not balance and what failed, in sentences."""
        found = [f"{name}: not sent: {error}" for error in self.load["errors"]]
        found += [f"{name}: {failed}" for failed in self.probes_failed]
        if self.missing or self.unsettled_requests:
            found.append(
                f"{name}: acknowledged and not stored: {self.missing:,} spans, {self.unsettled_requests:,} requests"
            )
        return found


def under_load(data: Path, chosen: Load, drain_s: float) -> Run:
    """One server, one load, until everything is indexed, settled and attributed."""
    with measured(data) as server:
        probe = Probe(server, Template(chosen.shape, 99, 8))
        used = server.cpu_s()
        probe.start()
        told = Generator(replace(chosen, port=_port(server, chosen))).result()
        probe.send_no_more()
        spans, requests = told["spans"] + probe.spans, told["requests"] + probe.requests
        backlog = spans - server.counted()
        drained = server.until_settled(spans, drain_s)
        cpu = server.cpu_s() - used
        probe.stop(_SEEN_S)
        return Run(
            told,
            spans,
            cpu,
            backlog,
            drained,
            spans - server.counted(),
            requests - server.counted("requests"),
            probe.failed,
            probe.visible_p99_s,
            memory_mb(server.receive_pid),
            memory_mb(server.store_pid),
        )


@dataclass(frozen=True, slots=True)
class Saturated:
    """A closed loop on one server: what the generator tells, and the peak memory of `receive`. What the store does with it all is not
    waited for."""

    load: dict[str, Any]
    receive_rss_mb: float

    @property
    def durable_spans_per_s(self) -> float:
        return float(self.load["spans"] / self.load["wall_s"])

    def failures(self, name: str) -> list[str]:
        return [f"{name}: not sent: {error}" for error in self.load["errors"]]


def saturated(data: Path, chosen: Load) -> Saturated:
    with measured(data) as server:
        told = Generator(replace(chosen, port=_port(server, chosen))).result()
        return Saturated(told, memory_mb(server.receive_pid))


def _port(server: Measured, chosen: Load) -> int:
    return int(server.served.ready["otlp_grpc_port" if chosen.transport == "grpc" else "otlp_http_port"])


def tell_sent(told: dict[str, Any], name: str) -> None:
    print(
        f"{name}: {told['spans']:,} spans in {told['wall_s']:.1f} s, {told['spans'] / told['wall_s']:,.0f} durable and acknowledged a "
        f"second; ack p50 {text(told['ack_p50_ms'], 'ms')}, p99 {text(told['ack_p99_ms'], 'ms')}; refused {told['refused']}; "
        f"generator {told['cpu_s']:.1f} s of CPU",
        flush=True,
    )


def tell_run(run: Run, name: str) -> None:
    tell_sent(run.load, name)
    print(
        f"  indexed, settled and attributed {text(run.indexed_per_cpu_s, 'spans per CPU-second')}; backlog at the end "
        f"{run.backlog_spans:,} spans, gone after {text(run.drain_s, 's')}; visible p99 {text(run.visible_p99_s, 's')}; "
        f"peak memory {run.receive_rss_mb:,.0f} MB receive, {run.store_rss_mb:,.0f} MB store",
        flush=True,
    )


def text(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
