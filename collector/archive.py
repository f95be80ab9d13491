"""Raw spans for good: zstd Parquet by the hour of receipt, cut from journal segments that are closed and committed.

``DIR/spans/date=YYYY-MM-DD/hour=HH/*.parquet``. A segment is cut in pieces, since all of it at once is much memory; the rows of a
piece are sorted by trace, so that one trace touches few row groups. Writing a segment twice gives the same files, so a crash
between files and note costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from phasewise.collector.durable import put_in_place, sync_path
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.lake import crc32c_of
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.segment import segment_numbers

HOUR_NS = 3600 * 10**9
_ROW_GROUP = 4096  # small: a look-up of one trace reads one or two of a piece
_PIECE_BYTES = 32 << 20  # of rows in memory
_REPEATED = ["name", "scope_name", "scope_version", "resource"]  # a dictionary pays only where few texts fill many rows
_NOTE = "archived.json"
CHECK = ".crc32c"  # after the name of a span file


@dataclass(frozen=True, slots=True)
class _Note:
    """How far the journal is archived, and the hours that each archived segment has to do with."""

    segment: int
    hours: dict[int, list[int]]


class SpanArchive:
    """The raw spans below a data folder: Parquet of the archived segments and the tail of the journal."""

    def __init__(self, data_dir: Path) -> None:
        self.directory = data_dir / "spans"
        self._journal = data_dir / "journal"

    def trace(self, trace_id: str) -> pa.Table:
        """All spans of a trace (SPAN_SCHEMA), each once, by start."""
        return self.traces([trace_id]).sort_by("start_unix_ns")

    def traces(self, trace_ids: Collection[str], received_after_unix_ns: int = 0) -> pa.Table:
        """Spans of some traces, each once (the copy received first), optionally only those received lately."""
        wanted = pa.array(sorted(set(trace_ids)), pa.string())
        found = [self._from_files(wanted, received_after_unix_ns), *self._from_journal(wanted)]
        return first_copies(pa.concat_tables(found))

    def write(self, rows: pa.Table, name: str) -> int:
        """Store rows under `name`, one file an hour of receipt; returns the number of rows. Same name and rows: same files."""
        return sum(self._write_pieces([rows], name))

    def cut(self, committed: Position) -> Iterator[bool]:
        """Archives closed segments that lie wholly before `committed`, the oldest first, in steps of some hundredths of a second: whether
        a segment was done with each. One that is left before it was done is begun anew by the next."""
        note = self._read_note()
        for number in range(note.segment + 1, committed.segment):
            hours: set[int] = set()
            for _ in self._write_pieces(self._pieces(number, hours), f"segment-{number:08d}"):
                yield False
            note = _Note(number, {**note.hours, number: sorted(hours)})
            self._write_note(note)
            yield True

    def archived_segment(self) -> int:
        """Number of the last archived segment; 0 when none is."""
        return self._read_note().segment

    def segment_hours(self) -> dict[int, frozenset[int]]:
        """Of archived segments that are still there: the hours since 1970 that their spans ended in and their points are of."""
        present = set(segment_numbers(self._journal))
        return {number: frozenset(hours) for number, hours in self._read_note().hours.items() if number in present}

    def _pieces(self, number: int, hours: set[int]) -> Iterator[pa.Table | None]:
        """The spans of a segment, a piece at a time, None while one is read; `hours` gets those that spans ended in and points are of."""
        tables: list[pa.Table] = []
        held_bytes = 0
        for entry in JournalReader(self._journal).segment(number):
            column = "end_unix_ns" if entry.kind == "spans" else "unix_ns"
            hours |= set(pc.unique(pc.divide(entry.rows[column], HOUR_NS)).to_pylist())
            if entry.kind != "spans":
                continue
            tables.append(entry.rows)
            held_bytes += entry.rows.nbytes
            if held_bytes >= _PIECE_BYTES:
                whole = [pa.concat_tables(tables)]
                tables, held_bytes = [], 0
                yield whole.pop()  # who writes it, which takes many passes, holds it alone
            else:
                yield None
        if tables:
            yield pa.concat_tables(tables)

    def _read_note(self) -> _Note:
        try:
            told = json.loads((self.directory / _NOTE).read_text())
            return _Note(int(told["segment"]), {int(n): hours for n, hours in told.get("hours", {}).items()})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return _Note(0, {})

    def _write_note(self, note: _Note) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = set(segment_numbers(self._journal))
        kept = {str(number): hours for number, hours in note.hours.items() if number in present}
        temporary = self.directory / f"{_NOTE}.{os.getpid()}"
        temporary.write_text(json.dumps({"segment": note.segment, "hours": kept}))
        put_in_place(temporary, self.directory / _NOTE)

    def _write_pieces(self, pieces: Iterable[pa.Table | None], name: str) -> Iterator[int]:
        """Each piece sorted in itself and behind the one before, in small steps: how many rows each wrote."""
        writers: dict[int, pq.ParquetWriter] = {}
        with contextlib.ExitStack() as opened:
            for piece in pieces:
                if piece is None:
                    yield 0
                    continue
                # Of many chunks, every gathering of a row group would copy all of them first.
                rows = piece.combine_chunks()
                del piece
                for (hour,), own in _places(rows).group_by("hour", maintain_order=True):
                    if hour not in writers:
                        writers[int(hour)] = opened.enter_context(self._begun(int(hour), name))
                    for group in own["place"].to_frame().iter_slices(_ROW_GROUP):
                        gathered = rows.take(group["place"].to_arrow())
                        writers[int(hour)].write_table(gathered, row_group_size=_ROW_GROUP)
                        yield group.height
                del rows  # before the next piece is gathered
        for hour in writers:
            put_file(self._temporary(hour, name), self._folder(hour) / f"{name}.parquet")

    def _begun(self, hour: int, name: str) -> pq.ParquetWriter:
        folder = self._folder(hour)
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for above in (folder.parent, self.directory, self.directory.parent):
                sync_path(above)
        path = self._temporary(hour, name)
        return pq.ParquetWriter(path, SPAN_SCHEMA, compression="zstd", use_dictionary=_REPEATED)

    def _folder(self, hour: int) -> Path:
        moment = datetime.fromtimestamp(hour * 3600, UTC)
        return self.directory / f"date={moment:%Y-%m-%d}" / f"hour={moment:%H}"

    def _temporary(self, hour: int, name: str) -> Path:
        return self._folder(hour) / f".{name}.{os.getpid()}.tmp"

    def _from_files(self, wanted: pa.Array, received_after_unix_ns: int) -> pa.Table:
        files = [str(path) for path in self.directory.glob("date=*/hour=*/*.parquet")]
        if received_after_unix_ns:
            earliest = datetime.fromtimestamp(received_after_unix_ns // HOUR_NS * 3600, UTC)
            mark = f"date={earliest:%Y-%m-%d}/hour={earliest:%H}"
            files = [path for path in files if "/".join(path.split("/")[-3:-1]) >= mark]
        if not files:
            return SPAN_SCHEMA.empty_table()
        chosen = pc.field("trace_id").isin(wanted)
        found = []
        for fragment in ds.dataset(files, schema=SPAN_SCHEMA, format="parquet").get_fragments():
            if groups := _holding(fragment.subset(filter=chosen, schema=SPAN_SCHEMA), wanted):
                own = fragment.subset(row_group_ids=groups)
                found.append(own.to_table(schema=SPAN_SCHEMA, filter=chosen, use_threads=False))
        return pa.concat_tables([SPAN_SCHEMA.empty_table(), *found])

    def _from_journal(self, wanted: pa.Array) -> list[pa.Table]:
        reader = JournalReader(self._journal)
        position: Position | None = Position(self.archived_segment() + 1, 0)
        found = []
        while entries := reader.read(position):
            position = entries[-1].position
            for entry in entries:
                if entry.kind == "spans":
                    found.append(entry.rows.filter(pc.is_in(entry.rows["trace_id"], wanted)))
        return found


def check_path(path: Path) -> Path:
    """Where the CRC32C of a span file stands, in hex."""
    return path.with_name(path.name + CHECK)


def put_file(temporary: Path, path: Path) -> None:
    """Move a written span file to its place, with its checksum; one without was ended in between, and is whole."""
    check_path(path).unlink(missing_ok=True)
    check = f"{crc32c_of(temporary):08x}\n"
    put_in_place(temporary, path)
    check_path(path).write_text(check, encoding="ascii")


def _holding(fragment: ds.ParquetFileFragment, wanted: pa.Array) -> list[int]:
    """Row groups of a file with a span of these traces. Many may have one, going by their first and last trace, and few do: all
    other columns of those few alone are read."""
    with pq.ParquetFile(fragment.path, metadata=fragment.metadata) as file:
        traces = {g.id: file.read_row_group(g.id, columns=["trace_id"])["trace_id"] for g in fragment.row_groups}
    return [group for group, ids in traces.items() if pc.any(pc.is_in(ids, wanted)).as_py()]


def _places(rows: pa.Table) -> pl.DataFrame:
    """Where each span stands that is the first received of its copies, and the hour of its receipt; sorted by trace and start."""
    keys = pl.from_arrow(rows.select(["trace_id", "span_id", "start_unix_ns", "received_unix_ns"]))
    assert isinstance(keys, pl.DataFrame)
    keys = keys.with_row_index("place")
    identity = pl.struct("trace_id", "span_id")
    if keys.select(identity.hash().n_unique()).item() < keys.height:  # seldom: resends
        keys = keys.sort("received_unix_ns", maintain_order=True).unique(
            subset=["trace_id", "span_id"], keep="first", maintain_order=True
        )
    # Ids are hex: their first digits as a number say the order, and numbers sort in a third of the time of texts.
    trace = pl.col("trace_id").str.slice(0, 15).str.to_integer(base=16, dtype=pl.Int64, strict=False)
    numbered = keys.select(trace, "start_unix_ns", "place", (pl.col("received_unix_ns") // HOUR_NS).alias("hour"))
    return numbered.sort("trace_id", "start_unix_ns", "place").select("place", "hour")


def first_copies(rows: pa.Table) -> pa.Table:
    """Each (trace_id, span_id) once, the copy received first."""
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    kept = frame.sort("received_unix_ns", maintain_order=True).unique(
        subset=["trace_id", "span_id"], keep="first", maintain_order=True
    )
    return kept.to_arrow().cast(SPAN_SCHEMA)
