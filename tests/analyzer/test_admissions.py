"""Who gets in when tells a static batch and a batching window from an engine that takes whoever comes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from phasewise.analyzer.admissions import admission_of

Floats = npt.NDArray[np.float64]
Moments = tuple[Floats, Floats, Floats]


def served(
    batch_of: str, *, seats: int = 4, window_s: float = 0.0, count: int = 200, rate_per_s: float = 1.0
) -> Moments:
    """Queued, scheduled and ended of requests of random length through an engine of so many seats."""
    chance = np.random.default_rng(7)
    queued = np.cumsum(chance.exponential(1 / rate_per_s, count))
    length = chance.uniform(0.5, 5.0, count)
    scheduled, ended = np.zeros(count), np.zeros(count)
    at = 0
    free = np.zeros(seats)
    while at < count:
        if batch_of == "static":
            start = max(queued[at], free.max())
            inside = [row for row in range(at, min(at + seats, count)) if queued[row] <= start]
        elif batch_of == "window":
            start = queued[at] + window_s
            inside = [row for row in range(at, count) if queued[row] <= start]
        else:
            start, inside = max(queued[at], free.min()), [at]
        for row in inside:
            scheduled[row], ended[row] = start, start + length[row]
            free[int(np.argmin(free))] = ended[row]
        at += len(inside)
    return queued, scheduled, ended


def test_nobody_gets_into_a_static_batch_before_it_ends() -> None:
    assert admission_of(*served("static"), 0.01).kind == "static"


def test_seats_that_are_given_on_are_no_static_batch() -> None:
    assert admission_of(*served("free", rate_per_s=2.0), 0.01).kind == "free"


@pytest.mark.parametrize("window_s", [0.1, 1.5])
def test_first_ones_that_wait_equally_long_are_held_by_a_window(window_s: float) -> None:
    found = admission_of(*served("window", window_s=window_s), 0.01)
    assert found.kind == "window"
    assert found.window_s == pytest.approx(window_s)


def test_waits_of_a_few_steps_are_no_window() -> None:
    assert admission_of(*served("window", window_s=0.02), 0.01).kind == "free"


def test_few_requests_say_nothing() -> None:
    assert admission_of(*served("static", count=12), 0.01).kind == "free"


def test_a_static_batch_of_equally_long_answers_is_no_window() -> None:
    """Three answers of 1 s and one of 4 s a batch: each newcomer comes right after its start and waits for 4 s."""
    start = np.repeat(np.arange(40) * 4.0, 4)
    ended = start + np.tile([4.0, 1.0, 1.0, 1.0], 40)
    queued = np.maximum(start - 3.9, 0.0)
    assert admission_of(queued, start, ended, 0.01).kind == "static"
