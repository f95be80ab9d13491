"""What a server takes in, keeps and shows: `python tests/benchmarks/ingest.py [--seconds 60] [--json] [--peers] [--during-analysis]`.

A real `phasewise serve` on a temporary directory, a load generator of its own process on the same machine (ingest_load.py: 32
connections of one engine each, 512 spans a body, three keys a span that nobody knows, requests that end now). Each of four loads has
a server of its own. A closed loop, which sends as much as is answered, tells only what is durable and acknowledged. Then --rate spans
a second arrive, once with eight spans a request and once with one: backlog, rows, memory; and half of --rate, with eight. Rates of the
server are per second of CPU of its two processes, from the first body until nothing is left to do, so that they tell the same on a busy
machine. `rotel` and `arize-phoenix` get the same load where they are installed, each in an environment of its own (ingest_peers.py);
--peers installs them. With --during-analysis a server that already holds --requests requests of the last hours is asked the heaviest
questions about them while 20,000 spans a second arrive (ingest_analysis.py); --analysis-only leaves out all else.

The last lines are a table of all figures, each with its floor and whether it was met, and a line for each that was missed. With --json
the last line is one object with the same names. null: not measured, or nothing to tell. `ack_p50_ms` and `ack_p99_ms` are those of the
worst of the four loads, `backlog_drain_s` of the worse of both at --rate. `visible_p99_s`, and `visible_p99_s_1` at one span a request:
from the acknowledgement of a request to the first answer of `GET /api/v1/requests/{id}` with it, while --rate arrives, which may be more
than the server takes; `visible_p99_at_half_rate_s`: at half of that, for at most 20 s. `receive_rss_mb` is the peak over all loads,
`store_rss_mb` over all but the closed loop.

Exit code 1 where a floor was missed, an account does not balance, something was not sent, or a question was not answered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scan as scan_bench
from benchmarks.ingest_analysis import during_analysis
from benchmarks.ingest_figures import missed, named, table, worst
from benchmarks.ingest_load import Load
from benchmarks.ingest_peers import peers
from benchmarks.ingest_runs import saturated, tell_run, tell_sent, under_load
from benchmarks.machine import machine

from phasewise.collector.scanners import cache_folder, load

_HALF_RATE_S = 20.0
_PEERS_S = 20.0
_PACKAGES = ("phasewise", "pyarrow", "numba", "grpcio", "granian", "duckdb", "polars")


@dataclass(slots=True)
class Told:
    """What was measured so far. failures: what makes the figures say less than they seem to; notes: what is absent."""

    figures: dict[str, Any] = field(default_factory=dict)
    account: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scanned_per_s(seconds: float) -> float:
    """Spans a second of one core's CPU time, by the compiled scanner alone."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    source = random.Random(1)
    bodies = [scan_bench.batch(source) for _ in range(8)]
    return scan_bench.spans_per_s(load(cache_folder(folder)), bodies, seconds)


