"""Rows that are stored before there was time to attribute them are attributed soon after, whatever happens between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from span_tables import at
from writing import Bench, bench, each, engine_span, give_time, plain_attribute

from phasewise.collector import first_answers, refresher
from phasewise.collector.context import Context


class Ticking:
    """A monotonic clock on which every attribution takes 50 ms, so that its instance rests for 150 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.05
        return self.now_s


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Ticking())


def unattributed(b: Bench) -> int:
    return sum(row["revision"] is None for row in b.rows())


def request(number: int) -> dict[str, object]:
    return engine_span(start_s=float(number), trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass has time for the attribution of rows that are not written yet."""
    monkeypatch.setattr(first_answers, "FIRST_S", -1.0)


def left_raw(b: Bench) -> None:
    """One row attributed, then one that comes while its instance rests."""
    b.receive([request(0)])
    b.run()
    b.receive([request(1)])
    b.run(0.1)
    assert unattributed(b) == 1


@pytest.mark.usefixtures("hurried")
def test_a_row_stored_raw_is_attributed_after_the_rest(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        left_raw(b)
        b.run(0.2)  # rested, but too soon for rows that are in the store already
        b.run(0.5)
        assert unattributed(b) == 0


@pytest.mark.usefixtures("hurried")
def test_a_row_stored_raw_is_attributed_after_a_crash(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        left_raw(b)
        b.reopen()
        b.run()
        assert unattributed(b) == 0


def seen_by(b: Bench, seen: list[tuple[int, int]]) -> None:
    """From the next start on `seen` says what a reader sees while attribution runs: rows, and rows without attribution."""
    ask = b.attribute

    def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
        sql = "SELECT count(*) AS n, count(*) FILTER (revision IS NULL) AS raw FROM requests"
        seen.append(b.store.query(sql).row(0))
        return ask(contexts)

    b.attribute = attribute
    b.reopen()


def test_the_first_rows_after_a_start_are_seen_before_their_attribution(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        seen: list[tuple[int, int]] = []
        seen_by(b, seen)
        b.receive([request(0), request(1)])
        b.run()
        assert seen == [(2, 2)]
        assert unattributed(b) == 0


def test_rows_are_written_once_with_their_attribution(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        seen: list[tuple[int, int]] = []
        seen_by(b, seen)
        b.receive([request(0)])
        b.run()
        b.receive([request(1), request(2)])
        assert b.writer.step() == 2
        assert seen == [(1, 1), (1, 0)]
        assert [(row["revision"], row["primary_class"]) for row in b.rows()] == [(0, "queueing")] * 3
        assert [row["concurrency_at_arrival"] for row in b.rows()] == [1, 3, 3]  # neighbours were in sight


def test_a_fault_of_the_first_attribution_loses_no_rows_and_hides_none(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        ask, broken = b.attribute, False

        def attribute(contexts: Sequence[Context]) -> pl.DataFrame:
            if broken:
                raise ValueError("no such luck")
            return ask(contexts)

        b.attribute = attribute
        b.reopen()
        b.receive([request(0)])
        b.run()
        broken = True
        b.receive([request(1)])
        b.writer.step()
        assert [row["revision"] for row in b.rows()] == [0, None]
        assert b.counter("attribution_failed")
        broken = False
        b.receive([request(2)])
        b.run(1)
        b.run(1)
        assert unattributed(b) == 0


def test_after_a_fault_that_undoes_a_pass_rows_are_written_without_attribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path) as b:
        b.receive([request(0)])
        b.run()
        monkeypatch.setattr(first_answers, "near_new", fails)
        b.receive([request(1)])
        with pytest.raises(RuntimeError, match="on purpose"):
            b.writer.step()
        assert len(b.rows()) == 1
        b.run()
        assert len(b.rows()) == 2


def fails(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_an_expensive_first_attribution_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_answers, "CHEAP_S", 0.0)
    monkeypatch.setattr(first_answers, "FIRST_S", 0.1)
    with bench(tmp_path) as b:
        b.receive([request(0)])
        b.run()
        b.receive([request(1)])
        b.writer.step()
        assert unattributed(b) == 0
        b.receive([request(2)])
        b.writer.step()
        assert unattributed(b) == 1


def test_where_more_rows_wait_to_be_seen_neighbours_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own attribution comes with them: to come back to them costs more."""
    monkeypatch.setattr("phasewise.collector.writer.READ_ROWS", 2)
    with bench(tmp_path) as b:
        b.receive([request(0)])
        b.run()
        b.receive([request(1), request(2), request(3)])
        b.writer.step()
        assert unattributed(b) == 0
        b.run(1)
        assert b.rows()[0]["concurrency_at_arrival"] == 1  # what was left may not be the last
        b.run(2)
        assert b.rows()[0]["concurrency_at_arrival"] > 1


def test_a_row_that_goes_does_not_keep_its_neighbours_from_becoming_final(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        client = {"name": "chat m", "scope": "genai", "kind": 3, "start_s": 0, "end_s": 1}
        told = {"gen_ai.operation.name": "chat", "gen_ai.response.id": "r-1"}
        b.receive([{**client, "attributes": told}], "a" * 32)
        b.receive([{**client, "start_s": 2, "end_s": 3, "attributes": {**told, "gen_ai.response.id": "r-2"}}], "b" * 32)
        b.run(1.5)
        assert len(b.rows()) == 2
        b.receive([engine_span(e2e_s=1.0, attributes={"gen_ai.request.id": "r-1"})], "c" * 32)
        b.run(2.0)
        assert len(b.rows()) == 2  # the first call has the engine's row now
        b.run(70)
        b.run(10)
        assert [row["final"] for row in b.rows()] == [True, True]


def test_an_attribution_that_changes_nothing_counts_no_revision(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([request(0)])
        b.run()
        b.receive([request(30)])
        b.run(1)
        b.run(1)
        assert [row["revision"] for row in b.rows()] == [0, 0]


@pytest.mark.slow
def test_no_instance_waits_for_ever_where_one_takes_the_whole_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresher, "TURN_S", 0.0)
    with bench(tmp_path) as b:
        busy, quiet = ({"resource": {"service.instance.id": name, "service.name": "s"}} for name in ("a", "b"))
        b.receive([{**request(0), **quiet}])
        for number in range(1, 30):
            b.receive([{**request(number), **busy}])
            b.run(5)
        assert [row["final"] for row in b.rows() if row["instance"] == "b"] == [True]


@pytest.mark.parametrize("late_s", [pytest.param(188.0, marks=pytest.mark.slow), 199.0])
def test_blocks_that_something_late_concerns_are_done_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Also where a pass has time for one block: the edge of two lies at 200 s, and what is late before or on it."""
    monkeypatch.setattr(refresher, "TURN_S", -1.0)
    with bench(tmp_path) as b:
        b.receive([request(150), request(210)])
        for _ in range(30):
            b.run(6)
        rows = b.rows()
        assert [row["final"] for row in rows] == [True, True]
        asked: list[str] = []

        def attribute(context: Context) -> pl.DataFrame:
            asked.extend(context.targets)
            return plain_attribute(context)

        b.attribute = each(attribute)
        b.reopen()
        b.writer._memory.refresher.touch(rows[0]["instance"], at(late_s), at(late_s + 2))
        for _ in range(120):
            b.run(6)
        assert asked == [row["request_key"] for row in rows]


def test_rows_become_final_after_a_crash_however_long_before_the_others_they_ended(tmp_path: Path) -> None:
    """Of an instance that was silent for hours, of one that claims to live a day ahead."""
    with bench(tmp_path) as b:
        for number, (name, start_s) in enumerate([("old", -7200.0), ("new", 0.0), ("ahead", 86_400.0)]):
            span = engine_span(start_s=start_s, trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")
            b.receive([span | {"resource": {"service.instance.id": name}}])
        b.run(2.0)
        b.reopen()
        for _ in range(20):
            b.run(6.0)
        final = {row["instance"]: row["final"] for row in b.rows()}
        assert final == {"old": True, "new": True, "ahead": False}
        b.clock.forward(86_400)
        b.run(6.0)
        b.run(6.0)
        assert all(row["final"] for row in b.rows())
