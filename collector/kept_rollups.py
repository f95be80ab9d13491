"""What expired hours said, kept apart from the store's file, so that a broken one does not take a year of it along.

``DIR/cold/expired/date=YYYY-MM-DD.parquet``: the hourly rollups of the hours of one day whose rows were deleted, and in its metadata
which hours these are. A file is written anew beside the old one, synced and renamed, before its hours expire in the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phasewise.collector.durable import put_in_place, sync_path
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.rollup_table import HOURLY_S, SCHEMA, SELECTED, add_rollups
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction

LOG = logging.getLogger(__name__)
FOLDER = "expired"
_HOURS = b"phasewise.expired_hours"
_DAY = 24
_REPEATED = ["model", "instance", "cause", "outcome"]
_MARKS = ("generation", "sealed_unix_ns", "received_unix_ns", "rows", "expired_unix_ns")
Marks = Mapping[str, int | None]  # columns of `sealed_hours`


@dataclass(slots=True)
class Kept:
    """hours: what is noted of each (_MARKS); rollups: their rows (rollup_table.SCHEMA); faults: files that cannot be read."""

    hours: dict[int, Marks] = field(default_factory=dict)
    rollups: pa.Table = field(default_factory=SCHEMA.empty_table)
    faults: list[str] = field(default_factory=list)


class KeptRollups:
    """The files of one store. Raises OSError where the disk refuses."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.directory = store.cold_directory / FOLDER

    def keep(self, hours: Collection[int], now_unix_ns: int) -> None:
        """Write down what these hours say, which are about to expire, and what the store knows of hours that expired before."""
        marked = self._store.query(
            f"SELECT hour, {', '.join(_MARKS)} FROM main.sealed_hours WHERE expired_unix_ns IS NOT NULL OR list_contains(?, hour)",
            [sorted(hours)],
        )
        known = {
            row.pop("hour"): row | {"expired_unix_ns": row["expired_unix_ns"] or now_unix_ns}
            for row in marked.iter_rows(named=True)
        }
        by_day: dict[int, dict[int, Marks]] = {}
        for hour, marks in known.items():
            by_day.setdefault(hour // _DAY, {})[hour] = marks
        for day, own in by_day.items():
            path = self._path(day)
            told = _hours_of(path)
            if told is None or own.keys() - told.keys():
                self._write(path, own, set())

    def forget(self, hours: Collection[int]) -> None:
        """Take hours out: their rollups are not kept any longer."""
        for day in {hour // _DAY for hour in hours}:
            if self._path(day).exists():
                self._write(self._path(day), {}, set(hours))

    def write_anew(self) -> None:
        """Make every file say what the store says of its hours now, and nothing else: some of it was purged there. Damaged files that were
        moved aside go, and so does what was never finished."""
        whole = _paths(self.directory)
        for stray in set(self.directory.glob("*")) - set(whole):
            stray.unlink()
        for path in whole:
            self._write(path, _hours_of(path) or {}, set(), alone=True)

    def _path(self, day: int) -> Path:
        return self.directory / f"date={datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}.parquet"

    def _write(self, path: Path, own: Mapping[int, Marks], gone: set[int], *, alone: bool = False) -> None:
        """The rollups of hours `own` as the store has them; `alone`: without what the file holds of others, but those `gone`."""
        found = self._store.query(
            f"SELECT {SELECTED} FROM main.rollups WHERE width_s = {HOURLY_S} AND list_contains(?, bucket_unix_ns // {HOUR_NS}) "
            "ORDER BY ALL",
            [sorted(own)],
        )
        rows = found.select(SCHEMA.names).to_arrow().cast(SCHEMA)
        hours = dict(own)
        before = Kept() if alone else _read([path] if path.exists() else [])
        for fault in before.faults:
            LOG.error("%s", fault)
            path.replace(path.with_suffix(".damaged"))
        if kept := {hour: marks for hour, marks in before.hours.items() if hour not in gone and hour not in own}:
            rows = pa.concat_tables([_of_hours(before.rollups, kept), rows])
            hours |= kept
        if not hours:
            path.unlink(missing_ok=True)
            return
        _make(self.directory)
        told = {_HOURS: json.dumps({str(hour): hours[hour] for hour in sorted(hours)}).encode()}
        partial = path.with_suffix(".partial")
        schema = SCHEMA.with_metadata(told)
        pq.write_table(
            rows.cast(schema),
            partial,
            compression="zstd",
            write_page_checksum=True,
            write_statistics=False,  # a day is read whole: of few rows they would be most of the file
            use_dictionary=_REPEATED,
        )
        put_in_place(partial, path)


def read_kept(cold_directory: Path) -> Kept:
    """What the files below a cold directory hold."""
    return _read(_paths(cold_directory / FOLDER))


def enter_kept(transaction: Transaction, kept: Kept) -> None:
    """Into a new store: hours that no cold file holds are marked as expired, others as having expired once; and the rollups."""
    for hour, marks in sorted(kept.hours.items()):
        known = transaction.query("SELECT 1 FROM main.sealed_hours WHERE hour = ?", [hour]).height
        if known:
            transaction.execute(
                "UPDATE main.sealed_hours SET expired_unix_ns = ? WHERE hour = ?", [marks["expired_unix_ns"], hour]
            )
        else:
            transaction.execute(
                f"INSERT INTO main.sealed_hours (hour, state, {', '.join(_MARKS)}) VALUES (?, 'expired', ?, ?, ?, ?, ?)",
                [hour, *(marks[name] for name in _MARKS)],
            )
    add_rollups(transaction, kept.rollups)


def _read(paths: list[Path]) -> Kept:
    kept = Kept()
    tables = []
    for path in paths:
        try:
            rows = pq.read_table(path, partitioning=None, page_checksum_verification=True)
            hours = _parsed(rows.schema.metadata)
            tables.append(_of_hours(rows.select(SCHEMA.names).cast(SCHEMA), hours))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            kept.faults.append(
                f"{path}: cannot be read: {str(error).splitlines()[0]}: the hourly rollups of that day's expired hours are lost"
            )
            continue
        kept.hours |= hours
    kept.rollups = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    return kept


def _hours_of(path: Path) -> dict[int, Marks] | None:
    """The hours that a file holds; None where there is none that can be read."""
    try:
        return _parsed(pq.read_schema(path).metadata)
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None


def _parsed(metadata: Mapping[bytes, bytes] | None) -> dict[int, Marks]:
    told = json.loads((metadata or {})[_HOURS])
    return {int(hour): {name: marks[name] for name in _MARKS} for hour, marks in told.items()}


def _of_hours(rows: pa.Table, hours: Collection[int]) -> pa.Table:
    return rows.filter(pc.is_in(pc.divide(rows["bucket_unix_ns"], HOUR_NS), pa.array(sorted(hours), pa.int64())))


def _paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("date=*.parquet"))


def _make(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        for above in (directory.parent, directory.parent.parent):
            sync_path(above)
