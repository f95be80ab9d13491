"""What a purge takes out of files: raw spans, journal entries, copies of the store. Each may be done again.

What cannot be read may hold anything: it goes as a whole. So does what an ended process left half written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phasewise.collector.archive import CHECK, check_path, put_file
from phasewise.collector.durable import put_in_place
from phasewise.collector.journal_writer import appending_stopped, serialized
from phasewise.collector.segment import KINDS as ENTRY_KINDS
from phasewise.collector.segment import Gap, frames, reframed, segment_numbers, segment_path
from phasewise.rules.errors import MachineError

LOG = logging.getLogger(__name__)
_ROW_GROUP = 4096
_JUDGED = pa.schema(
    [("trace_id", pa.string()), ("end_unix_ns", pa.int64())]
)  # columns of a span that tell whether it goes
_CHUNK_BYTES = 1 << 20
Going = Callable[[pa.Array], pa.Array]  # of some trace ids those to be deleted


@dataclass(slots=True)
class PurgedSpans:
    """rows: how many spans went; files: paths of files that went whole because they could not be read."""

    rows: int = 0
    files: list[str] = field(default_factory=list)


def purge_spans(data: Path, going: Going, before_unix_ns: int | None) -> PurgedSpans:
    """Take spans of these traces, and those that ended before a time, out of the span files. Nobody may be writing any."""
    done = PurgedSpans()
    for path in sorted((data / "spans").glob("date=*/hour=*/*")):
        if not is_span_file(path):
            path.unlink()
    for path in sorted((data / "spans").glob("date=*/hour=*/*.parquet")):
        gone = _purge_file(path, going, before_unix_ns)
        if gone is None:
            done.files.append(str(path.relative_to(data)))
        else:
            done.rows += gone
    return done


def is_span_file(path: Path) -> bool:
    """Whether it is one of raw spans, or the checksum of one: all others were begun and never finished."""
    named = path.name.removesuffix(CHECK)
    whole = path.with_name(named)
    return named.endswith(".parquet") and not named.startswith(".") and whole.exists()


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


def _purge_file(path: Path, going: Going, before_unix_ns: int | None) -> int | None:
    """How many of its spans went; None where it could not be read, and is gone."""
    try:
        rows = pq.read_table(path, partitioning=None)
        rows.select(_JUDGED.names).cast(_JUDGED)  # a file whose footer is damaged may have lost these
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if getattr(error, "errno", None) is not None:  # the disk says so, not what is in the file
            raise MachineError(f"{path}: cannot be read: {error} (see the system's log)") from error
        LOG.error("%s: cannot be read: %s: it is removed, for nobody can tell whose spans are in it", path, error)
        path.unlink()
        check_path(path).unlink(missing_ok=True)
        return None
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
    found, end = _replaced(path, 0, going, before_unix_ns, is_closed=not is_last)
    if not found and not is_last:
        return 0
    with appending_stopped(path.parent) if is_last else contextlib.nullcontext():
        more, _ = _replaced(path, end, going, before_unix_ns, is_closed=True)  # what came since
        if not (found or more):
            return 0
        place = path.with_suffix(".purged")
        shutil.copyfile(path, place)
        place.chmod(0o600)
        _write(place, [*found, *more])
        put_in_place(place, path)
    return sum(one.rows for one in [*found, *more])


def _replaced(
    path: Path, start: int, going: Going, before_unix_ns: int | None, *, is_closed: bool
) -> tuple[list[_Replaced], int]:
    """Entries from byte `start` on that have rows to be deleted, and bytes that are no entry; where what was looked at ends. is_closed:
    nobody appends to it, so bytes at its end are no entry that is being written."""
    found = []
    end = start
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for piece in frames(descriptor, start):
            if isinstance(piece, Gap):
                if is_closed or not piece.open_ended:
                    end = piece.end
                    if _holds_something(descriptor, piece):
                        found.append(_Replaced(piece.start, bytes(piece.end - piece.start), 0))
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


def _holds_something(descriptor: int, gap: Gap) -> bool:
    for start in range(gap.start, gap.end, _CHUNK_BYTES):
        chunk = os.pread(descriptor, min(_CHUNK_BYTES, gap.end - start), start)
        if chunk.count(0) < len(chunk):
            return True
    return False


def _write(copy: Path, entries: list[_Replaced]) -> None:
    with copy.open("r+b") as file:
        for one in entries:
            file.seek(one.start)
            file.write(one.entry)
