"""Spans a CPU-second from the journal to attributed rows: `python tests/benchmarks/indexing.py [--json]`.

A load is drawn (`--shape`: spans a request, 8 as our own engine sends them or 1 as vLLM does, each with 3 attributes nobody knows),
scanned by the compiled scanner and appended to a real journal when its time has come; the real Writer reads it. Time is the CPU time
of this process: while the writer works for a second, a second of load arrives, as if the store had one core to itself. So figures do
not depend on what else the machine does; what making and appending the load costs is left out. The run ends when every row is
final. The last line is one JSON object with --json, else `name value` pairs.

indexed_per_cpu_s: spans over all CPU-seconds of the writer, the final attribution of every row included.
visible_p50_s, visible_p99_s: from the receipt of a request's last span to the commit of its row; backlog_s: from the end of the load
until all its rows are there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import benchmarks.store_memory  # noqa: F401 - before what it speaks of
import numpy as np
import pyarrow as pa
from benchmarks.indexing_load import Load
from benchmarks.machine import machine

from phasewise.analyzer.attribution import attributor
from phasewise.collector.journal import JournalWriter
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.commands.store_process import pause_after
from phasewise.rules.load import load_rulebook

SPANS = 480_000
PACKAGES = ("phasewise", "duckdb", "polars", "pyarrow", "numba")
RATES = {8: 60_000.0, 1: 30_000.0}
# Where CPU time goes, each without those inside it: name -> module and function.
STAGES = {
    "read the journal": ("collector.journal", "JournalReader.read"),
    "leave out what came before": ("collector.ledger", "Ledger.admit"),
    "classify": ("collector.profiles", "Profiles.classify"),
    "open traces": ("collector.buffer", "TraceBuffer.take_due"),
    "spans to rows": ("collector.assembly", "normalize"),
    "compare with stored rows": ("collector.row_writer", "changes_of"),
    "write rows": ("collector.refresher", "replace_rows"),
    "find blocks": ("collector.finisher", "read_blocks"),
    "read around new rows": ("collector.first_answers", "near_new"),
    "read around raw rows": ("collector.refresher", "load_near"),
    "read around blocks": ("collector.finisher", "load_blocks"),
    "first answers": ("collector.first_answers", "attributed_first"),
    "attribute": ("analyzer.attribution", "attribute_instances"),
    "merge answers": ("collector.answers", "attributed"),
    "answers for good": ("collector.answers", "finished"),
    "write attribution": ("collector.request_table", "_update"),
    "rollups": ("collector.rollups", "rebuild"),
    "archive": ("collector.writer", "Writer._archiving"),
    "checkpoint": ("collector.writer", "Writer.shorten_log"),
}


@dataclass
class Stages:
    """CPU seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    _open: list[list[float]] = field(default_factory=list)

    def watch(self) -> None:
        """Wraps every stage's function where it is looked up."""
        for name, (module, path) in STAGES.items():
            owner: Any = importlib.import_module(f"phasewise.{module}")
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, last, self.timed(name, getattr(owner, last)))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            inner = [0.0]
            self._open.append(inner)
            started = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.process_time() - started
                self._open.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + spent - inner[0]
                self.calls[name] = self.calls.get(name, 0) + 1
                if self._open:
                    self._open[-1][0] += spent

        return run

    def table(self, spans: int) -> Iterator[str]:
        total = sum(self.seconds.values())
        for name, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            yield f"{seconds:8.2f} s {seconds / total:6.1%} {seconds / spans * 1e6:7.2f} us a span  {self.calls[name]:6d} x  {name}"


