"""The tables that `phasewise export` writes and `phasewise ingest` takes back: their order, their time, what makes a row itself.

A page of a table is an Arrow table; a cursor says where the next begins. Rows come in order of time, so a cursor is the time of
the last row and how many rows of that very time were given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from phasewise.collector import records, rollup_table
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.tables import SCHEMA_VERSION
from phasewise.collector.transaction import Transaction
from phasewise.rules.errors import InputError

PAGE_ROWS = 32_768
TABLE_KEY = b"phasewise.table"  # metadata of a Parquet file: which table it holds
VERSION_KEY = b"phasewise.schema_version"
SPANS, PLACES, ROLLUPS = "spans", "places", "rollups"

Read = Callable[[str, Sequence[object]], pl.DataFrame]


@dataclass(frozen=True, slots=True)
class Table:
    """time: the column that orders it and that a window selects by, empty for few rows that belong to no time; until: where a row covers
    time up to this column; key: what makes a row itself; traced: rows belong to traces of requests, and a filter of requests selects
    them. selected: the columns in SQL; width_ns: how long a time each row sums up, of all requests: a window takes those that lie in it whole, a
    filter none; where: which rows it has."""

    schema: pa.Schema
    time: str
    key: tuple[str, ...]
    until: str = ""
    traced: bool = False
    selected: str = "*"
    width_ns: int = 0
    where: str = "TRUE"


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "runs": Table(records.arrow_schema(records.Run), "from_unix_ns", ("run",), until="to_unix_ns"),
        "instances": Table(
            records.arrow_schema(records.Instance),
            "first_seen_unix_ns",
            ("instance", "kind", "first_seen_unix_ns", "joined_to"),
            until="last_seen_unix_ns",
        ),
        PLACES: Table(records.arrow_schema(records.Place), "", ("instance",)),
        "annotations": Table(
            records.arrow_schema(records.Annotation),
            "unix_ns",
            ("unix_ns", "kind", "text"),
            where=f"NOT (kind = 'restart' AND source = '{records.OWN_SOURCE}')",
        ),
        "requests": Table(records.arrow_schema(records.Request), "finished_unix_ns", ("request_key",), traced=True),
        "turns": Table(records.arrow_schema(records.Turn), "finished_unix_ns", ("turn_key",), traced=True),
        "engine_steps": Table(
            records.arrow_schema(records.EngineStep), "start_unix_ns", ("instance", "step", "start_unix_ns")
        ),
        "engine_samples": Table(records.arrow_schema(records.EngineSample), "unix_ns", ("instance", "unix_ns")),
        ROLLUPS: Table(
            rollup_table.SCHEMA,
            "bucket_unix_ns",
            rollup_table.KEY,
            selected=rollup_table.SELECTED,
            width_ns=HOUR_NS,
            where=f"width_s = {rollup_table.HOURLY_S}",
        ),
        "gpu_samples": Table(records.arrow_schema(records.GpuSample), "unix_ns", ("instance", "device", "unix_ns")),
    }
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What to export: a window (Unix nanoseconds, the end outside) and a condition on `requests` with its values."""

    from_unix_ns: int = 0
    to_unix_ns: int = 1 << 62
    condition: str = ""
    parameters: tuple[object, ...] = ()

    @property
    def is_everything(self) -> bool:
        return not self.from_unix_ns and self.to_unix_ns >= 1 << 62 and not self.condition


def page(read: Read, name: str, selection: Selection, cursor: str = "") -> tuple[pa.Table, str]:
    """Up to PAGE_ROWS rows of a table, and the cursor of the page behind it ("" where there is none)."""
    table = TABLES[name]
    if not table.time:
        return _places(read, table, selection, cursor)
    if table.width_ns and selection.condition:
        return table.schema.empty_table(), ""
    after, skip = _parsed(cursor, selection.from_unix_ns)
    tests = [table.where, f"{table.time} < ?"]
    values: list[object] = [selection.to_unix_ns - table.width_ns + bool(table.width_ns)]
    if table.until:  # what began before the window and reaches into it belongs to it
        tests.append(f"{table.until} >= ?")
        values.append(selection.from_unix_ns)
        after = after if cursor else -(1 << 62)
    tests.append(f"{table.time} >= ?")
    values.append(after)
    if selection.condition and table.traced:
        window = "finished_unix_ns >= ? AND finished_unix_ns < ?"
        chosen = selection.condition
        if name != "requests":
            chosen = f"trace_id IN (SELECT trace_id FROM requests WHERE {window} AND ({selection.condition}))"
            values += [selection.from_unix_ns, selection.to_unix_ns]
        tests.append(f"({chosen})")
        values += selection.parameters
    order = ", ".join(dict.fromkeys((table.time, *table.key)))
    sql = f"SELECT {table.selected} FROM {name} WHERE {' AND '.join(tests)} ORDER BY {order}"
    found = read(f"{sql} LIMIT {PAGE_ROWS} OFFSET {skip}", values)
    if table.width_ns and found.height == PAGE_ROWS:
        return _whole_times(read, table, found, sql, values)
    rows = found.select(table.schema.names).to_arrow().cast(table.schema)
    if found.height < PAGE_ROWS:
        return rows, ""
    last = int(found[table.time][-1])
    same = found.filter(pl.col(table.time) == last).height + (skip if last == after else 0)
    return rows, f"{last}:{same}"


