"""Attributes of many spans as columns, out of their JSON texts.

Each key's values come as a typed series where all of them are of the kind its reader wants, else as plain values: senders mix
integers, doubles and texts, and what such a value means is for `readings` to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def columns_of(texts: pl.Series, wanted: Mapping[str, Wanted]) -> dict[str, Column]:
    """Values of some attributes of every span, null where absent; keys that no span has are left out.

    texts: JSON objects, their keys written without escapes.
    """
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
    place = told.replace_strict(distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.UInt32).to_list()
    rows = [json.loads(text) for text in distinct]
    return {key: [rows[i].get(key) for i in place] for key in keys if any(key in row for row in rows)}


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
