"""A row that waits for its attribution has its time booked to nothing: it may not make a slow deployment look healthy."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from writing import NOW, bench, each, engine_span, rulebook

from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.context import Context

EVERYTHING = Window(0, 4_102_444_800 * 10**9)


def test_rows_without_attribution_decide_nothing_and_are_counted(tmp_path: Path) -> None:
    def fails(context: Context) -> pl.DataFrame:
        raise ValueError("not today")

    with bench(tmp_path, attribute=each(fails)) as b:
        b.receive([engine_span(start_s=float(i), trace=f"{i + 1:032x}", span_id=f"{i + 1:016x}") for i in range(20)])
        b.run()
        verdict = window_verdict(b.store, rulebook(), EVERYTHING, now_unix_ns=NOW)
    assert (verdict["requests"], verdict["unattributed"], verdict["status"]) == (20, 20, "unknown")
    notes = verdict["notes"]
    assert isinstance(notes, list)
    assert "20 requests are not attributed yet; the verdict rests on the others" in notes


def test_attributed_rows_are_not_counted(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        b.run()
        verdict = window_verdict(b.store, rulebook(), EVERYTHING, now_unix_ns=NOW)
    assert (verdict["requests"], verdict["unattributed"]) == (1, 0)
