"""Nanoseconds to seconds, the same to the last bit however many rows are turned at once."""

from __future__ import annotations

import polars as pl


def seconds(nanoseconds: pl.Expr) -> pl.Expr:
    """Whole nanoseconds as seconds.

    Polars divides a column by multiplying with the reciprocal, but a single row it really divides: without rounding, the last
    bit of a duration would tell with how many others it came.
    """
    return (nanoseconds.cast(pl.Float64) / 1e9).round(9)
