"""The journal: rows are on the disk here before a sender hears "stored", and the store reads them from here.

``DIR/journal/NNNNNNNN.seg`` are segments of entries (see ``segment``). One process writes, any other may read while it does.
A writer never continues an old segment: it starts a new one with a higher number. So a position that a reader has committed
always lies before everything written later, even if unsynced bytes behind it were lost with the machine's power.
Segments are removed by the reader's side, which alone knows what it has committed; the last one always stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from phasewise.collector.journal_writer import JournalFailed, JournalFull, JournalWriter
from phasewise.collector.segment import (
    KINDS,
    SCHEMAS,
    Frame,
    Gap,
    Kind,
    Position,
    frames,
    segment_numbers,
    segment_path,
)

# In the thread that reads: others would fill fresh memory of their own with what is unpacked, entry after entry.
_READ = pa.ipc.IpcReadOptions(use_threads=False)

__all__ = ["Entry", "JournalFailed", "JournalFull", "JournalReader", "JournalWriter", "Kind", "Position"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows of one entry; `position` is where reading goes on after it."""

    position: Position
    kind: Kind
    rows: pa.Table


class JournalReader:
    """Reads a journal, also while another process writes it. Not for several threads at once.

    counters: `corrupt_gaps`, `corrupt_bytes` (damaged in the middle, skipped), `torn_bytes` (unfinished at the end of a closed
    segment, never acknowledged), `unknown_entries` (of a newer release, skipped), `resets` (positions beyond the journal).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counted: set[tuple[int, int]] = set()  # gaps, so that reading twice counts once
        self._damage: list[str] = []  # of these, what nobody was told yet
        self.counters = dict.fromkeys(
            ("corrupt_gaps", "corrupt_bytes", "torn_bytes", "unknown_entries", "unreadable_entries", "resets"), 0
        )

    def read(self, after: Position | None, limit: int = 256, limit_rows: int = 65_536) -> list[Entry]:
        """The next entries behind `after` (None: from the beginning), oldest first; [] when there is nothing new.

        Stops at `limit` entries, or when they hold `limit_rows` rows or more.
        """
        found: list[Entry] = []
        rows = 0
        numbers = segment_numbers(self._directory)
        after = self._within(after or Position(0, 0), numbers)
        for number in numbers:
            if number < after.segment:
                continue
            start = after.offset if number == after.segment else 0
            for entry in self._entries(number, start, last=number == numbers[-1]):
                found.append(entry)
                rows += entry.rows.num_rows
                if len(found) >= limit or rows >= limit_rows:
                    return found
        return found

    def segment(self, number: int) -> Iterator[Entry]:
        """The entries of one closed segment, one by one; none where it is gone."""
        return self._entries(number, 0, last=False)

    def lag_bytes(self, after: Position | None) -> int:
        """Bytes behind `after` that have not been read."""
        after = after or Position(0, 0)
        total = 0
        for number in segment_numbers(self._directory):
            if number < after.segment:
                continue
            with contextlib.suppress(FileNotFoundError):
                size = segment_path(self._directory, number).stat().st_size
                total += max(0, size - after.offset) if number == after.segment else size
        return total

    def drop_before(self, position: Position) -> int:
        """Delete the segments that lie wholly before `position`; returns how many. Its own segment stays, and so does the
        last one: the next writer takes its number from it."""
        numbers = segment_numbers(self._directory)
        dropped = 0
        for number in numbers[:-1]:
            if number < position.segment:
                with contextlib.suppress(FileNotFoundError):
                    segment_path(self._directory, number).unlink()
                    dropped += 1
        return dropped

    def _within(self, after: Position, numbers: list[int]) -> Position:
        """A position in no segment that ever was (the directory was replaced) reads from the beginning: rows that come twice
        are the store's to recognise, rows that never come nobody can."""
        if numbers and after.segment > numbers[-1]:
            self.counters["resets"] += 1
            return Position(0, 0)
        return after

    def _entries(self, number: int, start: int, last: bool) -> Iterator[Entry]:
        try:
            descriptor = os.open(segment_path(self._directory, number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            for piece in frames(descriptor, start):
                if isinstance(piece, Gap):
                    if piece.open_ended and last:
                        break  # being written, or torn: the next segment will tell
                    self._count_gap(number, piece)
                    continue
                entry = self._decoded(number, piece)
                if entry is not None:
                    yield entry
        finally:
            os.close(descriptor)

    def _count_gap(self, number: int, gap: Gap) -> None:
        if (number, gap.start) in self._counted:
            return
        self._counted.add((number, gap.start))
        if gap.open_ended:
            self.counters["torn_bytes"] += gap.end - gap.start
        else:
            self.counters["corrupt_gaps"] += 1
            self.counters["corrupt_bytes"] += gap.end - gap.start
            self._damage.append(
                f"{segment_path(self._directory, number)}: bytes {gap.start:,} to {gap.end:,} are damaged: "
                "the entries in them are lost, those around them are stored"
            )

    def take_damage(self) -> list[str]:
        """What was found damaged since the last call, in words; each place once a reader."""
        found, self._damage = self._damage, []
        return found

    def _decoded(self, number: int, frame: Frame) -> Entry | None:
        kind = KINDS.get(frame.kind)
        if kind is None:
            self.counters["unknown_entries"] += 1
            return None
        try:
            rows = pa.ipc.open_stream(frame.payload, options=_READ).read_all()
        except (pa.ArrowInvalid, OSError):  # its checksum is right: written by something that is not this program
            self.counters["unreadable_entries"] += 1
            return None
        return Entry(Position(number, frame.end), kind, _aligned(rows, SCHEMAS[kind]))


def _aligned(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Columns as this release has them: a journal may have been written by another one. What it lacked is unknown."""
    if rows.schema.equals(schema):
        return rows
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