@dataclass
class Run:
    """One load through one store."""

    load: Load
    folder: Path
    stages: Stages
    now: int = 0
    cpu_s: float = 0.0
    loaded_cpu_s: float = 0.0  # until the load's end and its backlog
    latency_s: list[float] = field(default_factory=list)
    passes: int = 0
    spent_s: float = 0.0  # by the last pass

    def __post_init__(self) -> None:
        rulebook = load_rulebook()
        self.journal = JournalWriter(self.folder / "journal", segment_age_s=1e9)
        self.store = Store(self.folder / "phasewise.duckdb")
        self.now = self.load.start_unix_ns
        self.writer = Writer(self.store, self.folder, rulebook, attributor(rulebook), clock=lambda: self.now)

    def through(self) -> float:
        """Runs to the last final row; seconds from the end of the load until all its rows were there."""
        due = iter(self.load.entries())
        waiting: tuple[int, pa.Table] | None = next(due)
        seen = 0
        while seen < self.load.requests:
            while waiting is not None and waiting[0] <= self.now:
                self.journal.append("spans", waiting[1])
                waiting = next(due, None)
            self.journal.sync()
            changes = self.step()
            visible = int(self.store.query("SELECT count(*) AS n FROM requests")["n"].item())
            for number in range(seen, visible):
                self.latency_s.append((self.now - self.load.complete_unix_ns(number)) / 1e9)
            seen = visible
            self.now += round(pause_after(changes, self.writer.behind, self.spent_s) * 1e9)
        backlog_s = (self.now - self.load.end_unix_ns) / 1e9
        self.loaded_cpu_s = self.cpu_s
        while self.store.query("SELECT count(*) AS n FROM requests WHERE NOT final")["n"].item():
            if not self.step():
                self.now += 5 * 10**9
        return backlog_s

    def step(self) -> int:
        started = time.process_time()
        changes = self.writer.step()
        self.writer.shorten_log()
        self.spent_s = time.process_time() - started
        self.cpu_s += self.spent_s
        self.now += round(self.spent_s * 1e9)
        self.passes += 1
        return changes

    def close(self) -> None:
        self.store.close()
        self.journal.close()


def measured(load: Load, profile: bool) -> dict[str, object]:
    stages = Stages()
    if profile:
        stages.watch()
    with tempfile.TemporaryDirectory(prefix="phasewise-indexing-") as name:
        run = Run(load, Path(name), stages)
        try:
            backlog_s = run.through()
            rows = run.store.query(
                "SELECT count(*) AS n, count(primary_class) AS told, count(*) FILTER (final) AS final FROM requests"
            )
        finally:
            run.close()
    for line in stages.table(load.spans):
        print(line, file=sys.stderr)
    if rows.row(0) != (load.requests,) * 3:
        raise SystemExit(f"{load.requests} requests were sent, but (rows, attributed, final) is {rows.row(0)}")
    return {
        "shape": load.shape,
        "spans": load.spans,
        "instances": load.instances,
        "load_per_s": load.rate_per_s,
        "indexed_per_cpu_s": round(load.spans / run.cpu_s),
        "until_visible_per_cpu_s": round(load.spans / run.loaded_cpu_s),
        "visible_p50_s": round(float(np.quantile(run.latency_s, 0.5)), 3),
        "visible_p99_s": round(float(np.quantile(run.latency_s, 0.99)), 3),
        "backlog_s": round(backlog_s, 2),
        "passes": run.passes,
        "store_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument(
        "--shape", type=int, choices=sorted(RATES), help="spans a request; without it both, one after the other"
    )
    parser.add_argument("--spans", type=int, default=SPANS)
    parser.add_argument("--rate", type=float, help="spans a second of load; 0: all are there at the beginning")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="CPU seconds by stage, on stderr")
    chosen = parser.parse_args(arguments)
    shapes = [chosen.shape] if chosen.shape else [8, 1]
    # A first small load: what is compiled or imported once counts for nobody.
    measured(Load(shapes[0], 8_000, 1e5, chosen.instances), profile=False)
    found: dict[str, object] = {"benchmark": "indexing", **machine(PACKAGES)}
    for shape in shapes:
        rate = RATES[shape] if chosen.rate is None else chosen.rate
        figures = measured(Load(shape, chosen.spans, rate, chosen.instances), chosen.profile)
        print(", ".join(f"{name} {value}" for name, value in figures.items()), file=sys.stderr)
        found |= {f"{name}_{shape}": value for name, value in figures.items() if name != "shape"}
    print(json.dumps(found) if chosen.json else ", ".join(f"{name} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
