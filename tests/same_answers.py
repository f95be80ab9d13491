"""What is asked of a store, as one text a question: equal texts are equal to the last bit of every number.

As a program: a store of --count requests in an order of --seed, asked with --threads of the database; prints a digest a question.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl
from builders import START_UNIX_NS, make_sample, record_table
from large_windows import NOW_UNIX_NS, SECOND_NS, WINDOW, fill, rows

from phasewise.analyzer import gauges, questions
from phasewise.analyzer.devices import devices_in
from phasewise.analyzer.filters import Condition, rows_in
from phasewise.analyzer.interference_ledger import window_ledger
from phasewise.analyzer.report import request_report, window_verdict
from phasewise.analyzer.request_interference import request_ledgers
from phasewise.analyzer.window import parse_slo
from phasewise.collector.records import EngineSample, GpuSample
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
SLOW = Condition('"e2e_s" > ?', (4.0,))
FIELDS = ("input", "cache", "tenant", "instance")
SLICED = (("input", "output", "concurrency", "cache"), *((name,) for name in FIELDS))


def filled(path: Path, count: int, seed: int, threads: int = 1) -> Store:
    """A store with the same requests, samples and readings, written in an order of its own; seed 0: as they came."""
    chance = random.Random(11)
    made = [row | _odd(chance, row) for row in rows(count)]
    samples = [_sample(chance, engine, at_s) for engine in range(3) for at_s in range(0, 3600, 60)]
    readings = [_reading(chance, device, at_s) for device in range(3) for at_s in range(0, 3600, 10)]
    if seed:
        for mixed in (made, samples, readings):
            random.Random(seed).shuffle(mixed)
    store = Store(path, threads=threads)
    fill(store, made, samples)
    with store.write() as transaction:
        transaction.insert("gpu_samples", record_table(GpuSample, readings))
    return store


def _odd(chance: random.Random, row: Mapping[str, object]) -> dict[str, object]:
    """Numbers that no sum of floats adds up alike in two orders."""
    causes = [name for name, value in row.items() if name.startswith("cause_") and value]
    key = str(row["request_key"])
    return {
        "trace_id": key,  # of the row, not of how many rows this process made before
        "span_id": key[:16],
        "request_id": f"cmpl-{key}",
        "route": chance.choice(["/v1/chat/completions", "/v1/completions", None]),
        "engine_version": chance.choice(["0.11.0", "0.12.0"]),
        "concurrency_at_arrival": chance.randrange(80),
        **{name: chance.lognormvariate(-2.0, 3.0) for name in causes},
    }


def _sample(chance: random.Random, engine: int, at_s: int) -> EngineSample:
    return make_sample(
        instance=f"gpu-{engine}",
        at_s=at_s,
        engine="vllm_v1",
        running=chance.uniform(0, 9),
        waiting=chance.uniform(0, 5),
        prefix_hit_ratio=chance.random(),
        kv_usage_ratio=chance.random(),
    )


def _reading(chance: random.Random, device: int, at_s: int) -> GpuSample:
    return GpuSample(
        instance="node",
        device=f"GPU-{device}",
        unix_ns=START_UNIX_NS + at_s * SECOND_NS,
        source="nvml",
        host="node",
        utilization_ratio=chance.random(),
        power_w=chance.uniform(100, 700),
        sm_clock_hz=chance.uniform(1e9, 2e9),
    )


def answers(store: Store) -> dict[str, str]:
    """Every question about requests, samples and devices of one window."""
    asked = rows_in(WINDOW)
    grid = questions.bins(WINDOW)

    def told(sql: str, *, marked: Condition = SLOW) -> Callable[[], str]:
        return lambda: questions.ask(store, sql, asked, grid=grid, marked=marked).write_json()

    def engines(sql: str) -> Callable[[], str]:
        return lambda: gauges.ask_samples(store, sql, WINDOW, grid=grid).write_json()

    def verdict(slo: str) -> Callable[[], str]:
        chosen = parse_slo(slo) if slo else ()
        return lambda: json.dumps(window_verdict(store, RULES, WINDOW, slo=chosen, now_unix_ns=NOW_UNIX_NS))

    found: dict[str, Callable[[], str]] = {
        "verdict": verdict(""),
        "verdict by an objective": verdict("ttft:1s"),
        "overview": told(questions.overview_sql()),
        "timeline": told(questions.trend_sql(("ttft", "e2e"))),
        "causes over time": told(questions.causes_over_time_sql()),
        "heat": told(questions.heat_sql("ttft")),
        "histogram": told(questions.histogram_sql("e2e")),
        "phases": told(questions.phases_sql()),
        "engines over time": engines(gauges.state_sql()),
        "engines": engines(gauges.totals_sql()),
        "devices": lambda: json.dumps(devices_in(store, WINDOW)),
        "interference": lambda: json.dumps(window_ledger(store, RULES, WINDOW)),
        "interference of requests": lambda: json.dumps(
            [request_ledgers(store, RULES, key) for key in _some_keys(store)]
        ),
        "explain": lambda: json.dumps([request_report(store, RULES, key) for key in _some_keys(store)]),
    }
    found |= {f"slices by {'+'.join(by)}": told(questions.slices_sql(by, "ttft")) for by in SLICED}
    found |= {f"facet {name}": told(questions.facet_sql(name)) for name in FIELDS}
    found |= {f"differences by {name}": told(questions.differences_sql(name, "ttft")) for name in FIELDS}
    return {name: ask() for name, ask in found.items()}


def _some_keys(store: Store) -> list[str]:
    found: pl.DataFrame = store.query('SELECT "request_key" FROM "requests" ORDER BY "request_key" LIMIT 5')
    return found["request_key"].to_list()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        filled(Path(folder) / "p.duckdb", chosen.count, chosen.seed, chosen.threads) as store,
    ):
        told = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in answers(store).items()}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
