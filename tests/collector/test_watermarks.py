"""Until when rows are final."""

from __future__ import annotations

import polars as pl
import pytest

from phasewise.collector.watermarks import FUTURE_NS, Watermarks

SECOND = 10**9
MINUTE = 60 * SECOND


def rows(*ends: tuple[float, float], instance: str | None = "i") -> pl.DataFrame:
    data = [(instance, int(end * SECOND), e2e) for end, e2e in ends]
    schema = {"instance": pl.String, "finished_unix_ns": pl.Int64, "e2e_s": pl.Float64}
    return pl.DataFrame(data, schema=schema, orient="row")


LATER = 10_000 * SECOND  # a time on our own clock past every row here


def test_w_is_the_longest_of_the_last_hour_and_at_least_a_minute() -> None:
    marks = Watermarks()
    assert marks.of("i", LATER) is None
    marks.see(rows((1000, 2.0)), now_ns=LATER)
    assert marks.of("i", LATER) == (1000 - 60) * SECOND
    marks.see(rows((1010, 300.0)), now_ns=LATER)
    assert marks.of("i", LATER) == (1010 - 300) * SECOND
    marks.see(rows((1010 + 3700, 1.0)), now_ns=LATER)
    assert marks.of("i", LATER) == (1010 + 3700 - 60) * SECOND


def test_silence_for_w_ends_the_wait() -> None:
    marks = Watermarks()
    marks.see(rows((1000, 90.0)), now_ns=LATER)
    assert marks.of("i", LATER + 90 * SECOND) == 910 * SECOND
    until = LATER + 91 * SECOND
    assert marks.of("i", until) == until + FUTURE_NS


def test_an_import_is_final_at_its_end_until_more_comes() -> None:
    marks = Watermarks()
    marks.see(rows((1000, 1.0)), now_ns=LATER, ended=True)
    assert marks.of("i", LATER) == LATER + FUTURE_NS
    marks.see(rows((1001, 1.0)), now_ns=LATER)
    assert marks.of("i", LATER) == 941 * SECOND


def test_instances_do_not_wait_for_each_other() -> None:
    marks = Watermarks()
    marks.see(rows((1000, 500.0)), now_ns=LATER)
    marks.see(rows((1000, 1.0), instance=None), now_ns=LATER)
    assert marks.of("", LATER) == 940 * SECOND
    assert set(marks.all(LATER)) == {"i", ""}


def test_a_row_that_ends_in_the_future_moves_no_clock_and_is_final_when_its_time_has_come() -> None:
    marks = Watermarks()
    ahead = LATER + FUTURE_NS + MINUTE
    marks.see(rows((ahead / SECOND, 1.0)), now_ns=LATER)
    assert marks.of("i", LATER) == LATER - MINUTE
    assert marks.of("i", LATER + MINUTE) == LATER
    assert marks.of("i", LATER + 2 * MINUTE) == LATER + 2 * MINUTE + FUTURE_NS >= ahead


@pytest.mark.parametrize("ahead_s", [30, 90, 590, 86_400])
def test_an_instance_that_lives_is_never_taken_for_silent_however_far_ahead_its_clock_is(ahead_s: int) -> None:
    marks = Watermarks()
    for second in range(0, 300, 10):
        now = LATER + second * SECOND
        marks.see(rows((now / SECOND + ahead_s, 1.0)), now_ns=now)
        assert marks.of("i", now) == now - MINUTE
    assert marks.of("i", now + 61 * SECOND) == now + 61 * SECOND + FUTURE_NS


def test_a_clock_that_jumped_a_day_ahead_keeps_no_earlier_row_from_becoming_final() -> None:
    marks = Watermarks()
    marks.see(rows((LATER / SECOND, 1.0)), now_ns=LATER)
    for second in range(10, 130, 10):
        now = LATER + second * SECOND
        marks.see(rows((now / SECOND + 86_400, 1.0)), now_ns=now)
        assert marks.of("i", now) == (LATER - MINUTE if second <= 60 else now - MINUTE)
