"""Which times a statement reaches: only what is certain narrows it."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.questions import ask, overview_sql
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.reach import EVER, reach

NEVER_LOW, NEVER_HIGH = EVER


@pytest.mark.parametrize(
    ("sql", "parameters", "reached"),
    [
        ("SELECT 1", [], {}),
        ("SELECT * FROM instances", [], {}),
        ("SELECT * FROM requests", [], {"requests": EVER}),
        ('SELECT * FROM "requests" WHERE "finished_unix_ns" >= ? AND finished_unix_ns < ?', [5, 9], {"requests": (5, 9)}),
        ("SELECT * FROM whole.requests WHERE finished_unix_ns BETWEEN ? AND ?", [5, 9], {"requests": (5, 9)}),
        ("SELECT * FROM main.requests", [], {}),
        ("SELECT * FROM requests WHERE model = ? AND (finished_unix_ns > ?)", ["?", 7], {"requests": (7, NEVER_HIGH)}),
        ("SELECT '?' FROM requests WHERE finished_unix_ns > ? -- ?", [7], {"requests": (7, NEVER_HIGH)}),
        ("SELECT * FROM requests WHERE finished_unix_ns > 7", [], {"requests": (7, NEVER_HIGH)}),
        ("SELECT * FROM requests WHERE finished_unix_ns = ?", [7], {"requests": (7, 7)}),
        # not certain: everything
        ("SELECT * FROM requests WHERE finished_unix_ns > ? OR TRUE", [7], {"requests": EVER}),
        ("SELECT * FROM requests WHERE NOT (finished_unix_ns > ?)", [7], {"requests": EVER}),
        ("SELECT * FROM requests WHERE finished_unix_ns > ?", [None], {"requests": EVER}),
        ("SELECT * FROM requests WHERE finished_unix_ns + 1 > ?", [7], {"requests": EVER}),
        ("SELECT * FROM requests WHERE arrival_unix_ns > ?", [7], {"requests": EVER}),
        ("SELECT * FROM requests r JOIN turns t USING (trace_id) WHERE finished_unix_ns > ?", [7], {"requests": EVER, "turns": EVER}),
        ("SELECT * FROM requests WHERE finished_unix_ns > (SELECT max(finished_unix_ns) - ? FROM requests)", [7], {"requests": EVER}),
        ("this is no SQL about requests", [], {"requests": EVER}),
        # several places: all of them together
        (
            "SELECT * FROM requests WHERE finished_unix_ns BETWEEN ? AND ? UNION ALL SELECT * FROM requests WHERE finished_unix_ns < ? AND finished_unix_ns > 2",
            [5, 9, 4],
            {"requests": (2, 9)},
        ),
        (
            "SELECT * FROM requests r JOIN engine_samples s ON r.instance = s.instance WHERE r.finished_unix_ns > ? AND s.unix_ns < ?",
            [5, 9],
            {"requests": (5, NEVER_HIGH), "engine_samples": (NEVER_LOW, 9)},
        ),
    ],
)  # fmt: skip
def test_what_a_statement_reaches(sql: str, parameters: list[object], reached: dict[str, tuple[int, int]]) -> None:
    assert dict(reach(sql, parameters)) == reached


class Recorder:
    """Notes what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[object]]] = []

    def query(self, sql: str, parameters: Sequence[object] = (), *, order_by: Sequence[str] = ()) -> pl.DataFrame:
        self.asked.append((sql, parameters))
        return pl.DataFrame({"n": [0]})


def test_the_questions_of_the_pages_reach_their_window_only() -> None:
    store = Recorder()
    ask(store, overview_sql(), rows_in(Window(100, 200), (Filter("model", "eq", "a"),)))
    ((sql, parameters),) = store.asked
    assert dict(reach(sql, parameters)) == {"requests": (100, 200)}
