"""What attribution fails at, or says nothing of, is neither lost nor left as it is for ever."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from span_tables import at
from writing import SECOND, Bench, Instant, bench, each, engine_span, give_time, plain_attribute

from phasewise.collector import refresher
from phasewise.collector.blocks import Block
from phasewise.collector.context import Context
from phasewise.collector.failed_blocks import RETRY_NS, FailedBlocks
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.sealing import UNSETTLED_NS, due_hours


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Instant())


def request(number: int, start_s: float) -> dict[str, object]:
    return engine_span(start_s=start_s, trace=f"{number + 1:032x}", span_id=f"{number + 1:016x}")


class Fragile:
    """An attribution that notes what it is asked, fails at some keys, leaves out others, and says `word`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.fails_at: set[str] = set()
        self.leaves_out: set[str] = set()
        self.word = "queueing"

    def __call__(self, context: Context) -> pl.DataFrame:
        self.asked.append(tuple(context.targets))
        if self.fails_at.intersection(context.targets):
            raise ValueError("on purpose")
        said = plain_attribute(context).with_columns(pl.lit(self.word).alias("primary_class"))
        return said.filter(~pl.col("request_key").is_in(list(self.leaves_out)))


def all_final(b: Bench, *start_s: float) -> tuple[Fragile, list[str]]:
    """One final row in each block of these times; keys in order of time."""
    fragile = Fragile()
    b.attribute = each(fragile)
    b.reopen()
    b.receive([request(number, start) for number, start in enumerate(start_s)])
    for _ in range(30):
        b.run(6)
    rows = b.rows()
    assert [row["final"] for row in rows] == [True] * len(start_s)
    fragile.asked.clear()
    fragile.word = "prefill"
    return fragile, [row["request_key"] for row in rows]


def touch(b: Bench, start_s: float) -> None:
    b.writer._memory.refresher.touch(b.rows()[0]["instance"], at(start_s), at(start_s + 2))


def classes(b: Bench) -> list[str]:
    return [row["primary_class"] for row in b.rows()]


@pytest.mark.slow
@pytest.mark.parametrize("crash", [True, False])
def test_what_is_late_is_told_again_after_a_fault_not_at_every_step(tmp_path: Path, crash: bool) -> None:
    with bench(tmp_path) as b:
        fragile, (key,) = all_final(b, 10)
        fragile.fails_at = {key}
        touch(b, 10)
        for _ in range(8 * 60):
            b.writer.step()
            b.clock.forward(1)
        assert b.counter("attribution_failed") == len(fragile.asked)
        assert 2 <= len(fragile.asked) <= 3  # nothing comes, so somebody looks whenever a span of the clock has ended
        assert classes(b) == ["queueing"]
        if crash:
            b.reopen()
        fragile.fails_at = set()
        for _ in range(60):
            b.run(6)
        assert classes(b) == ["prefill"]
        assert [row["revision"] for row in b.rows()] == [2]
        tries = len(fragile.asked)
        for _ in range(60):
            b.run(6)
        assert len(fragile.asked) == tries, "it is done, and asked no more"
        assert b.rows("SELECT * FROM positions WHERE name = 'late'") == []


@pytest.mark.slow
def test_a_block_that_always_fails_holds_up_no_other_and_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresher, "TURN_S", -1.0)  # a pass has time for one block
    with bench(tmp_path) as b:
        fragile, keys = all_final(b, -290, 10, 320, 650)
        fragile.fails_at = {keys[0]}
        touch(b, -290)
        touch(b, 650)
        for _ in range(30):
            b.run(6)
        assert classes(b) == ["queueing", "prefill", "prefill", "prefill"]
        assert sorted(one for one in fragile.asked if one != (keys[0],)) == sorted((key,) for key in keys[1:])


