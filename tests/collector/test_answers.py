"""Many instances are asked about at once; a fault of one is none of the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from span_tables import at
from writing import Bench, Instant, bench, each, engine_span, give_time, plain_attribute

from phasewise.collector import finisher, first_answers, refresher
from phasewise.collector.context import Context

NAMES = [f"i-{n}" for n in range(5)]


def sent(b: Bench, number: int, start_s: float) -> None:
    """One request of every instance."""
    spans = [
        engine_span(
            start_s=start_s,
            trace=f"{number * 100 + k + 1:032x}",
            span_id=f"{k + 1:016x}",
            resource={"service.instance.id": name},
        )
        for k, name in enumerate(NAMES)
    ]
    b.receive(spans)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Instant())


def fails_for(bad: set[str], asked: list[list[str]]) -> Any:
    def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
        asked.append([context.instance for context in contexts])
        if bad.intersection(context.instance for context in contexts):
            raise ValueError("no such luck")
        return each(plain_attribute)(contexts)

    return attribute


def test_instances_are_asked_about_together(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    with bench(tmp_path, attribute=fails_for(set(), asked)) as b:
        sent(b, 0, 0.0)
        b.run()
        sent(b, 1, 1.0)
        b.run()
        assert asked == [NAMES, NAMES]
        rows = b.rows()
        assert [row["primary_class"] for row in rows] == ["queueing"] * 10
        assert [row["concurrency_at_arrival"] for row in rows[5:]] == [2] * 5  # each with its own neighbour alone
        b.run(400)
        assert [row["final"] for row in b.rows()] == [True] * 10
        assert asked[2:] == [NAMES] * len(asked[2:])


def test_no_more_rows_are_asked_about_at_once_than_memory_should_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first pass after a start, which were stored before their attribution, and those that become final."""
    for module in (refresher, finisher, first_answers):
        monkeypatch.setattr(module, "PORTION_ROWS", 2)
    asked: list[list[str]] = []
    with bench(tmp_path, attribute=fails_for(set(), asked)) as b:
        sent(b, 0, 0.0)
        b.run()
        assert asked == [["i-0", "i-1"], ["i-2", "i-3"], ["i-4"]]
        sent(b, 1, 1.0)
        b.writer.step()
        assert asked[3:] == [["i-0", "i-1"], ["i-2", "i-3"], ["i-4"]]
        b.run(400)
        assert [row["final"] for row in b.rows()] == [True] * 10
        assert max(len(names) for names in asked) == 2


def test_rows_that_a_pass_has_no_time_for_are_attributed_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresher, "PORTION_ROWS", 2)
    monkeypatch.setattr(refresher, "TURN_S", -1.0)
    asked: list[list[str]] = []
    with bench(tmp_path, attribute=fails_for(set(), asked)) as b:
        sent(b, 0, 0.0)
        for done in (2, 4, 5, 5):
            b.writer.step()
            assert sum(row["primary_class"] is not None for row in b.rows()) == done
        assert asked[:3] == [["i-0", "i-1"], ["i-2", "i-3"], ["i-4"]]


def test_a_fault_of_one_instance_is_none_of_the_others(tmp_path: Path) -> None:
    bad: set[str] = set()
    asked: list[list[str]] = []
    with bench(tmp_path, attribute=fails_for(bad, asked)) as b:
        sent(b, 0, 0.0)
        b.run()
        bad.add("i-3")
        sent(b, 1, 1.0)
        b.writer.step()
        told = {(row["instance"], row["arrival_unix_ns"]): row["primary_class"] for row in b.rows()}
        assert {name for name in NAMES if told[name, at(1.0)] is None} == bad
        assert b.counter("attribution_failed")
        b.run(400)
        assert {row["instance"] for row in b.rows() if not row["final"]} == bad
        bad.clear()
        for _ in range(4):
            b.run(100)
        rows = b.rows()
        assert [row["final"] for row in rows] == [True] * 10
        assert [row["primary_class"] for row in rows] == ["queueing"] * 10


def test_a_row_that_is_left_out_of_the_answer_becomes_final_without_causes(tmp_path: Path) -> None:
    """And those beside it with theirs."""

    def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
        answer = each(plain_attribute)(contexts)
        lost = pl.concat([context.requests for context in contexts]).filter(pl.col("instance") == "i-1")
        return answer.join(lost, on="request_key", how="anti")

    with bench(tmp_path, attribute=attribute) as b:
        sent(b, 0, 0.0)
        b.run()
        b.run(400)
        rows = {row["instance"]: row for row in b.rows()}
        assert all(row["final"] for row in rows.values())
        assert {name for name, row in rows.items() if row["primary_class"] is None} == {"i-1"}
        assert b.counter("attribution_left_out") == 1
