"""All raw spans, a page at a time: the archive hour by hour, then what is still in the journal only.

While pages are read, segments move from the journal into the archive; the cursor remembers the first that was in the journal at
the beginning, and those are read from wherever they are at the end. A span may come twice: whoever collects pages drops the
second copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from phasewise.collector.archive import SpanArchive, first_copies
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.rules.errors import InputError

_ROWS = 50_000  # of an hour in one page, about
_MOST_DIGITS = 4
_ENTRIES = 64
_SEGMENT = re.compile(r"segment-(\d+)\.parquet$")
_JOURNAL, _LATE = "journal", "late"
_HOUR = re.compile(r"date=\d{4}-\d\d-\d\d/hour=\d\d$")


@dataclass(frozen=True, slots=True)
class _Cursor:
    """first: the first segment that was no archive's at the beginning; stage: an hour, or one of the two behind them;
    at: slice of the hour, position in the journal, or the last segment read late; digits: of trace ids that tell slices apart."""

    first: int
    stage: str = ""
    at: str = "0"
    digits: int = 0

    def __str__(self) -> str:
        return f"{self.first}|{self.stage}|{self.at}|{self.digits}"

    @classmethod
    def parse(cls, text: str) -> _Cursor:
        parts = text.split("|")
        known = len(parts) == 4 and parts[0].isdecimal() and parts[3] in ("0", "1", "2", "3", "4")
        places = {_JOURNAL: r"\d+:\d+", _LATE: r"\d+"}
        if known and parts[1] not in places:
            known = _HOUR.fullmatch(parts[1]) is not None
        if not known or not re.fullmatch(places.get(parts[1], r"\d+"), parts[2]):
            raise InputError("cursor", text[:40], "is no cursor", "take the one that the page before gave")
        return cls(int(parts[0]), parts[1], parts[2], int(parts[3]))


class SpanPages:
    """The spans below a data folder."""

    def __init__(self, data_dir: Path) -> None:
        self._archive = SpanArchive(data_dir)
        self._journal = JournalReader(data_dir / "journal")

    def page(self, cursor: str = "", received_from_unix_ns: int = 0) -> tuple[pa.Table, str]:
        """Rows of SPAN_SCHEMA and the cursor of the page behind it, "" behind the last. Hours of receipt before
        `received_from_unix_ns` are left out."""
        stand = (
            _Cursor.parse(cursor)
            if cursor
            else self._next_hour(_Cursor(self._archive.archived_segment() + 1), received_from_unix_ns)
        )
        if stand.stage == _LATE:
            return self._late(stand)
        if stand.stage == _JOURNAL:
            return self._from_journal(stand)
        rows, following = self._from_hour(stand)
        if following is None:
            following = self._next_hour(stand, received_from_unix_ns)
        return rows, str(following)

    def _next_hour(self, stand: _Cursor, received_from_unix_ns: int) -> _Cursor:
        from datetime import UTC, datetime

        earliest = datetime.fromtimestamp(received_from_unix_ns / 1e9, UTC)
        mark = f"date={earliest:%Y-%m-%d}/hour={earliest:%H}"
        for folder in sorted(self._archive.directory.glob("date=*/hour=*")):
            name = "/".join(folder.parts[-2:])
            if name > stand.stage and name >= mark and _HOUR.match(name):
                rows = sum(pq.read_metadata(path).num_rows for path in self._files(name, stand.first))
                digits = next((d for d in range(_MOST_DIGITS) if rows <= _ROWS * 16**d), _MOST_DIGITS)
                return replace(stand, stage=name, at="0", digits=digits)
        return replace(stand, stage=_JOURNAL, at=str(Position(stand.first, 0)), digits=0)

    def _files(self, hour: str, first: int) -> list[Path]:
        found = []
        for path in sorted((self._archive.directory / hour).glob("*.parquet")):
            segment = _SEGMENT.search(path.name)
            if segment is None or int(segment[1]) < first:
                found.append(path)
        return found

    def _from_hour(self, stand: _Cursor) -> tuple[pa.Table, _Cursor | None]:
        files = [str(path) for path in self._files(stand.stage, stand.first)]
        number, slices = int(stand.at), 16**stand.digits
        following = replace(stand, at=str(number + 1)) if number + 1 < slices else None
        if not files:
            return SPAN_SCHEMA.empty_table(), following
        chosen = None
        if stand.digits:
            chosen = pc.field("trace_id") >= f"{number:0{stand.digits}x}"
            if number + 1 < slices:
                chosen &= pc.field("trace_id") < f"{number + 1:0{stand.digits}x}"
        rows = ds.dataset(files, schema=SPAN_SCHEMA, format="parquet").to_table(filter=chosen, use_threads=False)
        return _ordered(rows), following

    def _from_journal(self, stand: _Cursor) -> tuple[pa.Table, str]:
        entries = self._journal.read(Position.parse(stand.at), _ENTRIES)
        if not entries:
            return self._late(replace(stand, stage=_LATE, at=str(stand.first - 1)))
        tables = [entry.rows for entry in entries if entry.kind == "spans"]
        rows = _ordered(pa.concat_tables(tables)) if tables else SPAN_SCHEMA.empty_table()
        return rows, str(replace(stand, at=str(entries[-1].position)))

    def _late(self, stand: _Cursor) -> tuple[pa.Table, str]:
        """The next segment that was cut while pages were read."""
        found: dict[int, list[str]] = {}
        for path in self._archive.directory.glob("date=*/hour=*/segment-*.parquet"):
            segment = _SEGMENT.search(path.name)
            if segment and int(segment[1]) > int(stand.at):
                found.setdefault(int(segment[1]), []).append(str(path))
        if not found:
            return SPAN_SCHEMA.empty_table(), ""
        number = min(found)
        rows = ds.dataset(found[number], schema=SPAN_SCHEMA, format="parquet").to_table(use_threads=False)
        return _ordered(rows), str(replace(stand, at=str(number)))


def _ordered(rows: pa.Table) -> pa.Table:
    return first_copies(rows).sort_by(
        [("trace_id", "ascending"), ("start_unix_ns", "ascending"), ("span_id", "ascending")]
    )
