"""What a purge takes out of files: raw spans, journal entries, copies of the store. Each may be done again."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phasewise.collector.archive import check_path, put_file
from phasewise.collector.durable import put_in_place
from phasewise.collector.journal_writer import appending_stopped, serialized
from phasewise.collector.segment import KINDS as ENTRY_KINDS
from phasewise.collector.segment import Frame, frames, reframed, segment_numbers, segment_path

_ROW_GROUP = 4096
Going = Callable[[pa.Array], pa.Array]  # of some trace ids those to be deleted


def purge_spans(data: Path, going: Going, before_unix_ns: int | None) -> int:
    """Take spans of these traces, and those that ended before a time, out of the span files; how many."""
    for stray in (data / "spans").glob("date=*/hour=*/.*.purged"):
        stray.unlink()
    return sum(
        _purge_file(path, going, before_unix_ns) for path in sorted((data / "spans").glob("date=*/hour=*/*.parquet"))
    )


def purge_journal(directory: Path, going: Going, before_unix_ns: int | None) -> int:
    """The same of the journal, and points of before that time; how many rows."""
    for stray in directory.glob("*.purged"):
        stray.unlink()
    gone = 0
    numbers = segment_numbers(directory)
    for number in numbers:
        with contextlib.suppress(FileNotFoundError):  # the writer lets go of what is stored
            gone += _purge_segment(segment_path(directory, number), going, before_unix_ns, number == numbers[-1])
    return gone


def purge_copies(data: Path) -> list[str]:
    """Remove folders of files that were moved aside; their names."""
    found = [folder for folder in (data / "quarantine", data / "temporary") if folder.exists()]
    for folder in found:
        shutil.rmtree(folder)
    return [folder.name for folder in found]


def _left(rows: pa.Table, going: Going, before_unix_ns: int | None) -> pa.Table:
    """Rows of spans that stay."""
    gone = pc.is_in(rows["trace_id"], going(pc.unique(rows["trace_id"]).drop_null()))
    if before_unix_ns is not None:
        gone = pc.or_(gone, pc.less(rows["end_unix_ns"], before_unix_ns))
    return rows.filter(pc.invert(gone))


def _purge_file(path: Path, going: Going, before_unix_ns: int | None) -> int:
    rows = pq.read_table(path, partitioning=None)
    left = _left(rows, going, before_unix_ns)
    if left.num_rows == rows.num_rows:
        return 0
    if left.num_rows:
        temporary = path.with_name(f".{path.name}.purged")
        pq.write_table(left, temporary, compression="zstd", row_group_size=_ROW_GROUP)
        put_file(temporary, path)
    else:
        path.unlink()
        check_path(path).unlink(missing_ok=True)
    return int(rows.num_rows - left.num_rows)


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What stands in the place of an entry, and how many of its rows are gone."""

    start: int
    entry: bytes
    rows: int


def _purge_segment(path: Path, going: Going, before_unix_ns: int | None, is_last: bool) -> int:
    """In a copy that takes the segment's place, whole: its neighbours are never half written.

    To the last one entries may be appended: not while it is copied; and whoever did sees that it was replaced, and begins another.
    """
    found, end = _replaced(path, 0, going, before_unix_ns)
    if not found and not is_last:
        return 0
    with appending_stopped(path.parent) if is_last else contextlib.nullcontext():
        more, _ = _replaced(path, end, going, before_unix_ns)  # what came since
        if not (found or more):
            return 0
        place = path.with_suffix(".purged")
        shutil.copyfile(path, place)
        place.chmod(0o600)
        _write(place, [*found, *more])
        put_in_place(place, path)
    return sum(one.rows for one in [*found, *more])


def _replaced(path: Path, start: int, going: Going, before_unix_ns: int | None) -> tuple[list[_Replaced], int]:
    """Entries from byte `start` on that have rows to be deleted, and where the last whole entry ends."""
    found = []
    end = start
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for piece in frames(descriptor, start):
            if not isinstance(piece, Frame):
                continue
            end = piece.end
            rows = pa.ipc.open_stream(piece.payload).read_all()
            if ENTRY_KINDS.get(piece.kind) == "spans":
                left = _left(rows, going, before_unix_ns)
            elif before_unix_ns is not None:
                left = rows.filter(pc.greater_equal(rows["unix_ns"], before_unix_ns))
            else:
                continue
            if left.num_rows == rows.num_rows:
                continue
            payload = serialized(left).to_pybytes()
            if len(payload) > len(piece.payload):  # compression fell worse by the loss of rows: then all of it goes
                payload = serialized(left.slice(0, 0)).to_pybytes()
            # Entries keep their places, so that positions hold: what is left of one stands in its place, the rest is zeros.
            entry = reframed(piece, left.num_rows, payload)
            found.append(_Replaced(piece.start, entry, rows.num_rows - left.num_rows))
    finally:
        os.close(descriptor)
    return found, end


def _write(copy: Path, entries: list[_Replaced]) -> None:
    with copy.open("r+b") as file:
        for one in entries:
            file.seek(one.start)
            file.write(one.entry)
