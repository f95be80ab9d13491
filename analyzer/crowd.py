"""A window's requests in a few rows: for each instance, engine and outcome how many they are, and the first and last of their times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from phasewise.analyzer.filters import NOT_FINISHED, Condition

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

_BY = ("instance", "engine", "outcome")
# Whose clock runs ahead says nothing of now: `finished_now_unix_ns` is the last end that is no later than a given moment.
_TIMES = {
    "arrival_min_unix_ns": "arrival_unix_ns",
    "finished_min_unix_ns": "finished_unix_ns",
    "finished_max_unix_ns": "finished_unix_ns",
}
_ORDER = ("finished_min_unix_ns", *_BY)


def read_crowd(store: Reader, rows: Condition, until_unix_ns: int) -> pl.DataFrame:
    """Of rows that stay in the store, those that end first first."""
    times = ", ".join(f'{name.split("_")[1]}("{column}") AS "{name}"' for name, column in _TIMES.items())
    found = store.query(
        f'SELECT "instance", "engine", coalesce("outcome", \'ok\') AS "outcome", count(*) AS "n", {times},'
        ' max("finished_unix_ns") FILTER ("finished_unix_ns" <= ?) AS "finished_now_unix_ns"'
        f' FROM "requests" WHERE {rows.sql} GROUP BY ALL',
        (until_unix_ns, *rows.parameters),
    )
    return found.sort(_ORDER)


def crowd_of(rows: pl.DataFrame, until_unix_ns: int) -> pl.DataFrame:
    """The same of rows that were read."""
    told = rows.select("instance", "engine", pl.col("outcome").fill_null("ok"), "arrival_unix_ns", "finished_unix_ns")
    ended = pl.col("finished_unix_ns")
    times = {name: pl.col(column).min() if "_min_" in name else pl.col(column).max() for name, column in _TIMES.items()}
    found = told.group_by(_BY).agg(
        pl.len().cast(pl.Int64).alias("n"),
        **times,
        finished_now_unix_ns=ended.filter(ended <= until_unix_ns).max(),
    )
    return found.sort(_ORDER)


def served(crowd: pl.DataFrame) -> pl.DataFrame:
    """The part that was served."""
    return crowd.filter(~pl.col("outcome").is_in(NOT_FINISHED))


def many(crowd: pl.DataFrame) -> int:
    """How many requests they are."""
    return int(crowd["n"].sum())


def with_outcome(crowd: pl.DataFrame, outcome: str) -> Mapping[str | None, int]:
    """How many requests have an outcome, by instance."""
    found = crowd.filter(pl.col("outcome") == outcome).group_by("instance").agg(pl.col("n").sum())
    return dict(found.iter_rows())
