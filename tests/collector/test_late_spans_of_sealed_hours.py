"""What comes for a sealed hour ends in the same rows, rollups and steps as if nothing had been sealed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from span_tables import at, span_table
from writing import Bench, Instant, bench, engine_span, give_time

from phasewise.collector.sealing import Sealer, due_hours

ROLLUPS = "SELECT * EXCLUDE (e2e_histogram, ttft_histogram, tpot_histogram, queue_histogram) FROM rollups ORDER BY ALL"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many blocks a pass makes final does not depend on the machine."""
    give_time(monkeypatch, Instant())


def spans(first: int, count: int) -> list[dict[str, Any]]:
    return [
        engine_span(start_s=i * 60.0, trace=f"{i + 1:032x}", span_id=f"{i + 1:016x}")
        for i in range(first, first + count)
    ]


def seal(b: Bench) -> int:
    return sum(Sealer(b.store, b.clock).seal(due) for due in due_hours(b.store, b.clock.now))


def story(folder: Path, *, sealing: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """An hour of requests, three hours of silence, then late ones in its midst, one of them a resend, one with a parent."""
    folder.mkdir()
    with bench(folder) as b:
        b.receive(spans(0, 20))
        b.run(1.5)
        b.clock.forward(3 * 3600)
        b.run()
        b.run(10)
        if sealing:
            assert seal(b) == 1
            assert b.rows("SELECT * FROM main.requests") == []
        b.receive([*spans(25, 3), *spans(4, 1)])
        b.run(1.5)
        b.writer.add_samples(b.store.query("SELECT * FROM engine_samples"))
        b.run(300)
        b.run(10)
        if sealing:
            assert seal(b) == 0  # the hour rests first
            b.clock.forward(2 * 3600)
            b.run()
            assert seal(b) == 1
            assert b.rows("SELECT count(*) AS n FROM main.requests") == [{"n": 0}]
        columns = "* EXCLUDE (received_unix_ns)"
        return (
            b.rows(f"SELECT {columns} FROM requests ORDER BY request_key"),
            b.rows(ROLLUPS),
            b.rows("SELECT * FROM counters WHERE name != 'attribution_failed' ORDER BY ALL"),
        )


def test_late_spans_end_in_the_same_rows(tmp_path: Path) -> None:
    never = story(tmp_path / "never", sealing=False)
    sealed = story(tmp_path / "sealed", sealing=True)
    assert len(sealed[0]) == 23
    assert sealed == never


@pytest.mark.slow
def test_a_span_that_lasted_for_ever_brings_back_a_few_hours_only(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([engine_span(start_s=-3600.0 * i, trace=f"{i + 1:032x}", span_id=f"{i + 1:016x}") for i in range(12)])
        b.run(1.5)
        b.run(200)
        b.clock.forward(4 * 3600)
        b.run()
        sealed = seal(b)
        assert sealed >= 12
        table = span_table(
            [engine_span(e2e_s=1e6, start_s=-1e6, trace="e" * 32, span_id="e" * 16)], received_unix_ns=b.clock.now
        )
        b.journal.append("spans", table)
        b.journal.sync()
        b.run(1.5)
        assert b.rows("SELECT count(*) AS n FROM sealed_hours WHERE state = 'thawed'")[0]["n"] <= 8
        assert len(b.rows()) == 13


@pytest.mark.parametrize("oddity", ["microseconds", "no end"])
def test_a_request_whose_span_has_odd_times_stands_there_once(tmp_path: Path, oddity: str) -> None:
    """The hour of its row is another than that of its span."""

    def odd(span: dict[str, Any]) -> dict[str, Any]:
        start, end = at(span["start_s"]), at(span["end_s"])
        if oddity == "no end":
            return span | {"end_unix_ns": 0}
        return span | {"start_unix_ns": start // 1000, "end_unix_ns": end // 1000}

    with bench(tmp_path) as b:
        made = [odd(one) for one in spans(0, 20)]
        b.receive(made)
        b.run(1.5)
        b.clock.forward(3 * 3600)
        b.run()
        b.run(10)
        assert seal(b) == 1
        b.receive([odd({**spans(3, 1)[0], "span_id": f"{900:016x}", "parent": f"{4:016x}", "name": "tool"})])
        b.run(1.5)
        assert b.rows("SELECT count(*) AS n, count(DISTINCT request_key) AS keys FROM requests") == [
            {"n": 20, "keys": 20}
        ]
