"""What the scrapes of an engine would show, from its own steps: running, waiting, KV use, and counters of tokens and preemptions.

Steps are many (a hundred a second); the database thins them, so that what is read does not grow with the window. Each row stands for
a stretch of it: the state at its last step, the highest KV use, counters up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from phasewise.collector.exposition import SAMPLE_SCHEMA

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

SOURCE = "steps"
STRETCHES = 2_000  # of a window; a stretch is at least LEAST_NS
LEAST_NS = 250_000_000

_SQL = """
SELECT instance, max(start_unix_ns) AS unix_ns,
  arg_max(greatest(coalesce(running, 0), decode_sequences), start_unix_ns)::DOUBLE AS running,
  arg_max(waiting_slot + waiting_kv + waiting_budget + waiting_window + waiting_policy, start_unix_ns)::DOUBLE AS waiting,
  max(kv_blocks_used / nullif(kv_blocks_total, 0)) AS kv_usage_ratio,
  sum(preemptions)::DOUBLE AS preemptions, sum(prefill_tokens)::DOUBLE AS prompt_tokens,
  sum(decode_sequences)::DOUBLE AS output_tokens, count(*)::DOUBLE AS steps,
  sum(prefill_tokens + decode_sequences)::DOUBLE AS step_tokens
FROM engine_steps WHERE start_unix_ns >= ? AND start_unix_ns < ?
GROUP BY instance, (start_unix_ns - ?) // ? ORDER BY instance, unix_ns
"""
_COUNTERS = ("preemptions", "prompt_tokens", "output_tokens", "steps", "step_tokens")


def read_step_samples(store: Reader, from_unix_ns: int, to_unix_ns: int) -> pl.DataFrame:
    """Rows of `engine_samples`, source `steps`, for every instance that sent steps in the time; ordered by instance and time.

    Counters begin at 0 with the first step in sight.
    """
    reach = store.query(
        "SELECT min(start_unix_ns) AS first, max(start_unix_ns) AS last FROM engine_steps"
        " WHERE start_unix_ns >= ? AND start_unix_ns < ?",
        (from_unix_ns, to_unix_ns),
    )
    first, last = reach["first"][0], reach["last"][0]
    if first is None:
        return pl.DataFrame(schema=SAMPLE_SCHEMA)
    width = max(LEAST_NS, (last - first) // STRETCHES + 1)
    thin = store.query(_SQL, (from_unix_ns, to_unix_ns, first, width))
    told = thin.with_columns(pl.col(name).fill_null(0.0).cum_sum().over("instance") for name in _COUNTERS).with_columns(
        pl.lit("phasewise").alias("engine"), pl.lit(SOURCE).alias("source"), pl.lit(True).alias("joined")
    )
    missing = [pl.lit(None, dtype=kind).alias(name) for name, kind in SAMPLE_SCHEMA.items() if name not in told.columns]
    return told.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in SAMPLE_SCHEMA.items())


def of_instances(samples: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Rows of some instances, in order of time."""
    return samples.filter(pl.col("instance").is_in(list(names))).sort("unix_ns", "instance")