def _whole_times(
    read: Read, table: Table, found: pl.DataFrame, sql: str, values: Sequence[object]
) -> tuple[pa.Table, str]:
    """A page without the rows of a time that are not all in it: whoever takes them back compares sums. One time alone is a page, however
    many rows it has."""
    first, last = int(found[table.time][0]), int(found[table.time][-1])
    if first == last:
        found = read(f"SELECT * FROM ({sql}) WHERE {table.time} = ?", [*values, first])
        last += table.width_ns
    rows = found.filter(pl.col(table.time) < last).select(table.schema.names).to_arrow().cast(table.schema)
    return rows, f"{last}:0"


_SEEN = """WHERE instance IN (
  SELECT instance FROM instances WHERE first_seen_unix_ns < ? AND last_seen_unix_ns >= ?
  UNION SELECT instance FROM gpu_samples WHERE unix_ns < ? AND unix_ns >= ?)"""


def _places(read: Read, table: Table, selection: Selection, cursor: str) -> tuple[pa.Table, str]:
    """A page of them, all or those of instances and devices seen in the window; the cursor counts those before."""
    _, skip = _parsed(cursor, 0)
    window = (selection.to_unix_ns, selection.from_unix_ns)
    seen, values = ("", ()) if selection.is_everything else (_SEEN, window * 2)
    found = read(f"SELECT * FROM {PLACES} {seen} ORDER BY instance LIMIT {PAGE_ROWS} OFFSET {skip}", values)
    rows = found.select(table.schema.names).to_arrow().cast(table.schema)
    return rows, "" if found.height < PAGE_ROWS else f"0:{skip + found.height}"


def insert_rollups(transaction: Transaction, rows: pa.Table, now_unix_ns: int) -> int:
    """Hourly rollups that tell more than the requests here do, as they are; how many. Their hours are made from requests no more."""
    taken = rollup_table.take_fuller(transaction, rows.cast(rollup_table.SCHEMA))
    rollup_table.add_rollups(transaction, taken)
    hours = pc.unique(pc.divide(taken["bucket_unix_ns"], HOUR_NS)).to_pylist()
    rollup_table.mark_expired(transaction, hours, now_unix_ns)
    return int(taken.num_rows)


def insert(transaction: Transaction, name: str, rows: pa.Table) -> pl.DataFrame:
    """The rows that are not there yet, as they are; returns them."""
    table = TABLES[name]
    frame = pl.from_arrow(rows.cast(table.schema))
    assert isinstance(frame, pl.DataFrame)
    same = " AND ".join(f"t.{column} IS NOT DISTINCT FROM n.{column}" for column in table.key)
    if name == "instances":  # a replica is one row, whenever it was seen
        same = f"({same}) OR (t.kind = 'spans' AND n.kind = 'spans' AND t.instance = n.instance)"
    new = transaction.query(
        f"SELECT n.* FROM new_rows n WHERE NOT EXISTS (SELECT 1 FROM {name} t WHERE {same})",
        new_rows=frame.unique(list(table.key), keep="first", maintain_order=True),
    )
    transaction.insert(name, new)
    return new


def marked(schema: pa.Schema, name: str) -> pa.Schema:
    """The schema of a file that holds this table."""
    return schema.with_metadata({TABLE_KEY: name.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()})


def table_of(schema: pa.Schema, source: str) -> str:
    """Which table a file holds. Raises InputError where it is none of an export, or of a newer release."""
    metadata = schema.metadata or {}
    name = str(metadata.get(TABLE_KEY, b"").decode("utf-8", "replace"))
    if name != SPANS and name not in TABLES:
        raise InputError(
            source, "", "is Parquet that phasewise export did not write", "import the file it was made from"
        )
    version = metadata.get(VERSION_KEY, b"").decode("utf-8", "replace")
    if not version.isdecimal() or int(version) > SCHEMA_VERSION:
        remedy = f"upgrade phasewise: this release knows {SCHEMA_VERSION}"
        raise InputError(source, "schema_version", f"is {version or 'missing'}", remedy)
    wanted = records.SPAN_SCHEMA if name == SPANS else TABLES[name].schema
    strange = [field.name for field in schema if field.name not in wanted.names]
    if strange:
        raise InputError(source, strange[0], f"is no column of {name}", "export it again")
    return name


def aligned(rows: pa.Table, name: str, source: str) -> pa.Table:
    """Columns as this release has them; what an older one did not write is unknown."""
    schema = records.SPAN_SCHEMA if name == SPANS else TABLES[name].schema
    try:
        columns = [
            rows[field.name].cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ]
    except pa.ArrowInvalid as error:
        raise InputError(source, name, f"has a value of another type: {error}", "export it again") from None
    return pa.table(columns, schema=schema)


def _parsed(cursor: str, start: int) -> tuple[int, int]:
    if not cursor:
        return start, 0
    time, _, same = cursor.partition(":")
    if not time.lstrip("-").isdecimal() or not same.isdecimal():
        raise InputError("cursor", cursor[:40], "is no cursor", "take the one that the page before gave")
    return int(time), int(same)
