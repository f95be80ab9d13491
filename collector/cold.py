"""Hot and cold as one: the views that readers see, and hours that come back because something late touches them.

Recent rows stand in the tables of the schema `main`. A sealed hour stands in Parquet files of the cold tier, which the table
`cold_files` names; the schema `whole` holds one view a kind over both, and readers look there. The views change in the
transaction that moves the rows, so a reader sees each row exactly once whenever it begins.

The writer works on hot rows only. Before it takes spans or samples that reach into sealed hours, `thaw` brings these hours back
whole: late rows, their neighbours and their rollups are then made as they always are, with a higher revision, and the hour is
sealed again under a higher generation. So of a row that came twice the view holds the highest revision, and no other.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import polars as pl
import pyarrow.parquet as pq

from phasewise.collector.balanced import pending, rename_hot
from phasewise.collector.cold_files import ColdFiles
from phasewise.collector.lake import HOUR_NS, KINDS, crc32c_of
from phasewise.collector.reach import EVER
from phasewise.collector.records import arrow_schema, columns
from phasewise.collector.schemas import polars_schema
from phasewise.collector.tables import RECORDS, SCHEMA_VERSION, ColdFile

SCHEMA = "whole"
LONGEST_NS = 6 * HOUR_NS
# What tells two rows of a kind apart.
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "requests": ("request_key",),
        "turns": ("turn_key",),
        "engine_steps": ("instance", "step", "start_unix_ns"),
        "engine_samples": ("instance", "unix_ns"),
        "gpu_samples": ("instance", "device", "unix_ns"),
    }
)


class Reading(Protocol):
    """Where a SELECT runs: the store, or a transaction."""

    def query(self, sql: str, parameters: Sequence[object] = ()) -> pl.DataFrame: ...


class Statements(Reading, Protocol):
    """Where SQL runs: the writer's transaction."""

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> None: ...

    def insert(self, table: str, rows: pl.DataFrame) -> None: ...


def names(kind: str) -> str:
    """The columns of a kind, quoted, in order."""
    return ", ".join(f'"{name}"' for name in columns(RECORDS[kind]))


def view(kind: str, keys: Iterable[str]) -> str:
    """The statement that makes the view of a kind; keys: the names of columns that its cold files have.

    A reader says which files it needs in the variable `cold_<kind>` before it asks. Files of an older release lack columns of
    today: these are NULL there, and until such hours are written again every file read is looked into first.
    """
    hot = f'SELECT {names(kind)} FROM main."{kind}"'
    told = set(keys)
    if not told:
        return f'CREATE OR REPLACE VIEW {SCHEMA}."{kind}" AS {hot}'
    files = f"getvariable('{variable(kind)}')"
    if told == {column_names(kind)}:
        cold = f"SELECT {names(kind)} FROM read_parquet({files}, hive_partitioning = false)"
    else:
        mixed = f"SELECT * FROM read_parquet({files}, hive_partitioning = false, union_by_name = true)"
        cold = f"SELECT {names(kind)} FROM ({hot} WHERE FALSE UNION ALL BY NAME {mixed})"
    return f'CREATE OR REPLACE VIEW {SCHEMA}."{kind}" AS {cold} UNION ALL {hot}'


def variable(kind: str) -> str:
    """The name under which the view of a kind finds the list of its files."""
    return f"cold_{kind}"


def choose_files(statements: Statements, files: ColdFiles, reached: Mapping[str, tuple[int, int]]) -> bool:
    """Set which files the views read: those that may hold rows of these times. False where none does: then the hot tables
    alone hold everything that is asked for.

    Part of the transaction of the statement it is for: files and hot rows are of one moment.
    """
    chosen = False
    for kind, (low, high) in reached.items():
        found = statements.query(
            "SELECT path FROM main.cold_files WHERE kind = ? AND hour BETWEEN ? AND ? ORDER BY hour, path",
            [kind, low // HOUR_NS, high // HOUR_NS],
        )
        paths = _there(files, found)
        chosen = chosen or bool(paths)
        if not paths:  # a view over files needs one to read the columns from
            found = statements.query("SELECT path FROM main.cold_files WHERE kind = ? LIMIT 1", [kind])
            paths = _there(files, found) or [str(_empty_file(files.directory, kind))] * found.height
        if paths:
            statements.execute(f"SET VARIABLE {variable(kind)} = ?", [paths])
    return chosen


def _there(files: ColdFiles, found: pl.DataFrame) -> list[str]:
    """Of some files those that can be read. One that is gone takes its own rows with it, and no question: `missing_files` says so."""
    return [str(files.directory / path) for path in found["path"] if files.is_there(path)]


def _empty_file(directory: Path, kind: str) -> Path:
    """A file without rows, for a view whose own files are all gone."""
    path = directory / f".none-{SCHEMA_VERSION}" / f"{kind}.parquet"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f"{kind}.{secrets.token_hex(6)}")  # another thread may be at it
        pq.write_table(arrow_schema(RECORDS[kind]).empty_table(), partial)
        partial.replace(path)
    return path


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)


def make_views(statements: Statements, files: ColdFiles, kinds: Iterable[str] = KINDS) -> None:
    """Make the views anew from what `cold_files` says; part of the caller's transaction."""
    statements.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    choose_files(statements, files, dict.fromkeys(KINDS, EVER))
    for kind in kinds:
        found = statements.query("SELECT DISTINCT columns FROM main.cold_files WHERE kind = ?", [kind])
        statements.execute(view(kind, found["columns"]))


