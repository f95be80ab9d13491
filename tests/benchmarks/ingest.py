"""What a server takes in, keeps and shows: `python tests/benchmarks/ingest.py [--seconds 60] [--json] [--peers] [--during-analysis]`.

A real `phasewise serve` on a temporary directory, a load generator of its own process on the same machine (ingest_load.py: 32
connections of one engine each, 512 spans a body, three keys a span that nobody knows, requests that end now). Each of four loads has
a server of its own. A closed loop, which sends as much as is answered, tells only what is durable and acknowledged. Then --rate spans
a second arrive, once with eight spans a request and once with one: backlog, rows, memory; and half of --rate, with eight. Rates of the
server are per second of CPU of its two processes, from the first body until nothing is left to do, so that they tell the same on a busy
machine. With --peers `rotel` and `arize-phoenix` get the same load, each from an environment of its own (ingest_peers.py).

With --json the last line is one object. null: not measured, or nothing to measure with. `visible_p99_s`: from the acknowledgement of a
request to the first answer of `GET /api/v1/requests/{id}` with it, while --rate arrives at eight spans a request, which may be more than
the server takes; `visible_p99_at_half_rate_s`: at half of that, for at most 20 s. `receive_rss_mb` is the peak over all loads,
`store_rss_mb` over all but the closed loop. Exit code 1 where an account does not balance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scan as scan_bench
from benchmarks.ingest_load import Generator, Load
from benchmarks.ingest_server import Probe, measured, memory_mb
from benchmarks.ingest_spans import Shape, Template

from phasewise.collector.scanners import cache_folder, load

_HALF_RATE_S = 20.0
_SEEN_S = 10.0  # for the last probes, once the backlog is gone
_PACKAGES = ("phasewise", "pyarrow", "numba", "grpcio", "granian", "duckdb", "polars")


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
    visible_p99_s: float | None
    receive_rss_mb: float
    store_rss_mb: float

    @property
    def indexed_per_cpu_s(self) -> float | None:
        return None if self.drain_s is None else self.spans / self.cpu_s

    @property
    def balances(self) -> bool:
        return not self.missing and not self.unsettled_requests and not self.load["errors"]


def under_load(data: Path, chosen: Load, drain_s: float) -> Run:
    """One server, one load, until everything is indexed, settled and attributed."""
    with measured(data) as server:
        port = server.served.ready["otlp_grpc_port" if chosen.transport == "grpc" else "otlp_http_port"]
        probe = Probe(server, Template(chosen.shape, 99, 8))
        used = server.cpu_s()
        probe.start()
        told = Generator(replace(chosen, port=int(port))).result()
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


def saturated(data: Path, chosen: Load) -> Saturated:
    with measured(data) as server:
        port = server.served.ready["otlp_grpc_port" if chosen.transport == "grpc" else "otlp_http_port"]
        told = Generator(replace(chosen, port=int(port))).result()
        return Saturated(told, memory_mb(server.receive_pid))


def scanned_per_s(seconds: float) -> float:
    """Spans a second of one core's CPU time, by the compiled scanner alone."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    source = random.Random(1)
    bodies = [scan_bench.batch(source) for _ in range(8)]
    return scan_bench.spans_per_s(load(cache_folder(folder)), bodies, seconds)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
    }


def _sent(told: dict[str, Any], name: str) -> None:
    print(
        f"{name}: {told['spans']:,} spans in {told['wall_s']:.1f} s, {told['spans'] / told['wall_s']:,.0f} durable and acknowledged a "
        f"second; ack p50 {_text(told['ack_p50_ms'], 'ms')}, p99 {_text(told['ack_p99_ms'], 'ms')}; refused {told['refused']}; "
        f"generator {told['cpu_s']:.1f} s of CPU"
    )


def _table(run: Run, name: str) -> None:
    told = run.load
    _sent(told, name)
    print(
        f"  indexed, settled and attributed {_text(run.indexed_per_cpu_s, 'spans per CPU-second')}; backlog at the end "
        f"{run.backlog_spans:,} spans, gone after {_text(run.drain_s, 's')}; visible p99 {_text(run.visible_p99_s, 's')}; "
        f"peak memory {run.receive_rss_mb:,.0f} MB receive, {run.store_rss_mb:,.0f} MB store"
    )
    if not run.balances:
        print(
            f"  DOES NOT BALANCE: {run.missing} spans and {run.unsettled_requests} requests missing; errors {told['errors']}"
        )


