"""Which scrape is which replica."""

from __future__ import annotations

from typing import Any

from phasewise.collector.joins import Deviation, Join, counter_deviation, joins_of
from phasewise.collector.records import Instance

SECOND = 10**9


def spans(name: str, first: int = 0, last: int = 100, **fields: Any) -> Instance:
    return Instance(
        instance=name,
        engine="vllm_v1",
        kind="spans",
        first_seen_unix_ns=first * SECOND,
        last_seen_unix_ns=last * SECOND,
        **fields,
    )


def scrape(name: str, first: int = -5, last: int = 105, engine: str = "vllm_v1") -> Instance:
    return Instance(
        instance=name, engine=engine, kind="scrape", first_seen_unix_ns=first * SECOND, last_seen_unix_ns=last * SECOND
    )


def joined(*instances: Instance, deviation: Deviation = lambda _a, _b: None) -> list[Join]:
    return joins_of(instances, lambda engine: (engine or "").split("_")[0], deviation)


def test_the_only_one_of_each_is_the_same() -> None:
    assert joined(spans("a"), scrape("x")) == [Join("a", "x", "only_instance")]


def test_the_same_name_beats_everything() -> None:
    found = joined(spans("a"), spans("b"), scrape("a"), scrape("x"))
    assert Join("a", "a", "resource") in found


def test_another_engine_is_no_candidate() -> None:
    assert joined(spans("a"), scrape("x", engine="sglang")) == []
    assert joined(spans("a"), scrape("x"), scrape("y", engine="sglang")) == [Join("a", "x", "only_instance")]


def test_two_and_nothing_to_tell_them_apart_is_no_join() -> None:
    assert joined(spans("a"), spans("b"), scrape("x"), scrape("y")) == []
    assert joined(spans("a"), spans("b"), scrape("x")) == []
    assert joined(spans("a"), scrape("x"), scrape("y")) == []


def test_counters_tell_two_replicas_apart() -> None:
    off = {("a", "x"): 0.02, ("a", "y"): 0.6, ("b", "x"): 0.7, ("b", "y"): 0.05}
    found = joined(spans("a"), spans("b"), scrape("x"), scrape("y"), deviation=lambda s, c: off[s, c])
    assert found == [Join("a", "x", "counters"), Join("b", "y", "counters")]


def test_counters_that_fit_both_tell_nothing() -> None:
    assert joined(spans("a"), spans("b"), scrape("x"), scrape("y"), deviation=lambda _s, _c: 0.05) == []


def test_a_restarted_engine_keeps_its_scrape() -> None:
    found = joined(spans("before", 0, 100), spans("after", 200, 300), scrape("host:8000", -5, 305))
    assert found == [Join("before", "host:8000", "only_instance"), Join("after", "host:8000", "only_instance")]


def test_scrapes_long_before_are_no_candidates() -> None:
    assert joined(spans("a", 10_000, 10_100), scrape("x", 0, 100)) == []


def test_a_join_by_the_user_stands() -> None:
    own = spans("a", joined_to="y", joined_by="user")
    assert joined(own, scrape("x"), scrape("y")) == [Join("a", "y", "user")]


def test_deviation_of_a_counter_from_its_own_spans_is_small() -> None:
    ends = [i * SECOND for i in range(1, 51)]
    own = [(t * SECOND, float(t)) for t in range(0, 61, 5)]
    other = [(t * SECOND, float(10 * t)) for t in range(0, 61, 5)]
    restarted = [(t * SECOND, float(t if t < 30 else t - 30)) for t in range(0, 61, 5)]
    assert (counter_deviation(own, ends) or 0.0) < 0.05
    assert (counter_deviation(other, ends) or 0.0) > 0.3
    assert (counter_deviation(restarted, ends) or 0.0) < 0.2
    assert counter_deviation(own[:1], ends) is None
    assert counter_deviation([(0, 0.0), (SECOND, 1.0)], [SECOND]) is None