def enter_files(statements: Statements, placed: Iterable[ColdFile]) -> None:
    """Note data files as the place of their hour's rows."""
    rows = [asdict(one) for one in placed]
    statements.insert("cold_files", pl.DataFrame(rows, schema=polars_schema(ColdFile)))


def placed_file(directory: Path, kind: str, hour: int, path: str) -> ColdFile:
    """What is to be noted of a data file, read from it."""
    whole = directory / path
    told = pq.read_metadata(whole)
    times = [
        statistics
        for i in range(told.num_row_groups)
        for j in range(told.num_columns)
        if (part := told.row_group(i).column(j)).path_in_schema == KINDS[kind] and (statistics := part.statistics)
    ]
    return ColdFile(
        kind=kind,
        hour=hour,
        path=path,
        rows=told.num_rows,
        bytes=whole.stat().st_size,
        crc32c=crc32c_of(whole),
        columns=",".join(sorted(told.schema.names)),
        low_unix_ns=min((one.min for one in times), default=hour * HOUR_NS),
        high_unix_ns=max((one.max for one in times), default=(hour + 1) * HOUR_NS - 1),
    )


def hours_touched(rows: pl.DataFrame, start: str, end: str, near_ns: int) -> set[int]:
    """The hours that rows of these times have to do with: from their start to their end, `near_ns` around.

    Of a row that took very long the last `LONGEST_NS`: a start in 1970 must not bring back everything.
    """
    if rows.is_empty():
        return set()
    first = pl.max_horizontal(pl.col(start), pl.col(end) - LONGEST_NS)
    ranges = rows.select(
        ((pl.min_horizontal(first, end) - near_ns) // HOUR_NS).alias("low"),
        ((pl.col(end) + near_ns) // HOUR_NS).alias("high"),
    ).unique()
    return {hour for low, high in ranges.iter_rows() for hour in range(low, high + 1)}


def thaw(statements: Statements, files: ColdFiles, hours: Collection[int], now_unix_ns: int) -> bool:
    """Bring those of these hours that are sealed back into the hot tables; whether any of them ever was sealed."""
    if not hours:
        return False
    found = statements.query(
        "SELECT hour, state FROM main.sealed_hours WHERE hour BETWEEN ? AND ? ORDER BY hour", [min(hours), max(hours)]
    ).filter(pl.col("hour").is_in(list(hours)))
    sealed = found.filter(pl.col("state") == "sealed")["hour"].to_list()
    for hour in sealed:
        _thaw_hour(statements, files, hour)
        statements.execute(
            "UPDATE main.sealed_hours SET state = 'thawed', thawed_unix_ns = ? WHERE hour = ?", [now_unix_ns, hour]
        )
    if sealed:
        rename_hot(statements, pending(statements))
        make_views(statements, files)
    return found.height > 0


def unknown(statements: Statements, kind: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows whose key is in no hot row of their time."""
    key, column = KEYS[kind], KINDS[kind]
    known = statements.query(
        f'SELECT DISTINCT {", ".join(key)} FROM main."{kind}" WHERE "{column}" BETWEEN ? AND ?',
        [rows[column].min(), rows[column].max()],
    )
    return rows.join(known, on=list(key), how="anti", maintain_order="left")


def _thaw_hour(statements: Statements, files: ColdFiles, hour: int) -> None:
    """A row that is hot already is the later one of the two."""
    found = statements.query("SELECT kind, path, columns FROM main.cold_files WHERE hour = ? ORDER BY path", [hour])
    there = [one for one in found.iter_rows() if files.is_there(one[1])]
    for kind, path, told in there:
        present = set(told.split(","))
        listed = ", ".join(f'"{name}"' for name in columns(RECORDS[kind]) if name in present)
        column = KINDS[kind]
        same = " AND ".join(f'h."{name}" IS NOT DISTINCT FROM c."{name}"' for name in KEYS[kind])
        statements.execute(
            f'INSERT INTO main."{kind}" ({listed}) SELECT {listed} '
            f"FROM read_parquet([{_listed([files.directory / path])}], hive_partitioning = false) c WHERE NOT EXISTS "
            f'(SELECT 1 FROM main."{kind}" h WHERE {same} AND h."{column}" >= ? AND h."{column}" < ?)',
            [hour * HOUR_NS, (hour + 1) * HOUR_NS],
        )
    # What is gone stays named until it is said.
    statements.execute(
        "DELETE FROM main.cold_files WHERE hour = ? AND list_contains(?, path)", [hour, [path for _, path, _ in there]]
    )


def rewriting_due(statements: Reading, small_bytes: int = 32 << 20) -> int | None:
    """The oldest hour with several small files of a kind, or with files that lack columns of today; None where all is well."""
    parts = " OR ".join("(kind = ? AND columns != ?)" for _ in KINDS)
    told = [value for kind in KINDS for value in (kind, column_names(kind))]
    found = statements.query(
        f"SELECT min(hour) AS hour FROM (SELECT hour, kind, count(*) AS n FROM main.cold_files WHERE bytes < {small_bytes} "
        f"GROUP BY ALL HAVING n > 1 UNION ALL SELECT hour, kind, 1 FROM main.cold_files WHERE {parts})",
        told,
    )["hour"].item()
    return None if found is None else int(found)


def column_names(kind: str) -> str:
    """The columns of a kind today, sorted, with commas."""
    return ",".join(sorted(columns(RECORDS[kind])))
