"""Times of spans whose sender counted something else than nanoseconds: by the moment they came, the unit is beyond doubt."""

from __future__ import annotations

import polars as pl

TIME_UNIT = "time_unit"  # flag of a span whose times were in another unit
_FACTORS = (10**3, 10**6, 10**9)  # of microseconds, milliseconds and seconds
_NEAR_NS = 366 * 86_400 * 10**9  # so far from its receipt may the time of a span lie, in whatever unit
_LONGEST_NS = (
    86_400 * 10**9
)  # so long may a span be then: by a clock that starts in 1970 one of a second would last days in another unit
_FIRST_NS = 946_684_800 * 10**9  # the year 2000: earlier times are none of a trace


def in_nanoseconds(spans: pl.DataFrame) -> pl.DataFrame:
    """`spans` (records.SPAN_SCHEMA) with start and end in nanoseconds, flagged where they were not. What the archive keeps stays as it
    was sent."""
    early = (spans["start_unix_ns"] < _FIRST_NS) & (spans["received_unix_ns"] > _FIRST_NS)
    if not early.any():
        return spans
    start, end = pl.col("start_unix_ns"), pl.col("end_unix_ns")
    factor = pl.lit(None, dtype=pl.Int64)
    for one in _FACTORS:
        off = (start.cast(pl.Float64) * one - pl.col("received_unix_ns").cast(pl.Float64)).abs()
        length = (end.cast(pl.Float64) - start.cast(pl.Float64)) * one
        factor = pl.when(early & (off < _NEAR_NS) & (length <= _LONGEST_NS)).then(one).otherwise(factor)
    marked = spans.with_columns(factor.alias("_factor"))
    known = pl.col("_factor").is_not_null()
    largest = (2**63 - 1) // pl.col("_factor")
    flags = pl.coalesce(pl.col("flags").str.strip_suffix("]") + f',"{TIME_UNIT}"]', pl.lit(f'["{TIME_UNIT}"]'))
    return marked.with_columns(
        pl.when(known).then(start * pl.col("_factor")).otherwise(start).alias("start_unix_ns"),
        pl.when(known & (end <= largest)).then(end * pl.col("_factor")).otherwise(end).alias("end_unix_ns"),
        pl.when(known).then(flags).otherwise("flags").alias("flags"),
    ).drop("_factor")
