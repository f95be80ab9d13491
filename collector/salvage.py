"""What can still be read of a damaged file of the store, as an export that `phasewise ingest` takes back.

Damage is a matter of blocks, and a block holds one column of some rows: where a column cannot be read its values are unknown, and a row
is lost only where what makes it itself is. The file is read from a copy and stays as it was found.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from phasewise.collector.exchange import TABLES, Table
from phasewise.collector.exchange_folder import FolderWriter
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.rules.errors import InputError, MachineError

PAGE_ROWS = 30_720  # a few of the groups that rows are packed in


@dataclass(slots=True)
class Salvaged:
    """Of one table: rows that were written, rows that were lost, and the columns that are unknown in some of them."""

    rows: int
    lost: int
    unknown: set[str]


def salvage(file: Path, out: Path) -> dict[str, object]:
    """Writes the export; counts by table. Raises InputError where file or folder is none, MachineError where nothing can be read."""
    if not file.is_file():
        raise InputError("FILE", str(file), "is no file", "name a phasewise.duckdb, as it lies in DIR/quarantine/TIME")
    if out.exists() and any(out.iterdir()):
        raise InputError("--out", str(out), "is not empty", "name a new folder")
    copies = out / ".copy"
    copies.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        copy, is_short = _copied(file, copies)
        with FolderWriter(out) as folder, copy:
            told = {name: _table(copy, name, table, folder) for name, table in TABLES.items()}
            folder.finish()
    finally:
        shutil.rmtree(copies, ignore_errors=True)
    return {
        "file": str(file),
        "out": str(out),
        "log_left_out": is_short,
        "tables": {
            name: {"rows": one.rows, "lost": one.lost, "unknown": sorted(one.unknown)}
            for name, one in told.items()
            if one.rows or one.lost
        },
    }


def _copied(file: Path, folder: Path) -> tuple[Store, bool]:
    """The opened copy, and whether its log had to be left out."""
    log = file.with_name(f"{file.name}.wal")
    for with_log in (True, False) if log.exists() else (True,):
        for path in folder.iterdir():
            path.unlink()
        for source in (file, log) if with_log and log.exists() else (file,):
            shutil.copyfile(source, folder / source.name)
        try:
            return Store(folder / file.name, as_it_is=True), not with_log
        except DamagedStore as error:
            problem = error
    raise MachineError(
        f"{file}: what leads to its rows cannot be read, so none of them can: {problem} "
        "(what came over OTLP comes back from the journal; the rest is in a backup, or where it was imported from)"
    )


def _table(store: Store, name: str, table: Table, folder: FolderWriter) -> Salvaged:
    done = Salvaged(0, 0, set())
    end, _ = store.try_query(f'SELECT coalesce(max(rowid), -1)::BIGINT + 1 AS n FROM main."{name}"')
    if end is None:
        return done
    for first in range(0, int(end.item()), PAGE_ROWS):
        _page(store, name, table, (first, first + PAGE_ROWS), folder, done)
    return done


def _page(store: Store, name: str, table: Table, rows: tuple[int, int], folder: FolderWriter, done: Salvaged) -> None:
    found = _read(store, name, table, rows, [])
    if found is None:
        unknown = _unreadable(store, name, table, rows)
        found = None if set(unknown) & {*table.key, table.time} else _read(store, name, table, rows, unknown)
        if found is None:
            there, _ = store.try_query(f'SELECT count(*) AS n FROM main."{name}" WHERE rowid >= ? AND rowid < ?', rows)
            done.lost += int(there.item()) if there is not None else rows[1] - rows[0]
            return
        done.unknown |= set(unknown) if found.num_rows else set()
    done.rows += found.num_rows
    folder.add(name, found)


def _read(store: Store, name: str, table: Table, rows: tuple[int, int], unknown: Sequence[str]) -> pa.Table | None:
    """Rows of the table's schema, without the values of columns that cannot be read."""
    selected = f"* EXCLUDE ({_listed(unknown)})" if unknown else table.selected
    found, _ = store.try_query(
        f'SELECT {selected} FROM main."{name}" WHERE {table.where} AND rowid >= ? AND rowid < ?', rows
    )
    if found is None:
        return None
    read = found.to_arrow()
    columns = [
        read[field.name].cast(field.type) if field.name in read.column_names else pa.nulls(read.num_rows, field.type)
        for field in table.schema
    ]
    return pa.table(columns, schema=table.schema)


def _unreadable(store: Store, name: str, table: Table, rows: tuple[int, int]) -> list[str]:
    if table.selected != "*":  # they are read together, or not at all
        return list(table.key)
    return [
        column
        for column in table.schema.names
        if store.try_query(f'SELECT bit_xor(hash("{column}")) FROM main."{name}" WHERE rowid >= ? AND rowid < ?', rows)[
            0
        ]
        is None
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
