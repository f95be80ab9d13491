"""The cold tier on disk: one local Delta Lake table a kind of row, partitioned by date and hour, zstd Parquet.

``DIR/cold/<kind>/date=YYYY-MM-DD/hour=HH/*.parquet`` and ``DIR/cold/<kind>/_delta_log``. An hour is written whole, under a
generation: writing the same generation again is known by its application transaction id and does nothing, a higher one replaces
the hour. Whatever reads Delta Lake may read these tables; only this module writes them. The library does not survive `fork`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import pyarrow as pa

from phasewise.collector.durable import sync_path
from phasewise.rules.errors import MachineError

HOUR_NS = 3600 * 10**9
# Kinds of rows that become cold, and the column whose hour they belong to.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "requests": "finished_unix_ns",
        "turns": "finished_unix_ns",
        "engine_steps": "start_unix_ns",
        "engine_samples": "unix_ns",
        "gpu_samples": "unix_ns",
    }
)
_PARTITION = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=(\d\d)/")
_ROW_GROUP = 65_536
_PAGE = 4_096  # rows; a page tells its least and largest value, so that of ordered ones most are passed over
# Columns that one row is looked for by. Their values occur about once, so a dictionary of them is as large as they are.
_NAMES = ("request_key", "trace_id", "request_id", "client_request_id")
_FALSE_HITS_RATIO = 0.01
_CHUNK_BYTES = 1 << 20


class Lake:
    """The tables below `directory` (DIR/cold). Hours are whole hours since 1970. Raises MachineError where the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_hour(
        self, kind: str, hour: int, generation: int, schema: pa.Schema, rows: Iterable[pa.RecordBatch]
    ) -> None:
        """Make these rows the whole of an hour, durably; nothing happens where this generation was written before."""
        from deltalake import CommitProperties, Transaction, write_deltalake
        from deltalake.exceptions import DeltaError

        if self.generation(kind, hour) >= generation:
            return
        table = self._table(kind)
        date, of_day = _partition(hour)
        full = schema.append(pa.field("date", pa.string())).append(pa.field("hour", pa.string()))
        batches = (_with_partition(batch, full, date, of_day) for batch in rows)
        settings: dict[str, Any] = (
            {"mode": "append", "partition_by": ["date", "hour"], "configuration": _configuration(KINDS[kind])}
            if table is None
            else {"mode": "overwrite", "predicate": f"date = '{date}' AND hour = '{of_day}'"}
        )
        if table is not None and set(schema.names) - {field.name for field in table.schema().fields}:
            settings["schema_mode"] = "merge"
        try:
            for folder in (self.directory, self._path(kind)):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_deltalake(
                str(self._path(kind)),
                pa.RecordBatchReader.from_batches(full, batches),
                writer_properties=_layout(schema),
                commit_properties=CommitProperties(app_transactions=[Transaction(_application(hour), generation)]),
                **settings,
            )
        except (DeltaError, OSError) as error:
            raise MachineError(f"{self._path(kind)}: the cold tier cannot be written: {error}") from error
        self._make_durable(kind, hour)

    def generation(self, kind: str, hour: int) -> int:
        """The last generation of an hour that was written; 0 where none was."""
        table = self._table(kind)
        return int(table.transaction_version(_application(hour)) or 0) if table is not None else 0

    def files(self, kind: str) -> dict[int, list[str]]:
        """The data files of each hour, relative to `directory`."""
        table = self._table(kind)
        found: dict[int, list[str]] = {}
        for uri in table.file_uris() if table is not None else []:
            path = os.path.relpath(uri.removeprefix("file://"), self.directory.resolve())
            if match := _PARTITION.search(path):
                found.setdefault(_hour(match[1], match[2]), []).append(path)
        return {hour: sorted(paths) for hour, paths in sorted(found.items())}

    def remove_hours(self, kind: str, hours: Collection[int]) -> None:
        """Take hours out of a table; their files stay until `vacuum`."""
        from deltalake.exceptions import DeltaError

        table = self._table(kind)
        present = self.files(kind).keys() & set(hours)
        if table is None or not present:
            return
        parts = [f"(date = '{date}' AND hour = '{of_day}')" for date, of_day in map(_partition, sorted(present))]
        try:
            table.delete(" OR ".join(parts))
        except (DeltaError, OSError) as error:
            raise MachineError(f"{self._path(kind)}: the cold tier cannot be written: {error}") from error
        sync_path(self._path(kind) / "_delta_log")

    def vacuum(self, kind: str, older_than_s: float, keep: Collection[str] = ()) -> int:
        """Delete files that no current row stands in, where they were last written that long ago; how many. Not those of `keep`.

        A reader that began before may still be in them: give it time.
        """
        root = self._path(kind)
        if not root.exists():
            return 0
        current = {*keep, *(path for paths in self.files(kind).values() for path in paths)}
        newest = datetime.now(UTC).timestamp() - older_than_s
        gone = 0
        for path in root.glob("date=*/hour=*/*"):
            if str(path.relative_to(self.directory)) not in current and path.stat().st_mtime <= newest:
                path.unlink(missing_ok=True)
                gone += 1
        for folder in (*root.glob("date=*/hour=*"), *root.glob("date=*")):
            if not any(folder.iterdir()):
                folder.rmdir()
        return gone

    def faults(self, kind: str) -> list[str]:
        """What is wrong with a table, one line each: a log that cannot be read, files it names that are not there."""
        try:
            listed = self.files(kind)
        except MachineError as error:
            return [str(error)]
        return [
            f"{self.directory / path}: is missing (hour {label(hour)} of {kind})"
            for hour, paths in listed.items()
            for path in paths
            if not (self.directory / path).exists()
        ]

    def _path(self, kind: str) -> Path:
        return self.directory / kind

    def _table(self, kind: str) -> Any:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        path = self._path(kind)
        if not (path / "_delta_log").exists():
            return None
        try:
            return DeltaTable(str(path.resolve()))
        except (DeltaError, OSError) as error:
            raise MachineError(
                f"{path}: the log of the cold table cannot be read: {str(error).splitlines()[0]}"
            ) from error

    def _make_durable(self, kind: str, hour: int) -> None:
        """The library leaves what it wrote in the page cache; rows are deleted elsewhere because they are here."""
        date, of_day = _partition(hour)
        folder = self._path(kind) / f"date={date}" / f"hour={of_day}"
        if folder.exists():
            for path in folder.iterdir():
                sync_path(path)
            sync_path(folder)
            sync_path(folder.parent)
        log = self._path(kind) / "_delta_log"
        for path in sorted(log.iterdir())[-3:]:
            sync_path(path)
        for directory in (log, self._path(kind), self.directory, self.directory.parent):
            sync_path(directory)


