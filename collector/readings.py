"""Attribute values to typed columns, tolerant of the types that real senders mix up.

Counts and durations arrive as integers, doubles or text, lists as lists or as text that holds JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

import polars as pl

from phasewise.collector.attribute_columns import Column, Value, Wanted
from phasewise.rules.engine_parts import Key
from phasewise.rules.engine_profile import EngineProfile

_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|μs|ms|s)")  # both signs for micro
MOST_COUNT = 10**10  # more is none of tokens or events, and sums of it overflow
_SUFFIX_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def wanted_of(profile: EngineProfile) -> dict[str, Wanted]:
    """Attributes that a profile reads, and what it takes each for first."""
    found: dict[str, Wanted] = {}
    for name, key in [*profile.times.items(), *profile.counts.items(), *profile.texts.items()]:
        kind: Wanted = "text"
        if name in profile.counts:
            kind = "count"
        elif name in profile.times and not key.suffixed:
            kind = "number"
        elif name == "segments":
            kind = "list"
        for attribute in key.attributes:
            if found.setdefault(attribute, kind) != kind:
                found[attribute] = "any"
    return found


def read_key(key: Key, own: Mapping[str, Column], resource: Mapping[str, Column], rows: int) -> Column:
    """Values of a key: the first that is there, by the order of its names, attributes of the span before those of its resource."""
    present = [own[name] for name in key.attributes if name in own]
    present += [resource[name] for name in key.resource if name in resource]
    if not present:
        return pl.Series([None], dtype=pl.Null).new_from_index(0, rows)
    found = present[0]
    for other in present[1:]:
        if isinstance(found, pl.Series) and isinstance(other, pl.Series) and found.dtype == other.dtype:
            found = found.zip_with(found.is_not_null(), other)
        else:
            found = [b if a is None else a for a, b in zip(found, other, strict=True)]
    return found


def numbers(values: Column, scale: float = 1.0) -> pl.Series:
    """Float column; text that holds a number counts, anything else is null. NaN and infinities stay, for the rules to judge."""
    if isinstance(values, pl.Series) and values.dtype in (pl.Float64, pl.Null):
        return values.cast(pl.Float64) * scale
    return pl.Series([v * scale if type(v) is float else _number(v, scale) for v in values], dtype=pl.Float64)


def _number(value: Value, scale: float) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value * scale
    if isinstance(value, str):
        try:
            return float(value) * scale
        except ValueError:
            return None
    return None


def suffixed(values: Column) -> pl.Series:
    """Seconds from texts that name their unit (`12.3ms`, `845µs`); anything else is null."""
    return pl.Series([_suffixed(v) for v in values], dtype=pl.Float64)


def _suffixed(value: Value) -> float | None:
    match = _SUFFIXED.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * _SUFFIX_S[match[2]] if match else None


def counts(values: Column) -> pl.Series:
    """Whole numbers from 0 to MOST_COUNT; anything else is null."""
    if isinstance(values, pl.Series) and values.dtype in (pl.Int64, pl.Null):
        whole = values.cast(pl.Int64)
        return whole.set((whole < 0) | (whole > MOST_COUNT), None)
    return pl.Series([v if type(v) is int and 0 <= v <= MOST_COUNT else _count(v) for v in values], dtype=pl.Int64)


def _count(value: Value) -> int | None:
    number = _number(value, 1.0)
    if number is None or not math.isfinite(number) or number < 0 or number != int(number) or number > MOST_COUNT:
        return None
    return int(number)


def texts(values: Column) -> pl.Series:
    """Text column; a list, or text that holds a JSON list, gives its first element; numbers become text."""
    if isinstance(values, pl.Series) and values.dtype == pl.List(pl.String):
        values = values.list.get(0, null_on_oob=True)
    if isinstance(values, pl.Series) and values.dtype in (pl.String, pl.Null):
        told = values.cast(pl.String)
        if not told.str.starts_with("[").any():
            return told.set(told == "", None)
    return pl.Series([_text(v) for v in values], dtype=pl.String)


def _text(value: Value) -> str | None:
    if isinstance(value, str):
        if value[:1] == "[":
            try:
                inner = json.loads(value)
            except ValueError:
                return value
            return _text(inner)
        return value or None
    if isinstance(value, list):
        return _text(value[0]) if value else None
    return None if value is None or isinstance(value, dict) else str(value)


def triples(values: Column) -> pl.Series:
    """JSON text of [phase, first step, last step] lists from flat integer lists; null where they are no triples."""
    return pl.Series([_triples(v) for v in values], dtype=pl.String)


def _triples(value: Value) -> str | None:
    if isinstance(value, pl.Series):
        value = value.to_list()
    if not isinstance(value, list) or not value or len(value) % 3 or not all(isinstance(v, int) for v in value):
        return None
    return json.dumps([value[i : i + 3] for i in range(0, len(value), 3)], separators=(",", ":"))
