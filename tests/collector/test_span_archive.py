"""Raw spans in Parquet and journal: every span once, whatever was written twice."""

from __future__ import annotations

from pathlib import Path

from span_tables import span_table
from writing import engine_span

from phasewise.collector.archive import SpanArchive
from phasewise.collector.journal import JournalWriter, Position
from phasewise.collector.records import SPAN_SCHEMA

HOUR = 3600 * 10**9
T = "0af7651916cd43dd8448eb211c80319c"


def three(received: int = HOUR) -> list[dict[str, object]]:
    return [engine_span(start_s=float(i), trace=T if i < 2 else "f" * 32, span_id=f"{i:016x}") for i in range(3)]


def test_a_trace_comes_from_parquet_and_journal_together(tmp_path: Path) -> None:
    rows = span_table(three(), received_unix_ns=HOUR)
    with JournalWriter(tmp_path / "journal", segment_bytes=1) as journal:
        first = journal.append("spans", rows.slice(0, 1))
        journal.append("spans", rows.slice(1))
        journal.sync()
        archive = SpanArchive(tmp_path)
        assert archive.trace(T).num_rows == 2
        assert archive.cut(Position(first.segment + 1, 0)) == 1
        assert archive.archived_segment() == first.segment
        found = archive.trace(T)
        assert found.schema == SPAN_SCHEMA
        assert found["span_id"].to_pylist() == ["0" * 16, "0" * 15 + "1"]
        assert archive.trace("f" * 32).num_rows == 1
        assert archive.trace("e" * 32).num_rows == 0


def test_cutting_twice_gives_the_same_files(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal", segment_bytes=1) as journal:
        journal.append("spans", span_table(three(), received_unix_ns=HOUR))
        last = journal.append("spans", span_table(three(), received_unix_ns=HOUR))
        journal.sync()
    archive = SpanArchive(tmp_path)
    archive.cut(last)
    files = {path: path.read_bytes() for path in archive.directory.rglob("*.parquet")}
    (archive.directory / "archived.json").unlink()
    archive.cut(last)
    assert {path: path.read_bytes() for path in archive.directory.rglob("*.parquet")} == files
    assert archive.traces([T, "f" * 32]).num_rows == 3


def test_files_lie_by_the_hour_of_receipt(tmp_path: Path) -> None:
    archive = SpanArchive(tmp_path)
    rows = span_table(three(), received_unix_ns=HOUR)
    later = span_table([engine_span(trace=T, span_id="a" * 16)], received_unix_ns=25 * HOUR)
    archive.write(rows, "one")
    archive.write(later, "two")
    names = sorted(str(p.relative_to(archive.directory)) for p in archive.directory.rglob("*.parquet"))
    assert names == ["date=1970-01-01/hour=01/one.parquet", "date=1970-01-02/hour=01/two.parquet"]
    assert archive.traces([T]).num_rows == 3
    assert archive.traces([T], received_after_unix_ns=24 * HOUR).num_rows == 1


def test_the_first_copy_of_a_span_wins(tmp_path: Path) -> None:
    archive = SpanArchive(tmp_path)
    archive.write(span_table([engine_span(span_id="a" * 16, trace=T, end_s=9.0)], received_unix_ns=2 * HOUR), "later")
    archive.write(span_table([engine_span(span_id="a" * 16, trace=T, end_s=2.0)], received_unix_ns=HOUR), "first")
    found = archive.trace(T)
    assert found["received_unix_ns"].to_pylist() == [HOUR]