@pytest.mark.slow
def test_a_block_that_is_not_final_and_always_fails_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresher, "TURN_S", -1.0)
    with bench(tmp_path) as b:
        fragile = Fragile()
        b.attribute = each(fragile)
        b.reopen()
        b.receive([request(0, 180), request(1, 210)])  # the edge of two blocks lies at 200 s
        b.run(2)
        first, second = (row["request_key"] for row in b.rows())
        fragile.fails_at = {first}
        for _ in range(30):
            b.run(6)
        assert [row["final"] for row in b.rows()] == [False, True]
        fragile.fails_at = set()
        for _ in range(60):
            b.run(6)
        assert [row["final"] for row in b.rows()] == [True, True]
        assert fragile.asked.count((second,)) == 1  # when it became final: it had come with the other


def test_rows_that_an_answer_leaves_out_become_final_without_causes_and_are_counted(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        fragile = Fragile()
        b.attribute = each(fragile)
        b.reopen()
        b.receive([request(0, 10), request(1, 12), request(2, 14)])
        b.run(2)
        keys = [row["request_key"] for row in b.rows()]
        fragile.leaves_out = {keys[1]}
        for _ in range(30):
            b.run(6)
        rows = b.rows()
        assert [row["final"] for row in rows] == [True] * 3
        assert classes(b) == ["queueing", None, "queueing"]
        assert b.counter("attribution_left_out") == 1
        fragile.leaves_out = set(keys)
        touch(b, 12)
        for _ in range(30):
            b.run(6)
        assert classes(b) == [None] * 3
        assert b.counter("attribution_left_out") == 1, "they were final before"


@pytest.mark.slow
def test_an_answer_without_any_row_leaves_none_provisional(tmp_path: Path) -> None:
    with bench(tmp_path, attribute=lambda _: pl.DataFrame(schema={"request_key": pl.String})) as b:
        b.receive([request(0, 10), request(1, 12)])
        for _ in range(30):
            b.run(6)
        assert [(row["final"], row["primary_class"]) for row in b.rows()] == [(True, None)] * 2
        assert b.counter("attribution_left_out") == 2


def test_no_hour_is_sealed_while_something_late_is_still_to_be_said_of_its_rows(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        fragile, (key,) = all_final(b, 10)
        fragile.fails_at = {key}
        touch(b, 10)
        b.run(2)
        b.run(3 * 3600)
        b.run(10)
        hour = at(12) // HOUR_NS
        assert due_hours(b.store, b.clock.now) == []
        assert [due.hour for due in due_hours(b.store, b.clock.now + UNSETTLED_NS)] == [hour]  # not for ever
        fragile.fails_at = set()
        for _ in range(60):
            b.run(6)
        assert classes(b) == ["prefill"]
        assert [due.hour for due in due_hours(b.store, b.clock.now)] == [hour]


def block(start_s: int, end_s: int) -> Block:
    return Block(start_s * SECOND, end_s * SECOND, start_s * SECOND, rows=1, open_rows=0)


def test_a_failed_block_rests_and_is_found_again_however_its_rows_are_cut() -> None:
    failed = FailedBlocks()
    assert not failed
    failed.look(RETRY_NS, at_once=False)
    failed.begin(block(0, 300))
    failed.add(block(0, 300))
    assert failed.rests(block(100, 200)) and not failed.is_due(block(100, 200))
    failed.look(2 * RETRY_NS - 1, at_once=False)
    assert failed.rests(block(100, 200))
    failed.look(2 * RETRY_NS, at_once=False)
    assert failed.is_due(block(100, 200)) and not failed.rests(block(100, 200))
    assert not failed.is_due(block(300, 400))
    failed.begin(block(100, 200))
    assert [failed.is_due(block(low, low + 100)) for low in (0, 100, 200)] == [True, False, True]
    assert failed.extent == (0, 300 * SECOND)
    failed.forget_waiting()
    assert not failed


def test_failed_blocks_side_by_side_take_no_more_room_than_one() -> None:
    failed = FailedBlocks()
    for start_s in range(0, 3000, 300):
        failed.add(block(start_s, start_s + 300))
    failed.look(RETRY_NS, at_once=False)
    assert failed._waiting == [(0, 3000 * SECOND)]