def loads(told: Told, folder: Path, chosen: argparse.Namespace) -> None:
    """The scanner alone, and the four loads."""
    scans = scanned_per_s(min(3.0, chosen.seconds))
    print(f"scanner: {scans:,.0f} spans a second of one core", flush=True)
    common = Load(0, chosen.seconds, "tree", chosen.transport, chosen.connections, limit_spans=chosen.limit_spans)
    names = {
        "closed": f"closed loop, {chosen.transport}",
        "tree": f"eight spans a request, {chosen.transport}",
        "single": f"one span a request, {chosen.transport}",
        "half": f"half of that, eight spans a request, {chosen.transport}",
    }
    closed = saturated(folder / "closed", replace(common, seconds=min(chosen.closed_loop_s, chosen.seconds)))
    tell_sent(closed.load, names["closed"])
    told.failures += closed.failures(names["closed"])
    at_rate = replace(common, rate_spans_per_s=chosen.rate)
    calm = replace(common, seconds=min(_HALF_RATE_S, chosen.seconds), rate_spans_per_s=chosen.rate / 2)
    runs = {}
    for name, wanted in (("tree", at_rate), ("single", replace(at_rate, shape="single")), ("half", calm)):
        runs[name] = under_load(folder / name, wanted, chosen.drain_s)
        tell_run(runs[name], names[name])
        told.failures += runs[name].failures(names[name])
    tree, single, half = runs["tree"], runs["single"], runs["half"]
    every = [closed.load, *(run.load for run in runs.values())]
    told.figures |= {
        "scan_spans_per_s": scans,
        "durable_spans_per_s": closed.durable_spans_per_s,
        "indexed_per_cpu_s_8": tree.indexed_per_cpu_s,
        "indexed_per_cpu_s_1": single.indexed_per_cpu_s,
        "backlog_drain_s": worst([tree.drain_s, single.drain_s]),
        "ack_p50_ms": worst([sent["ack_p50_ms"] for sent in every]),
        "ack_p99_ms": worst([sent["ack_p99_ms"] for sent in every]),
        "visible_p99_s": tree.visible_p99_s,
        "visible_p99_s_1": single.visible_p99_s,
        "visible_p99_at_half_rate_s": half.visible_p99_s,
        "receive_rss_mb": max(closed.receive_rss_mb, *(run.receive_rss_mb for run in runs.values())),
        "store_rss_mb": max(run.store_rss_mb for run in runs.values()),
    }
    told.account = {
        "acknowledged_spans": sum(run.spans for run in runs.values()),
        "missing_spans": sum(run.missing for run in runs.values()),
    }


def measure(folder: Path, chosen: argparse.Namespace) -> Told:
    told = Told()
    if not chosen.analysis_only:
        loads(told, folder, chosen)
    if chosen.during_analysis or chosen.analysis_only:
        figures, failures = during_analysis(folder / "analysis", chosen.requests, chosen.drain_s)
        told.figures |= figures
        told.failures += failures
    if chosen.peers != "none" and not chosen.analysis_only:
        found, told.notes = peers(folder, min(_PEERS_S, chosen.seconds), install=chosen.peers == "install")
        told.figures |= found
    return told


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load at --rate, for each shape")
    parser.add_argument("--rate", type=float, default=80_000.0, help="spans a second where the store is measured")
    parser.add_argument("--closed-loop-s", type=float, default=10.0, help="of the closed loop, at most --seconds")
    parser.add_argument("--transport", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--limit-spans", type=int, help="stop each load after about so many")
    parser.add_argument("--drain-s", type=float, default=600.0, help="longest wait for the backlog")
    parser.add_argument(
        "--peers",
        nargs="?",
        choices=("install", "installed", "none"),
        const="install",
        default="installed",
        help="rotel and arize-phoenix: install them where they are not, measure them where they are (default), or leave them out",
    )
    parser.add_argument(
        "--during-analysis",
        action="store_true",
        help="also: ack p99 beside the heaviest analysis of --requests requests",
    )
    parser.add_argument("--analysis-only", action="store_true", help="nothing but that")
    parser.add_argument("--requests", type=int, default=1_000_000, help="stored before the analysis")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parsed(arguments)
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[2] / "build" / "compiled"))
    here = machine(_PACKAGES)  # before it is busy with this
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="phasewise-bench-") as folder:
        told = measure(Path(folder), chosen)
    print(
        f"whole run: {time.monotonic() - started:.0f} s; {here['cpu']}, {here['cores']} cores, load before {here['load_1m']:.1f}"
    )
    print(", ".join(f"{name} {version}" for name, version in here["versions"].items()))
    for line in (*table(told.figures), *told.notes, *(f"FAILED {failure}" for failure in told.failures)):
        print(line)
    unmet = missed(told.figures)
    if chosen.json:
        whole = {
            "benchmark": "ingest",
            **named(told.figures),
            "missed": unmet,
            "failures": told.failures,
            **told.account,
            "seconds": chosen.seconds,
            "rate_spans_per_s": chosen.rate,
            "transport": chosen.transport,
            **here,
        }
        print(json.dumps({key: _rounded(value) for key, value in whole.items()}))
    return 1 if unmet or told.failures else 0


def _rounded(value: object) -> object:
    return (round(value) if abs(value) >= 100 else round(value, 3)) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
