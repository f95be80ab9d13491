"""Which scrape is which replica, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from span_tables import at, span_table
from writing import Bench, bench, each, engine_span, rulebook

from phasewise.collector.exposition import read_exposition
from phasewise.collector.facts import noted
from phasewise.collector.fingerprints import Counters, Ends, Fit, Part, fit
from phasewise.collector.joins import ALWAYS, Join, SampleRange, joins_of, peers, sample_ranges
from phasewise.collector.lives import Life, with_samples, with_settings
from phasewise.collector.profiles import Profiles
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


def scrape(
    name: str, first: float = -5, last: float = 105, engine: str = "vllm_v1", started_s: float | None = None
) -> Life:
    starts = frozenset() if started_s is None else frozenset({started_s})
    return Life(name, engine, round(first * SECOND), round(last * SECOND), starts_unix_s=starts)


def joined(
    *sides: Instance | Life, deviation: Callable[[tuple[str, ...], str], float | None] = lambda _a, _b: None
) -> list[Join]:
    return joins_of(
        [one for one in sides if isinstance(one, Instance)],
        [one for one in sides if isinstance(one, Life)],
        lambda engine: (engine or "").split("_")[0],
        lambda names, scrape, _from, _to: off(deviation(names, scrape)),
    )


def off(ratio: float | None) -> Fit | None:
    """A fit over a hundred requests that is off by that share of them."""
    return None if ratio is None else Fit(Part(100 * ratio, 100))


def pairs(found: list[Join]) -> list[tuple[str, str, str]]:
    return [(join.spans, join.scrape, join.by) for join in found]


def test_the_only_one_of_each_is_the_same() -> None:
    assert joined(spans("a"), scrape("x")) == [Join("a", "x", "only_instance", -5 * SECOND, ALWAYS[1])]


def test_the_same_name_beats_everything() -> None:
    found = joined(spans("a"), spans("b"), scrape("a"), scrape("x"))
    assert ("a", "a", "resource") in pairs(found)


def test_another_engine_is_no_candidate() -> None:
    assert joined(spans("a"), scrape("x", engine="sglang")) == []
    found = joined(spans("a"), scrape("x"), scrape("y", engine="sglang"))
    assert pairs(found) == [("a", "x", "only_instance")]


def test_two_and_nothing_to_tell_them_apart_is_no_join() -> None:
    assert joined(spans("a"), spans("b"), scrape("x"), scrape("y")) == []
    assert joined(spans("a"), spans("b"), scrape("x")) == []
    assert joined(spans("a"), scrape("x"), scrape("y")) == []


def test_counters_tell_two_replicas_apart() -> None:
    off: dict[tuple[str, ...], float] = {("a", "x"): 0.02, ("a", "y"): 0.6, ("b", "x"): 0.7, ("b", "y"): 0.05}
    found = joined(spans("a"), spans("b"), scrape("x"), scrape("y"), deviation=lambda s, c: off.get((*s, c), 1.0))
    assert pairs(found) == [("a", "x", "counters"), ("b", "y", "counters")]


def test_counters_that_fit_both_tell_nothing() -> None:
    assert joined(spans("a"), spans("b"), scrape("x"), scrape("y"), deviation=lambda _s, _c: 0.05) == []


def test_a_restarted_engine_keeps_its_scrape_on_both_sides() -> None:
    before, after = spans("before", 0, 100), spans("after", 200, 300)
    assert joined(before, after, scrape("host:8000", -5, 305)) == [
        Join("before", "host:8000", "only_instance", -5 * SECOND, 150 * SECOND),
        Join("after", "host:8000", "only_instance", 150 * SECOND + 1, ALWAYS[1]),
    ]


def test_a_known_process_start_divides_exactly() -> None:
    first, second = scrape("x", -5, 103, started_s=-60), scrape("x", 130, 305, started_s=125)
    assert joined(spans("before", 0, 100), spans("after", 200, 300), first, second) == [
        Join("before", "x", "only_instance", -5 * SECOND, 130 * SECOND - 1),
        Join("after", "x", "only_instance", 130 * SECOND, ALWAYS[1]),
    ]


def test_a_process_that_began_after_the_last_request_is_another_one() -> None:
    assert joined(spans("before", 0, 100), scrape("x", 130, 305, started_s=125)) == []
    assert joined(spans("before", 0, 100), scrape("x", 90, 305, started_s=101)) == []


def test_one_name_over_several_processes_keeps_them_all() -> None:
    found = joined(spans("a", 0, 300), scrape("x", -5, 103, started_s=-60), scrape("x", 130, 305, started_s=125))
    assert pairs(found) == [("a", "x", "only_instance")] * 2


def summed(names: tuple[str, ...], scrape: str) -> float | None:
    return (0.02 if names == ("a", "b") else 0.5) if scrape == "x" else None


def test_api_servers_of_one_engine_are_one_replica_where_their_sum_fits() -> None:
    found = joined(spans("a"), spans("b", 20, 90), scrape("x"), deviation=summed)
    assert pairs(found) == [("a", "x", "counters_sum"), ("b", "x", "counters_sum")]
    assert len({(join.from_unix_ns, join.to_unix_ns) for join in found}) == 1


def test_a_sum_that_does_not_fit_leaves_them_apart() -> None:
    two = spans("a"), spans("b")
    assert joined(*two, scrape("x"), deviation=lambda _s, _c: 0.5) == []
    assert joined(*two, scrape("x"), deviation=lambda s, _c: 0.1 if len(s) > 1 else 0.15) == []
    assert joined(spans("a", model="m"), spans("b", model="n"), scrape("x"), deviation=summed) == []
    assert joined(spans("a", 0, 40), spans("b", 50, 90), scrape("x"), scrape("y"), deviation=summed) == []


def test_a_sum_that_fits_two_scrapes_tells_nothing() -> None:
    def both(names: tuple[str, ...], _scrape: str) -> float:
        return 0.02 if len(names) > 1 else 0.5

    assert joined(spans("a"), spans("b"), scrape("x"), scrape("y"), deviation=both) == []


def test_scrapes_long_before_are_no_candidates() -> None:
    assert joined(spans("a", 10_000, 10_100), scrape("x", 0, 100)) == []


def test_a_join_by_the_user_stands() -> None:
    own = spans("a", joined_to="y", joined_by="user")
    assert pairs(joined(own, scrape("x"), scrape("y"))) == [("a", "y", "user")]


def test_lives_end_where_the_process_start_changes() -> None:
    lives: list[Life] = []
    for second, start in ((0, 1.0), (1, 1.0), (5, 4.5), (6, 4.5)):
        lives = with_samples(lives, scrape("x", second, second, started_s=start))
    assert [(one.first_unix_ns, one.last_unix_ns) for one in lives] == [(0, SECOND), (5 * SECOND, 6 * SECOND)]
    told = noted({"kv_pool_tokens": 2}, "scrape")
    lives = with_settings(lives, 6 * SECOND, told)
    assert [dict(one.settings) for one in lives] == [{}, told]


def test_an_address_that_several_processes_answer_in_turn_has_one_life() -> None:
    lives: list[Life] = []
    for second in range(9):
        lives = with_samples(lives, scrape("x", second, second, started_s=1.0 + second % 2))
    lives = with_samples(lives, scrape("x", 9, 9, started_s=1.0))
    assert [(one.first_unix_ns, one.last_unix_ns) for one in lives] == [(0, 9 * SECOND)]


def test_samples_without_a_start_time_belong_to_the_life_of_their_time() -> None:
    lives = with_samples([scrape("x", 0, 10)], scrape("x", 11, 12, started_s=-3.0))
    assert len(lives) == 1
    lives = with_samples([scrape("x", 0, 10)], scrape("x", 31, 32, started_s=30.0))
    assert len(lives) == 2
    assert len(with_samples(lives, scrape("x", 33, 34))) == 2


def feed(b: Bench, second: float, finished: int, started_s: float | None, **gauges: float) -> None:
    lines = [f'vllm:request_success_total{{finished_reason="stop"}} {finished}']
    lines += [f"vllm:{name} {value}" for name, value in gauges.items()]
    lines += [] if started_s is None else [f"process_start_time_seconds {started_s!r}"]
    read = read_exposition("\n".join(lines), at(second), b.writer._profiles, instance="host:8000")
    assert read is not None
    b.writer.add_samples([read])


def named(instance: str, start_s: float, number: int) -> dict[str, Any]:
    resource = {"service.instance.id": instance, "service.name": "engine"}
    return engine_span(start_s=start_s, trace=f"{number:032x}", resource=resource)


@pytest.mark.slow
def test_a_restart_under_another_name_keeps_the_evidence_before_it(tmp_path: Path) -> None:
    base = at(0) / 1e9
    seen: dict[str, set[float]] = {}

    def attribute(context: Any) -> pl.DataFrame:
        seen[context.instance] = set(context.samples["running"].to_list())
        return pl.DataFrame({"request_key": sorted(context.targets)}, schema={"request_key": pl.String})

    with bench(tmp_path, attribute=each(attribute)) as b:
        for second in range(10):
            feed(b, second, second, base - 50, num_requests_running=1.0)
        b.writer.add_spans(span_table([named("old", 2.0, 1)]))
        assert [row["joined_to"] for row in b.rows("SELECT * FROM instances WHERE kind = 'scrape'")] == ["old"]
        for second in range(20, 30):
            feed(b, second, second - 20, base + 15, num_requests_running=2.0)
        rows = "SELECT * FROM instances WHERE kind = 'scrape' ORDER BY first_seen_unix_ns"
        assert [row["joined_to"] for row in b.rows(rows)] == ["old", None]
        b.writer.add_spans(span_table([named("new", 22.0, 2)]))
        expected = [("host:8000", "old", at(0), at(9)), ("host:8000", "new", at(20), at(29))]
        columns = ("instance", "joined_to", "first_seen_unix_ns", "last_seen_unix_ns")
        assert [tuple(row[name] for name in columns) for row in b.rows(rows)] == expected
        table = b.rows("SELECT * FROM instances")
        assert sample_ranges(table, "old") == [SampleRange("host:8000", at(0), at(9))]
        assert sample_ranges(table, "new") == [SampleRange("host:8000", at(20), at(29))]
        assert (seen["old"], seen["new"]) == ({1.0}, {2.0})
        b.reopen()
        b.run(60)
        assert [tuple(row[name] for name in columns) for row in b.rows(rows)] == expected


def test_two_api_servers_and_one_scrape_are_attributed_as_one_replica(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        ends = [i * 3.0 + 2.0 for i in range(20)]
        spans = [named("api-0" if i % 2 else "api-1", i * 3.0, i + 1) for i in range(20)]
        for second in range(0, 70, 2):
            feed(b, second, sum(end <= second for end in ends), None, num_requests_running=1.0)
        b.writer.add_spans(span_table(spans))
        table = b.rows("SELECT * FROM instances ORDER BY kind, instance, joined_to")
        assert [(row["instance"], row["joined_to"], row["joined_by"]) for row in table] == [
            ("host:8000", "api-0", "counters_sum"),
            ("host:8000", "api-1", "counters_sum"),
            ("api-0", "host:8000", "counters_sum"),
            ("api-1", "host:8000", "counters_sum"),
        ]
        assert peers(table, "api-0") == ["api-0", "api-1"]
        assert {row["concurrency_at_arrival"] for row in b.rows()} == {20}  # its context holds both instances' rows


def series(*points: tuple[int, float]) -> Counters:
    times, values = zip(*points, strict=True)
    return Counters(np.array(times, dtype=np.int64) * SECOND, np.array(values), np.full(len(values), np.nan))


def test_a_counter_follows_its_own_spans_and_no_others() -> None:
    ends = Ends(np.arange(1, 51, dtype=np.int64) * SECOND, np.full(50, np.nan))
    own = series(*((t, float(min(t, 50))) for t in range(0, 61, 5)))
    other = series(*((t, float(10 * t)) for t in range(0, 61, 5)))
    restarted = series(*((t, float(t if t < 30 else t - 30)) for t in range(0, 61, 5)))

    def ratio(counters: Counters) -> float | None:
        found = fit(counters, ends)
        return None if found is None else found.requests.ratio

    assert ratio(own) == 0.0
    assert (ratio(other) or 0.0) > 0.3
    assert (ratio(restarted) or 1.0) < 0.3
    assert ratio(series((0, 0.0))) is None
    assert fit(series((0, 0.0), (1, 1.0)), Ends(ends.unix_ns[:1], ends.seconds[:1])) is None


def test_spans_of_the_instrumented_engine_and_scrapes_of_its_vllm_names_are_one_replica() -> None:
    """Its /metrics carries vLLM's names, so that a scrape takes it for a vLLM."""
    family = Profiles(rulebook().engines).family
    own = replace(spans("fd99a978"), engine="phasewise")
    found = joins_of([own], [scrape("10.0.0.1:8000")], family, lambda *_: None)
    assert [(one.spans, one.scrape, one.by) for one in found] == [("fd99a978", "10.0.0.1:8000", "only_instance")]
