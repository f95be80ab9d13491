"""Bringing the store's file up to date: what is missing is made in one transaction, a file of a newer release is refused."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from phasewise.collector.cold import Statements
from phasewise.collector.durable import put_in_place
from phasewise.collector.records import columns, duckdb_columns
from phasewise.collector.tables import RECORDS, SCHEMA_VERSION, TABLES
from phasewise.rules.errors import MachineError


def version_of(statements: Statements, path: Path) -> int | None:
    """The schema version of an open file, None for a new one. MachineError where it is newer than this release."""
    there = statements.query(
        "SELECT count(*) AS n FROM duckdb_tables() WHERE database_name = 'phasewise' AND table_name = 'schema_version'"
    )["n"].item()
    version = statements.query("SELECT max(version) AS v FROM main.schema_version")["v"].item() if there else None
    if version is not None and version > SCHEMA_VERSION:
        raise MachineError(
            f"{path}: written by a newer release (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade phasewise, or start with another --data folder"
        )
    return None if version is None else int(version)


def prepare(statements: Statements, version: int | None) -> None:
    """Create what is missing, inside the caller's transaction."""
    statements.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER, written_unix_s BIGINT)")
    for table, definition in TABLES.items():
        statements.execute(f"CREATE TABLE IF NOT EXISTS {table} ({definition})")
    for table, record in RECORDS.items():
        _add_missing_columns(statements, table, record)
    if version != SCHEMA_VERSION:
        statements.execute("INSERT INTO schema_version VALUES (?, ?)", [SCHEMA_VERSION, int(time.time())])


def keep_copy(path: Path, version: int) -> Path:
    """A durable copy of a closed file, before it is migrated; MachineError where it has no room."""
    copy = backup_path(path, version)
    needed = 2 * path.stat().st_size
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise MachineError(
            f"{path}: needs {needed:,} bytes to be brought up to date, {free:,} are free (make room, then start again)"
        )
    partial = copy.with_name(copy.name + ".partial")
    with path.open("rb") as source, partial.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    put_in_place(partial, copy)
    return copy


def backup_path(path: Path, version: int) -> Path:
    return path.with_name(f"{path.name}.bak-{version}")


def drop_copies(path: Path) -> None:
    """After a clean shutdown the copies made before a migration are not needed any more."""
    for copy in path.parent.glob(f"{path.name}.bak-*"):
        copy.unlink(missing_ok=True)


def _add_missing_columns(statements: Statements, table: str, record: type) -> None:
    found = statements.query(
        "SELECT column_name FROM duckdb_columns() WHERE database_name = 'phasewise' AND schema_name = 'main' AND table_name = ?",
        [table],
    )
    present = set(found["column_name"])
    definitions = dict(zip(columns(record), duckdb_columns(record).split(", "), strict=True))
    for name in columns(record):
        if name not in present:
            statements.execute(f"ALTER TABLE {table} ADD COLUMN {definitions[name]}")