def _text(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load at --rate, for each shape")
    parser.add_argument("--rate", type=float, default=80_000.0, help="spans a second where the store is measured")
    parser.add_argument("--closed-loop-s", type=float, default=10.0, help="of the closed loop, at most --seconds")
    parser.add_argument("--transport", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--limit-spans", type=int, help="stop each load after about so many")
    parser.add_argument("--drain-s", type=float, default=600.0, help="longest wait for the backlog")
    parser.add_argument("--peers", action="store_true", help="install and measure rotel and arize-phoenix too")
    parser.add_argument(
        "--during-analysis", action="store_true", help="ack p99 beside the heaviest analysis of 1 M requests"
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="rows for --during-analysis")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[2] / "build" / "compiled"))
    started = time.monotonic()
    scans = scanned_per_s(min(3.0, chosen.seconds))
    print(f"scanner: {scans:,.0f} spans a second of one core")
    runs: dict[Shape, Run] = {}
    shapes: tuple[Shape, ...] = ("tree", "single")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phasewise-bench-") as folder:
        common = Load(0, chosen.seconds, "tree", chosen.transport, chosen.connections, limit_spans=chosen.limit_spans)
        closed = replace(common, seconds=min(chosen.closed_loop_s, chosen.seconds))
        full = saturated(Path(folder) / "closed-loop", closed)
        _sent(full.load, f"closed loop, {chosen.transport}")
        for shape in shapes:
            load_of_shape = replace(common, shape=shape, rate_spans_per_s=chosen.rate)
            runs[shape] = under_load(Path(folder) / shape, load_of_shape, chosen.drain_s)
            _table(runs[shape], f"{'eight spans' if shape == 'tree' else 'one span'} a request, {chosen.transport}")
        calm = replace(common, seconds=min(_HALF_RATE_S, chosen.seconds), rate_spans_per_s=chosen.rate / 2)
        half = under_load(Path(folder) / "half-rate", calm, chosen.drain_s)
        _table(half, f"half of that, eight spans a request, {chosen.transport}")
        if chosen.during_analysis:
            from benchmarks.ingest_analysis import during_analysis

            figures |= during_analysis(Path(folder) / "analysis", chosen.requests)
        if chosen.peers:
            from benchmarks.ingest_peers import peers

            figures |= peers(Path(folder), min(20.0, chosen.seconds))
    first, second = runs["tree"], runs["single"]
    every = (first, second, half)
    told = {
        "benchmark": "ingest",
        "scan_spans_per_s": scans,
        "durable_spans_per_s": full.durable_spans_per_s,
        "indexed_per_cpu_s_8": first.indexed_per_cpu_s,
        "indexed_per_cpu_s_1": second.indexed_per_cpu_s,
        "backlog_drain_s": first.drain_s,
        "ack_p50_ms": full.load["ack_p50_ms"],
        "ack_p99_ms": full.load["ack_p99_ms"],
        "visible_p99_s": first.visible_p99_s,
        "visible_p99_at_half_rate_s": half.visible_p99_s,
        "receive_rss_mb": max(full.receive_rss_mb, *(run.receive_rss_mb for run in every)),
        "store_rss_mb": max(run.store_rss_mb for run in every),
        "rotel_spans_per_cpu_s": None,
        "phoenix_stored_spans_per_cpu_s": None,
        **figures,
        "acknowledged_spans": sum(run.spans for run in every),
        "missing_spans": sum(run.missing for run in every),
        "seconds": chosen.seconds,
        "rate_spans_per_s": chosen.rate,
        "transport": chosen.transport,
        **machine(),
    }
    print(f"whole run: {time.monotonic() - started:.0f} s")
    if chosen.json:
        print(json.dumps({key: _rounded(value) for key, value in told.items()}))
    return 0 if all(run.balances for run in every) and not full.load["errors"] else 1


def _rounded(value: object) -> object:
    return (round(value) if abs(value) >= 100 else round(value, 3)) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
