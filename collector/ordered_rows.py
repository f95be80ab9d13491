"""The rows of a question in an order, for questions about millions of them.

A table of the database arrives as one piece, which goes as one: to sort it takes a second one beside it, and what the database holds to
make it a third. So many rows are read some columns at a time, within one transaction, and each part is put in order before the next comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import polars as pl

MANY_ROWS = 50_000  # from here on a copy of all columns is worth avoiding
COLUMNS_AT_ONCE = 8

Read = Callable[[str], pl.DataFrame]


def ordered(read: Read, sql: str, by: Sequence[str]) -> pl.DataFrame:
    """The rows of a SELECT, sorted by columns of it of which the last is unique. read: runs a SELECT, of one snapshot each time."""
    keys = read(f"SELECT {_quoted(by)} FROM ({sql})")
    if len(keys) < MANY_ROWS:
        return _whole(read, sql, by)
    order = keys.with_row_index("_place").sort(*by)["_place"]
    names = read(f"SELECT * FROM ({sql}) LIMIT 0").columns
    own = keys[by[-1]]
    sorted_columns: dict[str, pl.Series] = {}
    for start in range(0, len(names), COLUMNS_AT_ONCE):
        part = names[start : start + COLUMNS_AT_ONCE]
        frame = read(f"SELECT {_quoted(dict.fromkeys([*part, by[-1]]))} FROM ({sql})")
        if not frame[by[-1]].equals(own):  # rows came in another order than before: nothing promises the same one
            return _whole(read, sql, by)
        sorted_columns |= {name: frame[name].gather(order) for name in part}
    return pl.DataFrame(sorted_columns)


def _whole(read: Read, sql: str, by: Sequence[str]) -> pl.DataFrame:
    return read(sql).sort(*by)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
