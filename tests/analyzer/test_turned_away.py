"""Refused and aborted calls: told by rows, by counters, or by both, and counted once."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest
from analyzer_contexts import frame, sample_frame
from builders import SECOND_NS, START_UNIX_NS, make_request, make_sample

from phasewise.analyzer.crowd import crowd_of, with_outcome
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.scene import counted_in, turned_away
from phasewise.analyzer.window import Window
from phasewise.collector.records import EngineSample

WINDOW = Window(START_UNIX_NS, START_UNIX_NS + 60 * SECOND_NS)


def replica(samples: Sequence[EngineSample], name: str = "gpu-0", *, steps: bool = False) -> Replica:
    taken = sample_frame(samples)
    if not steps:
        return Replica(name, "vllm_v1", taken, {}, True)
    stepped = sample_frame([make_sample(instance=name, at_s=s, source="steps") for s in range(5)])
    return Replica(name, "phasewise", stepped, {}, True, scrapes=taken)


def moving(name: str, *values: float | None) -> list[EngineSample]:
    """A counter at 0, 10, 20, ... seconds."""
    return [make_sample(at_s=10 * k, **{name: value}) for k, value in enumerate(values)]


def rows(outcome: str, count: int, instance: str | None = "gpu-0") -> pl.DataFrame:
    return frame([make_request(instance=instance, outcome=outcome) for _ in range(count)])


def away(told: pl.DataFrame, replicas: Sequence[Replica], outcome: str) -> int:
    return turned_away(with_outcome(crowd_of(told, WINDOW.to_unix_ns), outcome), replicas, outcome, WINDOW)


@pytest.mark.parametrize("steps", [False, True], ids=["scrapes", "steps and scrapes"])
def test_what_spans_and_counter_both_tell_is_counted_once(steps: bool) -> None:
    engine = replica(moving("aborted", 0.0, 5.0, 12.0), steps=steps)
    assert away(rows("aborted", 12), [engine], "aborted") == 12
    assert away(rows("aborted", 3), [engine], "aborted") == 12
    assert away(rows("aborted", 14), [engine], "aborted") == 14


@pytest.mark.parametrize("steps", [False, True], ids=["scrapes", "steps and scrapes"])
def test_refusals_that_no_span_tells_of_are_those_of_the_counter(steps: bool) -> None:
    assert away(rows("ok", 4), [replica(moving("refused", 2.0, 9.0), steps=steps)], "refused") == 7


def test_clients_tell_of_the_same_calls_as_the_engine_s_counter() -> None:
    engine = replica(moving("refused", 0.0, 7.0))
    assert away(rows("refused", 7, instance=None), [engine], "refused") == 7
    assert away(rows("refused", 9, instance=None), [engine], "refused") == 9


def test_a_scrape_that_nobody_joined_is_not_another_engine_s_calls() -> None:
    """Rows of an engine without a counter, and a counter without rows."""
    spans = Replica("e-0", "phasewise", sample_frame([make_sample(source="steps")]), {}, True)
    assert away(rows("aborted", 12, "e-0"), [spans, replica(moving("aborted", 0.0, 12.0), "10.0.0.1:80")], "aborted") == 12  # fmt: skip


def test_each_engine_s_own_larger_count_is_taken() -> None:
    told = pl.concat([rows("aborted", 5, "a"), rows("aborted", 1, "b")])
    engines = [replica(moving("aborted", 0.0, 2.0), "a"), replica(moving("aborted", 0.0, 4.0), "b")]
    assert away(told, engines, "aborted") == 5 + 4


def test_a_counter_counts_inside_the_window_only() -> None:
    around = [
        make_sample(at_s=s, aborted=value) for s, value in ((-30, 0.0), (-10, 4.0), (10, 6.0), (50, 9.0), (80, 20.0))
    ]
    assert counted_in(sample_frame(around), "aborted", WINDOW) == 5.0


def test_a_series_appears_with_its_first_event_and_falls_with_a_restart() -> None:
    assert counted_in(sample_frame(moving("refused", None, None, 40.0, 41.0)), "refused", WINDOW) == 41.0
    assert counted_in(sample_frame(moving("refused", 5.0, 9.0, 2.0)), "refused", WINDOW) == 6.0
    assert counted_in(sample_frame(moving("refused", None, None)), "refused", WINDOW) == 0.0
    assert counted_in(sample_frame([]), "refused", WINDOW) == 0.0


def test_what_a_young_process_counted_before_its_first_scrape_belongs_to_it() -> None:
    began = START_UNIX_NS / SECOND_NS + 5
    young = [make_sample(at_s=s, refused=value, process_start_unix_s=began) for s, value in ((8, 3.0), (20, 10.0))]
    old = [make_sample(at_s=s, refused=value, process_start_unix_s=began - 3600) for s, value in ((8, 3.0), (20, 10.0))]
    assert counted_in(sample_frame(young), "refused", WINDOW) == 10.0
    assert counted_in(sample_frame(old), "refused", WINDOW) == 7.0
