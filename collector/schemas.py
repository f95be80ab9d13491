"""Polars schemas of the record types: the same columns as in Arrow and DuckDB."""

from __future__ import annotations

import polars as pl

from phasewise.collector.records import columns

Schema = dict[str, type[pl.DataType]]
_POLARS: dict[type, type[pl.DataType]] = {
    int: pl.Int64,
    float: pl.Float64,
    str: pl.String,
    bool: pl.Boolean,
    bytes: pl.Binary,
}


def polars_schema(record: type) -> Schema:
    """Column name to Polars type, in the order of the record's fields."""
    return {name: _POLARS[kind] for name, kind in columns(record).items()}
