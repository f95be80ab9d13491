"""Engine figures over time: gauges summed over replicas, counters as differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from builders import SECOND_NS, START_UNIX_NS, make_instance, make_sample, record_table

from phasewise.analyzer import gauges
from phasewise.analyzer.filters import sample_conditions
from phasewise.analyzer.questions import Bins
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.records import EngineSample, EngineStep, Instance
from phasewise.collector.store import Store

WINDOW = Window(START_UNIX_NS, START_UNIX_NS + 60 * SECOND_NS)
GRID = Bins(START_UNIX_NS, 10 * SECOND_NS, 6)


def opened(path: Path, samples: Sequence[EngineSample], instances: Sequence[Instance] = ()) -> Store:
    store = Store(path / "test.duckdb")
    with store.write() as transaction:
        transaction.insert("engine_samples", record_table(EngineSample, samples))
        if instances:
            transaction.insert("instances", record_table(Instance, instances))
    return store


def test_gauges_are_means_in_a_bin_summed_over_replicas(tmp_path: Path) -> None:
    samples = [
        make_sample(instance=name, at_s=at, running=running, kv_usage_ratio=kv)
        for name, at, running, kv in [("a", 1, 2.0, 0.2), ("a", 6, 4.0, 0.3), ("b", 3, 10.0, 0.9), ("a", 31, 1.0, 0.1)]
    ]
    with opened(tmp_path, samples) as store:
        answer = gauges.ask_samples(store, gauges.state_sql(), WINDOW, grid=GRID)
    assert answer["bin"].to_list() == [0, 3]
    assert answer["running"].to_list() == [13.0, 1.0]
    assert answer["kv_usage_ratio"].to_list() == [0.9, 0.1]


def test_counters_become_differences_and_a_reset_counts_from_zero(tmp_path: Path) -> None:
    values = [(-5, 90.0), (5, 100.0), (15, 103.0), (25, 2.0), (35, 4.0)]
    with opened(tmp_path, [make_sample(at_s=at, preemptions=value) for at, value in values]) as store:
        answer = gauges.ask_samples(store, gauges.state_sql(), WINDOW, grid=GRID)
        totals = gauges.ask_samples(store, gauges.totals_sql(), WINDOW).row(0, named=True)
    assert answer["preemptions_change"].to_list() == [10.0, 3.0, 2.0, 2.0]
    assert totals["preemptions_change"] == 17.0
    assert totals["samples_n"] == 4


def test_what_moved_over_a_gap_is_known_in_sum_and_not_when(tmp_path: Path) -> None:
    moments = [*range(-3, 8), *range(33, 60)]  # a second apart, but for 25 s without
    with opened(tmp_path, [make_sample(at_s=at, output_tokens=1000.0 + 10 * at) for at in moments]) as store:
        answer = gauges.ask_samples(store, gauges.state_sql(), WINDOW, grid=GRID)
        totals = gauges.ask_samples(store, gauges.totals_sql(), WINDOW).row(0, named=True)
    assert answer["bin"].to_list() == [0, 3, 4, 5]
    assert answer["output_tokens_change"].to_list() == [80.0, None, 100.0, 100.0]
    assert totals["output_tokens_change"] == 600.0


def test_sparse_scrapes_are_no_gap(tmp_path: Path) -> None:
    with opened(tmp_path, [make_sample(at_s=at, output_tokens=10.0 * at) for at in range(0, 60, 15)]) as store:
        narrow = Bins(START_UNIX_NS, 5 * SECOND_NS, 12)
        answer = gauges.ask_samples(store, gauges.state_sql(), WINDOW, grid=narrow)
    assert answer["output_tokens_change"].to_list() == [None, 150.0, 150.0, 150.0]


def test_samples_are_found_by_the_name_that_spans_know(tmp_path: Path) -> None:
    samples = [make_sample(instance="10.0.0.1:8000", at_s=1), make_sample(instance="10.0.0.2:8000", at_s=1)]
    with opened(tmp_path, samples, [make_instance(instance="10.0.0.1:8000", joined_to="gpu-0")]) as store:
        found = gauges.ask_samples(store, gauges.totals_sql(), WINDOW, [Filter("instance", "eq", "gpu-0")]).row(
            0, named=True
        )
        both = gauges.ask_samples(store, gauges.totals_sql(), WINDOW).row(0, named=True)
    assert (found["samples_n"], both["samples_n"]) == (1, 2)


def test_samples_that_belong_to_nobody_are_used_by_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, [make_sample(at_s=1, joined=False)]) as store:
        assert gauges.ask_samples(store, gauges.totals_sql(), WINDOW)["samples_n"][0] == 0


def test_filters_that_samples_cannot_answer_are_named() -> None:
    chosen, left = sample_conditions(
        [Filter("model", "eq", "a"), Filter("model", "eq", "b"), Filter("ttft", "gt", "2s")]
    )
    assert chosen.parameters == (["a", "b"],)
    assert left == ("ttft",)


def steps(name: str, count: int = 60, from_s: float = 0.0) -> list[EngineStep]:
    """One a second: its number waits, three run, ten prompt tokens, a preemption in every second one."""
    none = {f"waiting_{reason}": 0 for reason in ("kv", "budget", "window", "policy")}
    return [
        EngineStep(
            instance=name, step=k, start_unix_ns=START_UNIX_NS + round((from_s + k) * SECOND_NS), duration_s=0.9,
            prefill_tokens=10, decode_sequences=3, running=3, waiting_slot=k, kv_blocks_used=k, kv_blocks_total=100,
            preemptions=k % 2, **none,
        )
        for k in range(count)
    ]  # fmt: skip


def with_steps(store: Store, ran: Sequence[EngineStep]) -> None:
    with store.write() as transaction:
        transaction.insert("engine_steps", record_table(EngineStep, ran))


def test_an_engine_that_nobody_scrapes_is_told_by_its_steps(tmp_path: Path) -> None:
    named = [
        make_instance(instance=name, kind="spans", joined_to=None, model=f"model-{name}") for name in ("e-0", "e-1")
    ]
    with opened(tmp_path, [make_sample(at_s=1, joined=False)], named) as store:
        with_steps(store, [*steps("e-0"), *steps("e-1", count=10)])
        answer = gauges.ask_samples(store, gauges.state_sql(), WINDOW, grid=GRID)
        totals = gauges.ask_samples(store, gauges.totals_sql(), WINDOW).row(0, named=True)
        one = gauges.ask_samples(store, gauges.totals_sql(), WINDOW, [Filter("model", "eq", "model-e-1")]).row(
            0, named=True
        )
    assert answer["bin"].to_list() == [0, 1, 2, 3, 4, 5]
    assert answer["running"].to_list() == [6.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert answer["waiting"].to_list() == [9.0, 14.5, 24.5, 34.5, 44.5, 54.5]
    assert answer["kv_usage_ratio"].to_list() == [0.09, 0.19, 0.29, 0.39, 0.49, 0.59]
    assert answer["preemptions_change"].to_list() == [10.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert (totals["preemptions_change"], totals["prompt_tokens_change"]) == (35.0, 700.0)
    assert (totals["replicas_n"], totals["samples_n"], totals["waiting_max"]) == (2, 0, 59.0)
    assert (one["replicas_n"], one["prompt_tokens_change"]) == (1, 100.0)


def test_steps_before_the_window_change_nothing_in_it(tmp_path: Path) -> None:
    with opened(tmp_path, []) as store:
        with_steps(store, steps("e-0", count=90, from_s=-30))
        totals = gauges.ask_samples(store, gauges.totals_sql(), WINDOW).row(0, named=True)
    assert (totals["prompt_tokens_change"], totals["preemptions_change"]) == (600.0, 30.0)


def test_an_engine_that_is_scraped_is_told_by_its_scrapes(tmp_path: Path) -> None:
    samples = [make_sample(instance="10.0.0.1:8000", at_s=at, running=1.0) for at in (1, 11)]
    with opened(tmp_path, samples, [make_instance(instance="10.0.0.1:8000", joined_to="e-0")]) as store:
        with_steps(store, steps("e-0"))
        answer = gauges.ask_samples(store, gauges.state_sql(), WINDOW, grid=GRID)
    assert (answer["bin"].to_list(), answer["running"].to_list()) == ([0, 1], [1.0, 1.0])
