"""Rollups: one row a minute, model, instance, cause and outcome; minutes that rows were written into are rebuilt."""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from phasewise.collector.store import Transaction
from phasewise.collector.tables import GAMMA, ROLLUP_HISTOGRAMS, ROLLUP_SUMS
from phasewise.rules.vocabulary import CAUSE_COLUMNS

MINUTE_NS = 60 * 10**9


def minutes_of(rows: pl.DataFrame) -> set[int]:
    """Minutes (as Unix nanoseconds of their start) that some rows finish in."""
    return set((rows["finished_unix_ns"] // MINUTE_NS * MINUTE_NS).unique().to_list())


def rebuild(transaction: Transaction, minutes: Collection[int]) -> None:
    """Make these minutes' rollups anew from `requests`.

    Durations are summed as whole nanoseconds, so the sums do not depend on the order of rows. Bucket b of a histogram holds
    values from GAMMA^b up to GAMMA^(b+1) seconds; zero and less stand in bucket -2000000000.
    """
    if not minutes:
        return
    dirty = pl.DataFrame({"bucket_unix_ns": sorted(minutes)}, schema={"bucket_unix_ns": pl.Int64})
    transaction.run("DELETE FROM rollups WHERE bucket_unix_ns IN (SELECT bucket_unix_ns FROM dirty)", dirty=dirty)
    first, last = min(minutes), max(minutes) + MINUTE_NS
    transaction.run(_INSERT, [first, last], dirty=dirty)


def _nanoseconds(column: str, name: str) -> str:
    return f"sum(CAST(round({column} * 1e9) AS BIGINT)) AS {name}"


def _histogram(name: str) -> str:
    column = f"{name}_s"
    bucket = f"CASE WHEN {column} > 0 THEN CAST(floor(ln({column}) / ln({GAMMA})) AS INTEGER) ELSE -2000000000 END"
    return f"histogram({bucket}) FILTER (WHERE {column} IS NOT NULL) AS {name}_histogram"


_COLUMNS = ", ".join(
    [
        *(_nanoseconds(f"{name}_s", f"{name}_ns") for name in ROLLUP_SUMS),
        *(_nanoseconds(column, f"{column.removesuffix('_s')}_ns") for column in CAUSE_COLUMNS),
        *(_histogram(name) for name in ROLLUP_HISTOGRAMS),
    ]
)
_INSERT = f"""
INSERT INTO rollups BY NAME
SELECT finished_unix_ns // {MINUTE_NS} * {MINUTE_NS} AS bucket_unix_ns, model, instance, cause, outcome,
  count(*) AS requests, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
  sum(preemptions) AS preemptions, {_COLUMNS}
FROM requests
WHERE finished_unix_ns >= ? AND finished_unix_ns < ?
  AND finished_unix_ns // {MINUTE_NS} * {MINUTE_NS} IN (SELECT bucket_unix_ns FROM dirty)
GROUP BY ALL
"""
