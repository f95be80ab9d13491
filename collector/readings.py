"""Attribute values out of spans: JSON text to typed columns, tolerant of the types that real senders mix up.

Counts and durations arrive as integers, doubles or text, lists as lists or as text that holds JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence

import polars as pl

from phasewise.rules.engine_parts import Key

Value = object
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|μs|ms|s)")  # both signs for micro
_SUFFIX_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def attribute_columns(texts: pl.Series, keys: Iterable[str]) -> dict[str, list[Value]]:
    """Values of some attributes of every span; None where absent. `texts` are JSON objects."""
    rows = json.loads("[" + ",".join(texts.fill_null("{}").to_list()) + "]")
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(keys)}


def first_of(columns: dict[str, list[Value]], keys: Sequence[str], rows: int) -> list[Value]:
    """The first value that is there, by the order of `keys`."""
    present = [columns[key] for key in keys if key in columns]
    if not present:
        return [None] * rows
    found = present[0]
    for other in present[1:]:
        found = [b if a is None else a for a, b in zip(found, other, strict=True)]
    return found


def read_key(key: Key, own: dict[str, list[Value]], resource: dict[str, list[Value]], rows: int) -> list[Value]:
    found = first_of(own, key.attributes, rows)
    if key.resource:
        found = [b if a is None else a for a, b in zip(found, first_of(resource, key.resource, rows), strict=True)]
    return found


def numbers(values: list[Value], scale: float = 1.0) -> pl.Series:
    """Float column; text that holds a number counts, anything else is null. NaN and infinities stay, for the rules to judge."""
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


def suffixed(values: list[Value]) -> pl.Series:
    """Seconds from texts that name their unit (`12.3ms`, `845µs`); anything else is null."""
    return pl.Series([_suffixed(v) for v in values], dtype=pl.Float64)


def _suffixed(value: Value) -> float | None:
    match = _SUFFIXED.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * _SUFFIX_S[match[2]] if match else None


def counts(values: list[Value]) -> pl.Series:
    """Whole numbers of at least 0; anything else is null."""
    return pl.Series([v if type(v) is int and v >= 0 else _count(v) for v in values], dtype=pl.Int64)


def _count(value: Value) -> int | None:
    number = _number(value, 1.0)
    if number is None or not math.isfinite(number) or number < 0 or number != int(number) or number > 2**62:
        return None
    return int(number)


def texts(values: list[Value]) -> pl.Series:
    """Text column; a list, or text that holds a JSON list, gives its first element; numbers become text."""
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


def triples(values: list[Value]) -> pl.Series:
    """JSON text of [phase, first step, last step] lists from flat integer lists; null where they are no triples."""
    return pl.Series([_triples(v) for v in values], dtype=pl.String)


def _triples(value: Value) -> str | None:
    if not isinstance(value, list) or not value or len(value) % 3 or not all(isinstance(v, int) for v in value):
        return None
    return json.dumps([value[i : i + 3] for i in range(0, len(value), 3)], separators=(",", ":"))
