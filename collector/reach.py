"""Which times of a table a statement reaches, told from its text: cold files of other times need not be opened.

Only what is certain counts: a comparison of the table's own time column with a bound value or a number, joined by AND to the
WHERE of the SELECT that reads the table. Everything else reaches everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phasewise.collector.lake import KINDS

EVER = (-(2**62), 2**62)
_QUESTION_MARKS = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|\?")


@dataclass(frozen=True, slots=True)
class _Bound:
    """One end of a time: the number of a bound value (from 0), or the value itself."""

    parameter: int | None
    value: int = 0

    def of(self, parameters: Sequence[object]) -> int | None:
        if self.parameter is None:
            return self.value
        value = parameters[self.parameter] if self.parameter < len(parameters) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One place of a statement that reads a kind of rows: from the highest of `lows` to the lowest of `highs`."""

    kind: str
    lows: tuple[_Bound, ...] = ()
    highs: tuple[_Bound, ...] = ()

    def range(self, parameters: Sequence[object]) -> tuple[int, int]:
        lows = [value for bound in self.lows if (value := bound.of(parameters)) is not None]
        highs = [value for bound in self.highs if (value := bound.of(parameters)) is not None]
        return max(lows, default=EVER[0]), min(highs, default=EVER[1])


def reach(sql: str, parameters: Sequence[object]) -> Mapping[str, tuple[int, int]]:
    """The kinds of rows a statement reads, each with the first and the last nanosecond that can matter (both included)."""
    found: dict[str, tuple[int, int]] = {}
    for reading in _readings(sql):
        low, high = reading.range(parameters)
        before = found.get(reading.kind, (low, high))
        found[reading.kind] = (min(low, before[0]), max(high, before[1]))
    return found


@lru_cache(maxsize=512)  # statements are few: values are bound, not written into them
def _readings(sql: str) -> tuple[_Reading, ...]:
    named = [kind for kind in KINDS if re.search(rf"\b{kind}\b", sql)]
    if not named:
        return ()
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    everywhere = tuple(_Reading(kind) for kind in named)
    try:
        tree = sqlglot.parse_one(_numbered(sql), dialect="duckdb")
    except (SqlglotError, RecursionError):
        return everywhere
    if not isinstance(tree, exp.Query):
        return everywhere
    return tuple(
        _reading(table) for table in tree.find_all(exp.Table) if table.name in KINDS and table.db in ("", "whole")
    )


def _numbered(sql: str) -> str:
    """Question marks as $1, $2, ...: a tree does not keep their order."""
    count = iter(range(1, len(sql) + 1))
    return _QUESTION_MARKS.sub(lambda match: f"${next(count)}" if match[0] == "?" else match[0], sql)


def _reading(table: Any) -> _Reading:
    from sqlglot import exp

    select = table.parent_select
    where = select.args.get("where") if isinstance(select, exp.Select) else None
    if where is None:
        return _Reading(table.name)
    alone = not select.args.get("joins")
    lows, highs = [], []
    for part in _conjuncts(where.this):
        if isinstance(part, exp.Between) and _is_time(part.this, table, alone):
            lows += _bounds(part.args["low"])
            highs += _bounds(part.args["high"])
        elif isinstance(part, exp.GT | exp.GTE | exp.EQ) and _is_time(part.this, table, alone):
            lows += _bounds(part.expression)
        if isinstance(part, exp.LT | exp.LTE | exp.EQ) and _is_time(part.this, table, alone):
            highs += _bounds(part.expression)
    return _Reading(table.name, tuple(lows), tuple(highs))


def _conjuncts(node: Any) -> Iterator[Any]:
    from sqlglot import exp

    if isinstance(node, exp.And):
        yield from _conjuncts(node.this)
        yield from _conjuncts(node.expression)
    elif isinstance(node, exp.Paren):
        yield from _conjuncts(node.this)
    else:
        yield node


def _is_time(node: Any, table: Any, alone: bool) -> bool:
    from sqlglot import exp

    if not isinstance(node, exp.Column) or node.name != KINDS[table.name]:
        return False
    return node.table == table.alias_or_name if node.table else alone


def _bounds(node: Any) -> list[_Bound]:
    from sqlglot import exp

    if isinstance(node, exp.Placeholder | exp.Parameter):
        number = str(node.name)
        return [_Bound(int(number) - 1)] if number.isdecimal() else []
    if isinstance(node, exp.Literal) and not node.is_string and str(node.this).isdecimal():
        return [_Bound(None, int(node.this))]
    return []