def _layout(schema: pa.Schema) -> Any:
    """How a file is laid out: for each name of a row a Bloom filter, which says of most files that a name is not in them."""
    from deltalake import BloomFilterProperties, ColumnProperties, WriterProperties

    sieve = BloomFilterProperties(True, fpp=_FALSE_HITS_RATIO, ndv=_ROW_GROUP)
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=_ROW_GROUP,
        data_page_row_count_limit=_PAGE,
        write_batch_size=_PAGE,
        column_properties={
            name: ColumnProperties(dictionary_enabled=False, bloom_filter_properties=sieve)
            for name in _NAMES
            if name in schema.names
        },
    )


def crc32c_of(path: Path) -> int:
    """CRC32C of a file."""
    check = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            check = google_crc32c.extend(check, chunk)
    return int(check)


def label(hour: int) -> str:
    """An hour as people write it: 2026-11-29T14Z."""
    return f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%dT%HZ}"


def _configuration(column: str) -> dict[str, str]:
    """Statistics of one column only: the log must not keep the text of rows that are purged from the files."""
    return {"delta.dataSkippingStatsColumns": column, "delta.logRetentionDuration": "interval 1 days"}


def _application(hour: int) -> str:
    return f"phasewise/hour/{hour}"


def _partition(hour: int) -> tuple[str, str]:
    moment = datetime.fromtimestamp(hour * 3600, UTC)
    return f"{moment:%Y-%m-%d}", f"{moment:%H}"


def _hour(date: str, of_day: str) -> int:
    return int(datetime.fromisoformat(f"{date}T{of_day}:00:00+00:00").timestamp()) // 3600


def _with_partition(batch: pa.RecordBatch, schema: pa.Schema, date: str, of_day: str) -> pa.RecordBatch:
    columns = [*batch.columns, pa.array([date] * len(batch), pa.string()), pa.array([of_day] * len(batch), pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
