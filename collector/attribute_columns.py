"""Attributes of many spans as columns, out of their JSON texts.

Each key's values come as a typed series where all of them are of the kind its reader wants, else as plain values: senders mix
integers, doubles and texts, and what such a value means is for `readings` to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Literal

import polars as pl
import pyarrow as pa
import pyarrow.json as pj

Value = object
Column = list[Value] | pl.Series
Wanted = Literal["number", "count", "text", "list", "any"]

LEAST_ROWS = 256  # below, typed reading costs more than it saves
_BLOCK_BYTES = 64 << 20
_DECODER = json.JSONDecoder()
_EXACT = 2.0**53  # whole numbers below are doubles without loss


def columns_of(texts: pl.Series, wanted: Mapping[str, Wanted]) -> dict[str, Column]:
    """Values of some attributes of every span, null where absent; keys that no span has are left out.

    texts: JSON objects, their keys written without escapes.
    """
    if len(texts) >= LEAST_ROWS and (found := _decoded(texts.fill_null("{}"), wanted)) is not None:
        return found
    told = texts.fill_null("{}").to_list()
    whole = "\n".join(told)
    present = {key: kind for key, kind in wanted.items() if f'"{key}":' in whole}
    if present and len(told) >= LEAST_ROWS and (schema := _schema(whole, present)) is not None:
        try:
            return _typed(whole, schema)
        except pa.ArrowException:  # a value of another kind than the first
            pass
    rows = json.loads(f"[{','.join(told)}]")
    return {key: [row.get(key) for row in rows] for key in present}


def repeated_columns(texts: pl.Series, keys: list[str]) -> dict[str, Column]:
    """The same where a few texts stand for all spans, as resources do."""
    if not keys:
        return {}
    told = texts.fill_null("{}")
    distinct = told.unique()
    rows = [json.loads(text) for text in distinct]
    present = [key for key in keys if any(key in row for row in rows)]
    if not present:
        return {}
    numbers = pl.int_range(len(distinct), eager=True, dtype=pl.UInt32)
    place = told.replace_strict(distinct, numbers, return_dtype=pl.UInt32) if len(distinct) > 1 else None
    return {key: _repeated([row.get(key) for row in rows], place, len(told)) for key in present}


def _repeated(values: list[Value], place: pl.Series | None, rows: int) -> Column:
    """A value of `values` for each row, the one at `place` (None: the only one)."""
    if all(isinstance(value, str | None) for value in values):
        series = pl.Series(values, dtype=pl.String)
        return series.new_from_index(0, rows) if place is None else series.gather(place)
    return values * rows if place is None else [values[i] for i in place]


def _decoded(texts: pl.Series, wanted: Mapping[str, Wanted]) -> dict[str, Column] | None:
    """The columns in one pass over all texts; None where a value is not of the kind that its reader takes first.

    The decoder turns values of other kinds into the kind it is asked for. So each kind is asked for in a form that shows what was
    turned: counts as doubles, which keep a fraction, and texts, where numbers still look like numbers; spans with truths, or with
    escaped halves of characters, are left to others.
    """
    kinds = _kinds(json.loads(texts[0]), wanted)
    mixed = [f'"{key}":' for key, kind in wanted.items() if kind == "any"]
    if kinds is None or texts.str.contains_any([":true", ":false", "\\ud", *mixed]).any():
        return None
    try:
        frame = texts.str.json_decode(pl.Struct(kinds)).struct.unnest()
    except pl.exceptions.PolarsError:
        return None
    found: dict[str, Column] = {}
    for key, kind in wanted.items():
        values = frame[key]
        if values.null_count() == len(values):
            continue
        exact = _WITNESSES[kind](values)
        if exact is None:
            return None
        found[key] = exact
    return found


def _kinds(first: Mapping[str, Value], wanted: Mapping[str, Wanted]) -> dict[str, pl.DataType] | None:
    """What to decode each key as, by the first span where that has it; None where even that one has another kind."""
    found: dict[str, pl.DataType] = {}
    for key, kind in wanted.items():
        found[key] = _FORMS[kind]
        if first.get(key) is not None:
            told = _arrow_type(first[key], kind)
            if told is None:
                return None
            if kind == "text" and told != pa.string():
                found[key] = pl.List(pl.String())
    return found


def _whole(values: pl.Series) -> pl.Series | None:
    """Doubles as whole numbers, if they are such and small enough to have been told exactly."""
    exact = (values.abs() < _EXACT) & (values == values.floor())
    return values.cast(pl.Int64) if exact.all() else None


def _lists(values: pl.Series) -> pl.Series | None:
    return values.cast(pl.List(pl.Int64)) if _whole(values.explode().drop_nulls()) is not None else None


def _no_numbers(values: pl.Series) -> pl.Series | None:
    texts = values.explode() if isinstance(values.dtype, pl.List) else values
    return values if texts.cast(pl.Float64, strict=False).null_count() == len(texts) else None


_FORMS: dict[Wanted, pl.DataType] = {
    "number": pl.Float64(),
    "count": pl.Float64(),
    "text": pl.String(),
    "list": pl.List(pl.Float64()),
    "any": pl.String(),
}
_WITNESSES: dict[Wanted, Callable[[pl.Series], pl.Series | None]] = {
    "number": lambda values: values,
    "count": _whole,
    "text": _no_numbers,
    "list": _lists,
    "any": lambda values: None,
}


def _schema(whole: str, present: Mapping[str, Wanted]) -> pa.Schema | None:
    """Arrow types by the first value of each key; None where one is of no kind that its reader wants."""
    fields = []
    for key, wanted in present.items():
        start = whole.index(f'"{key}":') + len(key) + 3
        kind = _arrow_type(_DECODER.raw_decode(whole, start)[0], wanted)
        if kind is None:
            return None
        fields.append((key, kind))
    return pa.schema(fields)


def _arrow_type(value: Value, wanted: Wanted) -> pa.DataType | None:
    if wanted == "number" and type(value) in (int, float):
        return pa.float64()
    if wanted == "count" and type(value) is int:
        return pa.int64()
    if wanted == "text" and isinstance(value, str):
        return pa.string()
    if wanted == "text" and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return pa.list_(pa.string())
    if wanted == "list" and isinstance(value, list) and all(type(v) is int for v in value):
        return pa.list_(pa.int64())
    return None


def _typed(whole: str, schema: pa.Schema) -> dict[str, Column]:
    data = whole.encode()
    table = pj.read_json(
        pa.BufferReader(data),
        pj.ReadOptions(use_threads=False, block_size=min(len(data) + 1, _BLOCK_BYTES)),
        pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    return {key: pl.Series(pl.from_arrow(table[key])) for key in schema.names}
