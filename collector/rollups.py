"""Rollups: one row a 10 s, minute or hour, model, instance, shape, cause and outcome; dirty buckets are rebuilt.

A shape is the whole part of the binary logarithm of prompt and of output length, NULL where the length is unknown.
"""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from phasewise.collector.store import Transaction
from phasewise.collector.tables import GAMMA, ROLLUP_HISTOGRAMS, ROLLUP_SUMS
from phasewise.rules.vocabulary import CAUSE_COLUMNS

SECOND_NS = 10**9
MINUTE_NS = 60 * SECOND_NS
WIDTHS_S = (10, 60, 3600)


def minutes_of(rows: pl.DataFrame) -> set[int]:
    """Minutes (as Unix nanoseconds of their start) that some rows finish in."""
    return set((rows["finished_unix_ns"] // MINUTE_NS * MINUTE_NS).unique().to_list())


def rebuild(transaction: Transaction, minutes: Collection[int]) -> None:
    """Make anew, from `requests`, the rollups of these minutes, of the 10 s inside them, and of the hours around them.

    Durations are summed as whole nanoseconds, so the sums do not depend on the order of rows. Bucket b of a histogram holds
    values from GAMMA^b up to GAMMA^(b+1) seconds; zero and less stand in bucket -2000000000.
    """
    if not minutes:
        return
    for width_s in WIDTHS_S:
        span_ns = max(width_s * SECOND_NS, MINUTE_NS)  # what is rebuilt whole: a minute, or the hour
        starts = sorted({minute // span_ns * span_ns for minute in minutes})
        dirty = pl.DataFrame({"start_unix_ns": starts}, schema={"start_unix_ns": pl.Int64})
        transaction.run(_DELETE, [width_s, span_ns, span_ns], dirty=dirty)
        transaction.run(_insert(width_s, span_ns), [starts[0], starts[-1] + span_ns], dirty=dirty)


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
_DELETE = """
DELETE FROM rollups WHERE width_s = ? AND bucket_unix_ns // ? * ? IN (SELECT start_unix_ns FROM dirty)
"""


def _insert(width_s: int, span_ns: int) -> str:
    width_ns = width_s * SECOND_NS
    return f"""
INSERT INTO rollups BY NAME
SELECT {width_s} AS width_s, finished_unix_ns // {width_ns} * {width_ns} AS bucket_unix_ns,
  CAST(floor(log2(nullif(input_tokens, 0))) AS BIGINT) AS input_log2,
  CAST(floor(log2(nullif(output_tokens, 0))) AS BIGINT) AS output_log2, model, instance, cause, outcome,
  count(*) AS requests, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
  sum(preemptions) AS preemptions, {_COLUMNS}
FROM requests
WHERE finished_unix_ns >= ? AND finished_unix_ns < ?
  AND finished_unix_ns // {span_ns} * {span_ns} IN (SELECT start_unix_ns FROM dirty)
GROUP BY ALL
"""
