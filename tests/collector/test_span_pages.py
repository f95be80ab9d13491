"""Every stored span on exactly one page, wherever it lies and wherever it moves meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from writing import Bench, bench, engine_span

from phasewise.collector import span_pages
from phasewise.collector.exchange import Selection
from phasewise.collector.exchange_folder import Traces
from phasewise.collector.journal import JournalWriter
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.span_pages import SpanPages
from phasewise.rules.errors import InputError

HOUR_S = 3600


def receive(b: Bench, first: int, count: int) -> None:
    for n in range(first, first + count):
        b.receive([engine_span(start_s=float(n))], trace_id=f"{n * 0x1234567 % 16**6:06x}{n:026x}")


def archived(b: Bench) -> None:
    """What the journal holds goes into the archive: the segment is closed, and the writer past it."""
    b.journal.close()
    b.journal = JournalWriter(b.folder / "journal", segment_age_s=1e9)
    b.receive([engine_span(start_s=5000.0)], trace_id="f" * 32)
    b.run(10)


def collected(folder: Path, between: Callable[[], None] = lambda: None) -> tuple[list[str], int]:
    """Trace ids of all pages, and how many pages there were; `between` runs once, after the first."""
    traces, found, cursor, count = Traces(Selection()), [], "", 0
    while True:
        rows, cursor = SpanPages(folder).page(cursor)
        found.append(traces.selected("spans", rows))
        count += 1
        if count == 1:
            between()
        if not cursor:
            table = pa.concat_tables(found)
            assert table.schema == SPAN_SCHEMA
            return table["trace_id"].to_pylist(), count


def test_archive_and_journal_are_read_once_in_small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_pages, "_ROWS", 3)
    monkeypatch.setattr(span_pages, "_ENTRIES", 4)
    with bench(tmp_path) as b:
        receive(b, 0, 20)
        archived(b)
        b.clock.forward(2 * HOUR_S)
        receive(b, 20, 10)
        archived(b)
        receive(b, 30, 9)
        receive(b, 0, 5)  # a resend, which the journal and the archive hold a second time
        b.run()
        found, count = collected(tmp_path)
    assert len(found) == len(set(found)) == 39 + 1
    assert count > 10


def test_a_segment_that_is_archived_meanwhile_is_neither_lost_nor_doubled(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        receive(b, 0, 5)
        archived(b)
        b.clock.forward(2 * HOUR_S)
        receive(b, 5, 5)
        b.run()

        def moves() -> None:
            archived(b)
            b.run(20)

        found, _ = collected(tmp_path, moves)
    assert len(found) == len(set(found)) == 11


def test_an_empty_store_has_no_spans(tmp_path: Path) -> None:
    assert collected(tmp_path) == ([], 1)


@pytest.mark.parametrize(
    "cursor", ["x", "1|../../etc|0|0", "1|journal|a|0", "1|late|x|0", "1|date=2026-01-01/hour=00|x|0"]
)
def test_a_strange_cursor_is_refused(tmp_path: Path, cursor: str) -> None:
    with pytest.raises((InputError, ValueError)) as raised:
        SpanPages(tmp_path).page(cursor)
    assert isinstance(raised.value, InputError)


def test_hours_before_a_window_are_left_out(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        receive(b, 0, 5)
        archived(b)
        later = b.clock.now + 30 * HOUR_S * 10**9
        first, _ = SpanPages(tmp_path).page("", later)
        whole, _ = SpanPages(tmp_path).page("")
    assert first["trace_id"].to_pylist() == ["f" * 32]  # of the journal, which no hour is known of
    assert whole.num_rows == 5
