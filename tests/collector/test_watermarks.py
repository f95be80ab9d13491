"""Until when rows are final."""

from __future__ import annotations

import polars as pl

from phasewise.collector.watermarks import ALL, NEVER, Watermarks

SECOND = 10**9
MINUTE = 60 * SECOND


def rows(*ends: tuple[float, float], instance: str | None = "i") -> pl.DataFrame:
    data = [(instance, int(end * SECOND), e2e) for end, e2e in ends]
    schema = {"instance": pl.String, "finished_unix_ns": pl.Int64, "e2e_s": pl.Float64}
    return pl.DataFrame(data, schema=schema, orient="row")


def test_w_is_the_longest_of_the_last_hour_and_at_least_a_minute() -> None:
    marks = Watermarks()
    assert marks.of("i", 0) == NEVER
    marks.see(rows((1000, 2.0)), now_ns=0)
    assert marks.of("i", 0) == (1000 - 60) * SECOND
    marks.see(rows((1010, 300.0)), now_ns=0)
    assert marks.of("i", 0) == (1010 - 300) * SECOND
    marks.see(rows((1010 + 3700, 1.0)), now_ns=0)
    assert marks.of("i", 0) == (1010 + 3700 - 60) * SECOND


def test_silence_for_w_ends_the_wait() -> None:
    marks = Watermarks()
    marks.see(rows((1000, 90.0)), now_ns=0)
    assert marks.of("i", 90 * SECOND) == 910 * SECOND
    assert marks.of("i", 91 * SECOND) == ALL


def test_an_import_is_final_at_its_end_until_more_comes() -> None:
    marks = Watermarks()
    marks.see(rows((1000, 1.0)), now_ns=0, ended=True)
    assert marks.of("i", 0) == ALL
    marks.see(rows((1001, 1.0)), now_ns=0)
    assert marks.of("i", 0) == 941 * SECOND


def test_instances_do_not_wait_for_each_other() -> None:
    marks = Watermarks()
    marks.see(rows((1000, 500.0)), now_ns=0)
    marks.see(rows((1000, 1.0), instance=None), now_ns=0)
    assert marks.of("", 0) == 940 * SECOND
    assert set(marks.all(0)) == {"i", ""}
