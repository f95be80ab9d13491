"""Raw spans in Parquet and journal: every span once, whatever was written twice."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from span_tables import span_table
from writing import engine_span

from phasewise.collector import archive as archive_module
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
        assert sum(archive.cut(Position(first.segment + 1, 0))) == 1
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
    assert sum(archive.cut(last)) == 1
    files = {path: path.read_bytes() for path in archive.directory.rglob("*.parquet")}
    (archive.directory / "archived.json").unlink()
    assert sum(archive.cut(last)) == 1
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


def test_a_segment_is_cut_in_pieces_and_the_next_one_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_PIECE_BYTES", 1)  # every entry is a piece
    traces = [f"{n:032x}" for n in (3, 1, 2)]
    with JournalWriter(tmp_path / "journal") as journal:
        for received, trace in enumerate(traces, start=1):
            spans = [engine_span(trace=trace, span_id=f"{n:016x}", start_s=float(n)) for n in (2, 1)]
            journal.append("spans", span_table([*spans, spans[0]], received_unix_ns=HOUR + received))
        journal.append(
            "spans", span_table([engine_span(trace=traces[0], span_id=f"{1:016x}")], received_unix_ns=2 * HOUR)
        )
        journal.sync()
    with JournalWriter(tmp_path / "journal") as journal:
        second = journal.append("spans", span_table([engine_span(trace=T)], received_unix_ns=HOUR))
        journal.sync()
    archive = SpanArchive(tmp_path)
    for is_done in archive.cut(Position(second.segment + 1, 0)):
        if is_done:
            break
    assert archive.archived_segment() == second.segment - 1
    (file,) = archive.directory.glob("date=*/hour=01/*.parquet")
    stored = pq.read_table(file)
    assert stored["trace_id"].to_pylist() == [trace for trace in traces for _ in range(2)]
    assert stored["span_id"].to_pylist() == [f"{n:016x}" for n in (1, 2)] * 3
    found = archive.trace(traces[0])  # a copy that came an hour later is in a file of its own
    assert found["span_id"].to_pylist() == [f"{n:016x}" for n in (1, 2)]
    assert found["received_unix_ns"].to_pylist() == [HOUR + 1] * 2
    assert archive.traces([*traces, "e" * 32]).num_rows == 6
    assert archive.trace(T).num_rows == 1  # still in the journal
    assert [sum(archive.cut(Position(second.segment + 1, 0))) for _ in range(2)] == [1, 0]
    assert archive.trace(T).num_rows == 1


@pytest.mark.parametrize("steps", range(5))
def test_a_cut_that_is_left_halfway_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """And nothing of it is seen before it is done."""
    monkeypatch.setattr(archive_module, "_PIECE_BYTES", 1)
    with JournalWriter(tmp_path / "journal") as journal:
        for received in (1, 2, 3):
            spans = [engine_span(trace=T, span_id=f"{received * 16 + n:016x}") for n in (1, 2)]
            last = journal.append("spans", span_table(spans, received_unix_ns=HOUR + received))
        journal.sync()
    archive = SpanArchive(tmp_path)
    until = Position(last.segment + 1, 0)
    cutting = archive.cut(until)
    done = [next(cutting) for _ in range(steps)]
    del cutting
    assert (archive.archived_segment() == last.segment) == any(done)
    assert archive.trace(T).num_rows == 6
    assert sum(archive.cut(until)) == (0 if any(done) else 1)
    assert list(archive.directory.rglob("*.tmp")) == []
    (file,) = archive.directory.rglob("*.parquet")
    assert pq.read_table(file).num_rows == 6
    assert archive.trace(T).num_rows == 6
