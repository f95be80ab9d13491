"""What an analysis of a day takes: `python tests/benchmarks/analysis.py [--requests 1000000] [--threads 2] [--json]`.

A store with that many attributed requests of one day is made first (analysis_data.py): eight engines with their scrapes, the last two
hours hot and the others in the files of sealed hours, as a server leaves them. That takes a process of its own, and is in no figure.
Then the store is opened, with as much memory as a server gives it, and asked about the whole day: for the verdict; for the cube of
prompt length, output length, concurrency and cached share; for slices by tenant, model, instance, route, engine version and hour,
each with the number of requests and p50, p95 and p99 of the time to the first token; and for single requests by key, trace id and
request id. Polars makes the same slices in the same process afterwards, out of columns that it holds in memory: reading them is not in
its figure. Where both do not agree to nine digits, the exit code is 1.

`verdicts_s`, `slices_s`, `polars_slices_s`: wall time, the best of --rounds; the lines before tell the CPU time as well, which says the
same on a busy machine. `explain_ms`: the median of 30 single requests. `peak_rss_mb`: of this process until Polars begins. With --serve
the single requests are asked of a real `phasewise serve` over HTTP as well. The last line is one JSON object with --json, else
`name value` pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import polars as pl
from benchmarks import analysis_data
from benchmarks.analysis_data import Day
from benchmarks.ingest_server import measured, memory_mb
from benchmarks.machine import machine, machine_line

from phasewise.analyzer import questions
from phasewise.analyzer.dimensions import DIMENSIONS, UNKNOWN, dimension
from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.report import request_report, window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook

REQUESTS = 1_000_000
CUBE = ("input", "output", "concurrency", "cache")
ONE_WAY = ("tenant", "model", "instance", "route", "engine_version")
METRIC, COLUMN = "ttft", "ttft_s"
EXPLAINED = 30
PACKAGES = ("phasewise", "duckdb", "polars", "pyarrow", "deltalake")
_KEYS = ("request_key", "trace_id", "request_id")


@dataclass(slots=True)
class Clock:
    """Seconds of wall and of CPU that each thing took, each time."""

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def take(self, name: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = work()
        self.wall_s.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu_s.setdefault(name, []).append(time.process_time() - cpu)
        return found

    def best_s(self, names: Sequence[str]) -> float:
        return sum(min(self.wall_s[name]) for name in names)

    def tell(self) -> None:
        for name, walls in self.wall_s.items():
            print(f"{name}: {min(walls):.3f} s, {min(self.cpu_s[name]):.3f} s of CPU, best of {len(walls)}")


def slices(store: Store, window: Window, by: tuple[str, ...]) -> pl.DataFrame:
    """Cells of a slice: by_0 ..., n, and percentiles of the metric; by the hour, its number since 1970."""
    rows = rows_in(window)
    if by == ("hour",):
        found = questions.ask(store, questions.trend_sql((METRIC,)), rows, grid=_hours(window))
        first = _hours(window).origin_unix_ns // HOUR_NS
        names = {f"{METRIC}_p{p}_s": f"metric_p{p}_s" for p in (50, 95, 99)}
        return found.rename(names).with_columns((pl.col("bin") + first).cast(pl.String).alias("by_0"))
    return questions.ask(store, questions.slices_sql(by, METRIC), rows)


def _hours(window: Window) -> questions.Bins:
    return questions.Bins(window.from_unix_ns, HOUR_NS, -(-(window.to_unix_ns - window.from_unix_ns) // HOUR_NS))


def columns_of(store: Store, window: Window) -> pl.DataFrame:
    """What Polars slices, in memory."""
    names = {DIMENSIONS[name].column for name in (*CUBE, *ONE_WAY)} - {"cached_ratio"}
    listed = ", ".join(f'"{name}"' for name in sorted({*names, "cached_tokens", "finished_unix_ns", COLUMN}))
    rows = rows_in(window)
    return store.query(f'SELECT {listed} FROM "requests" WHERE {rows.sql}', rows.parameters).rechunk()


def polars_slices(rows: pl.DataFrame, by: tuple[str, ...]) -> pl.DataFrame:
    """The rival: the same cells by Polars."""
    keys = [_polars_key(name).alias(f"by_{place}") for place, name in enumerate(by)]
    quantiles = [pl.col(COLUMN).quantile(p / 100, "linear").alias(f"metric_p{p}_s") for p in (50, 95, 99)]
    return rows.lazy().group_by(keys).agg(pl.len().alias("n"), *quantiles).collect()


def _polars_key(name: str) -> pl.Expr:
    if name == "hour":
        return (pl.col("finished_unix_ns") // HOUR_NS).cast(pl.String)
    found = dimension(name)
    if found.edges is None:
        return pl.col(found.column).fill_null(UNKNOWN)
    value = pl.col(found.column)
    if found.column == "cached_ratio":
        value = pl.when(pl.col("input_tokens") > 0).then(pl.col("cached_tokens") / pl.col("input_tokens"))
    place = pl.sum_horizontal((value >= edge).cast(pl.UInt8) for edge in found.edges)
    return pl.when(value.is_null()).then(None).otherwise(place)


def disagreement(ours: pl.DataFrame, theirs: pl.DataFrame, by: tuple[str, ...]) -> str:
    """What two slices do not agree about; empty where they do."""
    for place, name in enumerate(by):
        if name != "hour" and DIMENSIONS[name].edges is not None:
            labels = dict(enumerate(DIMENSIONS[name].labels))
            column = pl.col(f"by_{place}")
            told = column.replace_strict(labels, default=UNKNOWN, return_dtype=pl.String)
            theirs = theirs.with_columns(told.alias(f"by_{place}"))
    keys = [f"by_{place}" for place in range(len(by))]
    ours, theirs = ours.sort(keys), theirs.sort(keys)
    if not ours.select(*keys, "n").equals(theirs.select(*keys, pl.col("n").cast(pl.Int64))):
        return f"{'+'.join(by)}: other cells or counts"
    for name in ("metric_p50_s", "metric_p95_s", "metric_p99_s"):
        if not np.allclose(ours[name].to_numpy(), theirs[name].to_numpy(), rtol=1e-9, atol=1e-9, equal_nan=True):
            return f"{'+'.join(by)}: other {name}"
    return ""


def some_names(store: Store, window: Window) -> list[str]:
    """Names of requests of all hours, a third of each kind, in no order."""
    names = ", ".join(f'"{name}"' for name in _KEYS)
    rows = rows_in(window)
    found = store.query(
        f'SELECT {names} FROM "requests" WHERE {rows.sql} ORDER BY hash("request_key") LIMIT {EXPLAINED}',
        rows.parameters,
    )
    return [row[place % len(_KEYS)] for place, row in enumerate(found.iter_rows())]


def over_http(data: Path, names: Sequence[str]) -> list[float]:
    """Seconds that a server of its own takes for each."""
    seconds = []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with measured(data) as server:
        for name in names:
            started = time.perf_counter()
            with opener.open(f"{server.served.url}/api/v1/requests/{name}", timeout=60) as answer:
                json.load(answer)
            seconds.append(time.perf_counter() - started)
    return seconds


def measure(data: Path, day: Day, threads: int, rounds: int, clock: Clock) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what was not as it should be."""
    window, rulebook = Window(day.start_unix_ns, day.end_unix_ns), load_rulebook()
    asked = [CUBE, *((name,) for name in ONE_WAY), ("hour",)]
    titles = {by: f"slices by {'+'.join(by)}" for by in asked}
    failures = []
    with Store(data / "phasewise.duckdb", threads=threads) as store:
        for _ in range(rounds):
            verdict = clock.take(
                "verdict", lambda: window_verdict(store, rulebook, window, now_unix_ns=day.end_unix_ns)
            )
            cells = {by: clock.take(titles[by], partial(slices, store, window, by)) for by in asked}
        told = int(verdict["requests"]) + int(verdict["refused"]) + int(verdict["aborted"])
        if told != day.requests:
            failures.append(f"the verdict is about {told:,} of {day.requests:,} requests")
        names = some_names(store, window)
        for name in names:
            if len(clock.take("explain", partial(request_report, store, rulebook, name))) != 1:
                failures.append(f"{name} was not found")
        peak_mb = memory_mb(os.getpid())
        rows = columns_of(store, window)
    for _ in range(rounds):
        rival = {by: clock.take(f"polars: {titles[by]}", partial(polars_slices, rows, by)) for by in asked}
    failures += [said for by in asked if (said := disagreement(cells[by], rival[by], by))]
    explained = np.array(clock.wall_s["explain"]) * 1000
    print(
        f"explain: median {np.median(explained):.1f} ms, p99 {np.percentile(explained, 99):.1f} ms of {len(explained)}"
    )
    figures = {
        "requests": day.requests,
        "verdicts_s": clock.best_s(["verdict"]),
        "slices_s": clock.best_s(list(titles.values())),
        "polars_slices_s": clock.best_s([f"polars: {title}" for title in titles.values()]),
        "explain_ms": float(np.median(explained)),
        "peak_rss_mb": peak_mb,
    }
    return figures, failures


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="how many the store holds (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the database (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each question is asked (%(default)s)")
    parser.add_argument("--data", type=Path, help="keep the store here, and take it as it is where there is one")
    parser.add_argument("--serve", action="store_true", help="ask a server for single requests as well")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--fill", type=int, help=argparse.SUPPRESS)  # only make the store, which ends at this time
    chosen = parser.parse_args(arguments)
    if chosen.fill is not None:
        analysis_data.fill(chosen.data, Day(chosen.requests, chosen.fill))
        return 0
    print(machine_line(PACKAGES))
    clock, day = Clock(), Day(chosen.requests, time.time_ns() // HOUR_NS * HOUR_NS)
    with tempfile.TemporaryDirectory(prefix="phasewise-analysis-") as temporary:
        data = chosen.data or Path(temporary)
        made = data / "made.json"
        if made.exists():
            day = Day(**json.loads(made.read_text(encoding="utf-8")))
        else:
            own = ["--requests", str(day.requests), "--data", str(data), "--fill", str(day.end_unix_ns)]
            started = time.perf_counter()
            subprocess.run([sys.executable, __file__, *own], check=True)
            print(f"{day.requests:,} requests made in {time.perf_counter() - started:.0f} s")
            made.write_text(json.dumps({"requests": day.requests, "end_unix_ns": day.end_unix_ns}), encoding="utf-8")
        figures, failures = measure(data, day, chosen.threads, chosen.rounds, clock)
        clock.tell()
        if chosen.serve:
            with Store(data / "phasewise.duckdb") as store:
                names = some_names(store, Window(day.start_unix_ns, day.end_unix_ns))
            served = np.array(over_http(data, names)) * 1000
            print(f"explain of a server: median {np.median(served):.1f} ms, p99 {np.percentile(served, 99):.1f} ms")
            figures["explain_ms"] = float(np.median(served))
    for failure in failures:
        print(f"FAILED {failure}")
    if chosen.json:
        print(json.dumps(rounded(figures) | {"threads": chosen.threads} | machine(PACKAGES)))
    else:
        print(" ".join(f"{name} {value}" for name, value in rounded(figures).items()))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
