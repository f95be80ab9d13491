"""Statements of the store's writer, and how what DuckDB answers becomes a frame."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import polars as pl
import pyarrow as pa

from phasewise.collector.cold import choose_files
from phasewise.collector.cold_files import ColdFiles
from phasewise.collector.reach import EVER

_FEW_ROWS = 100  # in one statement
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*$")


class Cursor(Protocol):
    """What is used here of a cursor of DuckDB, which only the store opens."""

    def execute(self, query: str, parameters: object = ...) -> Any: ...

    def sql(self, query: str, *, params: object = ...) -> Any: ...

    def register(self, view_name: str, python_object: object) -> Any: ...

    def unregister(self, view_name: str) -> Any: ...


class Transaction:
    """Statements of one transaction of the writer. Tables are the hot ones; `whole.` before a name means the cold rows too."""

    def __init__(self, cursor: Cursor, cold_files: ColdFiles | None = None) -> None:
        self._cursor = cursor
        self._cold_files = cold_files
        self.names_requests = False  # whether a statement that is no question named the rows of requests, hot or cold

    @property
    def cold_files(self) -> ColdFiles:
        assert self._cold_files is not None
        return self._cold_files

    def look_back(self, *kinds: str, within: tuple[int, int] = EVER) -> None:
        """Makes `whole.<kind>` see the cold tier in the statements that follow: its hours between two times (Unix nanoseconds)."""
        choose_files(self, self.cold_files, dict.fromkeys(kinds, within))

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> None:
        self.names_requests = self.names_requests or "requests" in sql or "cold_files" in sql
        self._cursor.execute(sql, list(parameters) or None)

    def query(self, sql: str, parameters: Sequence[object] = (), **frames: pl.DataFrame | pa.Table) -> pl.DataFrame:
        """Rows of a SELECT inside the transaction; `frames` are tables by that name in it."""
        with self._registered(frames):
            relation = self._cursor.sql(sql, params=list(parameters) or None)
            return plain_integers(relation.pl()) if relation is not None else pl.DataFrame()

    def run(self, sql: str, parameters: Sequence[object] = (), **frames: pl.DataFrame | pa.Table) -> None:
        """A statement that reads `frames`."""
        with self._registered(frames):
            self.execute(sql, parameters)

    def insert(self, table: str, rows: pl.DataFrame | pa.Table) -> None:
        """Append rows; columns are matched by name, absent ones are NULL."""
        _check_identifier(table)
        if len(rows):
            self.run(f"INSERT INTO main.{table} BY NAME SELECT * FROM new_rows", new_rows=rows)

    def replace(self, table: str, key: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a few rows, which begin with their key, in the place of those with the same key. Registering a frame costs more than
        writing that few."""
        _check_identifier(table)
        for start in range(0, len(rows), _FEW_ROWS):
            own = rows[start : start + _FEW_ROWS]
            keys, values = (", ".join([f"({', '.join('?' * len(names))})"] * len(own)) for names in (key, columns))
            self.execute(
                f"DELETE FROM main.{table} WHERE ({', '.join(key)}) IN ({keys})",
                [value for row in own for value in row[: len(key)]],
            )
            self.execute(
                f"INSERT INTO main.{table} ({', '.join(columns)}) VALUES {values}",
                [value for row in own for value in row],
            )

    @contextlib.contextmanager
    def _registered(self, frames: dict[str, pl.DataFrame | pa.Table]) -> Iterator[None]:
        for name, frame in frames.items():
            self._cursor.register(name, frame)
        try:
            yield
        finally:
            for name in frames:
                self._cursor.unregister(name)


def plain_integers(frame: pl.DataFrame) -> pl.DataFrame:
    """DuckDB sums whole numbers as 128 bits, which arrive as decimals without fraction."""
    wide = [name for name, kind in frame.schema.items() if isinstance(kind, pl.Decimal) and kind.scale == 0]
    return frame.with_columns(pl.col(name).cast(pl.Int64) for name in wide) if wide else frame


def _check_identifier(name: str) -> None:
    assert _IDENTIFIER.match(name), name
