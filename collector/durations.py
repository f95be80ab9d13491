"""Nanoseconds to seconds, the same to the last bit however many rows are turned at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add

import polars as pl


def seconds(nanoseconds: pl.Expr) -> pl.Expr:
    """Whole nanoseconds as seconds.

    Polars divides a column by multiplying with the reciprocal, but a single row it really divides: without rounding, the last
    bit of a duration would tell with how many others it came.
    """
    return (nanoseconds.cast(pl.Float64) / 1e9).round(9)


def added(names: Iterable[str]) -> pl.Expr:
    """The sum of some columns, unknown ones left out, from left to right: `sum_horizontal` adds in an order that depends on the number of
    threads, and so does its last bit."""
    return reduce(add, (pl.col(name).fill_null(0.0) for name in names), pl.lit(0.0))
