"""What the scrapes of an engine would show, from its own steps: running, waiting, KV use, and counters of tokens and preemptions.

Steps are many (a hundred a second); the database thins them, so that what is read does not grow with the window. Each row stands for
a stretch of it: the state at its last step, the highest KV use, counters up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from phasewise.collector.context import Context
from phasewise.collector.exposition import SAMPLE_SCHEMA

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

SOURCE = "steps"
STRETCHES = 2_000  # of a window; a stretch is at least LEAST_NS
LEAST_NS = 250_000_000

# Parameters: from, to (ns), start and width of the stretches.
THINNED_SQL = """
SELECT instance, max(start_unix_ns) AS unix_ns,
  arg_max(greatest(coalesce(running, 0), coalesce(decode_sequences, 0)), start_unix_ns)::DOUBLE AS running,
  arg_max(coalesce(waiting, waiting_slot + waiting_kv + waiting_budget + waiting_window + waiting_policy), start_unix_ns)
    ::DOUBLE AS waiting,
  max(kv_blocks_used / nullif(kv_blocks_total, 0)) AS kv_usage_ratio,
  sum(preemptions)::DOUBLE AS preemptions,
  CASE WHEN count(prefill_tokens) = count(*) THEN sum(prefill_tokens)::DOUBLE END AS prompt_tokens,
  sum(decode_sequences)::DOUBLE AS output_tokens, count(*)::DOUBLE AS steps,
  CASE WHEN count(prefill_tokens) = count(*) THEN sum(prefill_tokens + decode_sequences)::DOUBLE END AS step_tokens
FROM engine_steps WHERE start_unix_ns >= ? AND start_unix_ns < ?
GROUP BY instance, (start_unix_ns - ?) // ?
"""
COUNTERS = ("preemptions", "prompt_tokens", "output_tokens", "steps", "step_tokens")
_STATE = ("instance", "unix_ns", "engine", "model", "source", "joined", "running", "waiting", "kv_usage_ratio")


def read_step_samples(store: Reader, from_unix_ns: int, to_unix_ns: int) -> pl.DataFrame:
    """Rows of `engine_samples`, source `steps`, for every instance that sent steps in the time; ordered by instance and time.

    Counters begin at 0 with the first step in sight; one that some step of the instance does not tell is unknown.
    """
    grid = stretches(store, from_unix_ns, to_unix_ns)
    if grid is None:
        return pl.DataFrame(schema=SAMPLE_SCHEMA)
    thin = store.query(f"{THINNED_SQL} ORDER BY instance, unix_ns", (from_unix_ns, to_unix_ns, *grid))
    whole = {name: pl.col(name).is_not_null().all().over("instance") for name in COUNTERS}
    told = thin.with_columns(
        pl.when(whole[name]).then(pl.col(name).cum_sum().over("instance")).alias(name) for name in COUNTERS
    ).with_columns(pl.lit("phasewise").alias("engine"), pl.lit(SOURCE).alias("source"), pl.lit(True).alias("joined"))
    missing = [pl.lit(None, dtype=kind).alias(name) for name, kind in SAMPLE_SCHEMA.items() if name not in told.columns]
    return told.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in SAMPLE_SCHEMA.items())


def with_step_samples(context: Context) -> Context:
    """Where nobody scrapes an engine that sends steps, but not which of them a request took part in, its steps are its samples."""
    alone = context.samples.is_empty() and not context.steps.is_empty()
    if not alone or context.requests["segments"].null_count() < len(context.requests):
        return context
    return replace(context, samples=samples_of(context.steps))


def samples_of(steps: pl.DataFrame) -> pl.DataFrame:
    """Rows of `engine_samples`, one a LEAST_NS, of the steps of one engine; a counter stops where a step does not tell it."""
    reasons = pl.sum_horizontal(
        [pl.col(f"waiting_{reason}") for reason in ("slot", "kv", "budget", "window", "policy")], ignore_nulls=False
    )
    thin = (
        steps.sort("start_unix_ns")
        .group_by("instance", pl.col("start_unix_ns") // LEAST_NS, maintain_order=True)
        .agg(
            pl.col("start_unix_ns").last().alias("unix_ns"),
            pl.max_horizontal("running", "decode_sequences").last().alias("running"),
            pl.coalesce("waiting", reasons).last().alias("waiting"),
            (pl.col("kv_blocks_used") / pl.col("kv_blocks_total")).max().alias("kv_usage_ratio"),
            pl.col("preemptions").sum(),
            pl.len().alias("steps"),
            pl.col("decode_sequences").sum().alias("output_tokens"),
            pl.when(pl.col("prefill_tokens").is_not_null().all())
            .then(pl.col("prefill_tokens").sum())
            .alias("prompt_tokens"),
        )
        .drop("start_unix_ns")
        .with_columns(pl.col("preemptions", "steps", "output_tokens", "prompt_tokens").cum_sum())
        .with_columns(pl.lit("phasewise").alias("engine"), pl.lit(SOURCE).alias("source"), pl.lit(True).alias("joined"))
    )
    missing = [pl.lit(None, dtype=kind).alias(name) for name, kind in SAMPLE_SCHEMA.items() if name not in thin.columns]
    return thin.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in SAMPLE_SCHEMA.items())


def stretches(store: Reader, from_unix_ns: int, to_unix_ns: int) -> tuple[int, int] | None:
    """Where the stretches begin that the steps of a time are thinned to, and how long each is, ns; None where there are none."""
    reach = store.query(
        "SELECT min(start_unix_ns) AS first, max(start_unix_ns) AS last FROM engine_steps"
        " WHERE start_unix_ns >= ? AND start_unix_ns < ?",
        (from_unix_ns, to_unix_ns),
    )
    first, last = reach["first"][0], reach["last"][0]
    return None if first is None else (first, max(LEAST_NS, (last - first) // STRETCHES + 1))


def with_idle_scrapes(steps: pl.DataFrame, scraped: pl.DataFrame) -> pl.DataFrame:
    """Samples from steps, and after the last of them what scrapes of the same engine say; not their counters, which began to count
    at another time."""
    later = scraped.filter(pl.col("unix_ns") > steps["unix_ns"].max())
    bare = [pl.lit(None, dtype=SAMPLE_SCHEMA[name]).alias(name) for name in SAMPLE_SCHEMA if name not in _STATE]
    return pl.concat([steps, later.with_columns(bare).select(steps.columns).cast(steps.schema)])


def of_instances(samples: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Rows of some instances, in order of time."""
    return samples.filter(pl.col("instance").is_in(list(names))).sort("unix_ns", "instance")
