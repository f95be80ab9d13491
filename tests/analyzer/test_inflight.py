"""Requests that have not ended, told by samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from analyzer_contexts import frame, judged, sample_frame
from builders import START_UNIX_NS, make_request, make_sample

from phasewise.analyzer.inflight import in_flight
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.scene import Scene
from phasewise.analyzer.window import Window
from phasewise.collector.context import Setting
from phasewise.collector.records import EngineSample

MINUTE_NS = 60 * 10**9


def scene(
    samples: Sequence[EngineSample], now_s: float = 60.0, settings: dict[str, Setting] | None = None, requests: int = 0
) -> Scene:
    taken = sample_frame(samples)
    newest = taken["unix_ns"].max()
    empty = frame([])
    assert newest is None or isinstance(newest, int)
    return Scene(
        window=Window(START_UNIX_NS, START_UNIX_NS + round(now_s * 1e9)),
        requests=frame([make_request() for _ in range(requests)]),
        refused=0,
        aborted=0,
        replicas=(Replica("gpu-0", "vllm_v1", taken, settings or {}, False),),
        before=empty,
        baseline=None,
        now_unix_ns=START_UNIX_NS + round(now_s * 1e9),
        newest_unix_ns=newest,
    )


def test_a_growing_queue_at_a_full_slot_limit() -> None:
    flight = in_flight(
        scene([make_sample(at_s=i, running=4.0, waiting=i * 2.0, kv_usage_ratio=0.1) for i in range(30)])
    )
    assert flight.open == 62
    assert set(flight.waiting_s) == {"queue.slots"}
    assert flight.contention_ratio == pytest.approx(sum(2 * i for i in range(30)) / sum(2 * i + 4 for i in range(30)))


def test_a_full_pool_is_kv_although_slots_fill_up_too() -> None:
    flight = in_flight(scene([make_sample(at_s=i, running=7.0, waiting=5.0, kv_usage_ratio=0.96) for i in range(10)]))
    assert set(flight.waiting_s) == {"kv.wait"}


def test_one_sample_at_its_own_maximum_is_no_plateau() -> None:
    flight = in_flight(scene([make_sample(at_s=0, running=3.0, waiting=1.0, kv_usage_ratio=0.1)]))
    assert set(flight.waiting_s) == {"unexplained"}
    stated = {"max_num_seqs": Setting(3, "arguments")}
    flight = in_flight(scene([make_sample(at_s=0, running=3.0, waiting=1.0, kv_usage_ratio=0.1)], settings=stated))
    assert set(flight.waiting_s) == {"queue.slots"}


def test_only_the_last_minute_counts() -> None:
    old = [make_sample(at_s=i, running=4.0, waiting=60.0) for i in range(10)]
    calm = [make_sample(at_s=100 + i, running=1.0, waiting=0.0) for i in range(60)]
    flight = in_flight(scene([*old, *calm], now_s=160, requests=3))
    assert flight.open == 1
    assert flight.contention_ratio == 0


def test_without_a_single_span_the_samples_of_the_whole_window_count() -> None:
    old = [make_sample(at_s=i, running=4.0, waiting=60.0) for i in range(60)]
    calm = [make_sample(at_s=60 + i, running=0.0, waiting=0.0) for i in range(90)]
    flight = in_flight(scene([*old, *calm], now_s=150))
    assert flight.open == 0
    assert flight.contention_ratio > 0.9
    assert judged(frame([]), (), flight).status == "slow"


def test_a_live_engine_that_fell_silent_says_nothing_about_now() -> None:
    samples = [make_sample(at_s=i, running=4.0, waiting=60.0) for i in range(10)]
    assert in_flight(scene(samples, now_s=60)).open == 64
    assert in_flight(scene(samples, now_s=1000)).open == 0
    imported = [make_sample(at_s=i, running=4.0, waiting=60.0, source="import") for i in range(10)]
    assert in_flight(scene(imported, now_s=1000)).open == 64


def test_no_samples_is_no_evidence() -> None:
    assert in_flight(scene([])).samples == 0
