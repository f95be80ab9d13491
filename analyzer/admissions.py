"""Rules of admission that spans show by themselves: a static batch lets nobody in until it has ended, a batching window lets requests
in when the first of them has waited for a fixed time.

Both leave seats and blocks free while requests wait, so no sample of running or of KV use tells of them. What tells is who got in when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.intervals import Floats, level

CLOCK_S = 1e-3  # spans are cut from several readings of a clock: what lies nearer is one moment
WAITED_S = 5e-3  # a shorter wait is the way from one step to the next
ENOUGH_ADMISSIONS = 20
ENOUGH_PASSED = 10  # requests that waited while a seat was given up and not given on
REFILL_RATIO = 0.02  # of these: a static batch takes nobody in while it runs, but for an end that two clocks tell apart
SAME_WAIT_RATIO = 0.25  # two waits that differ by less are taken for the same window and the steps around it
HELD_RATIO = 0.7  # of the admissions came after that wait
EARLY_RATIO = 0.1  # of the admissions came after less than half of it: of waits by chance it would be a third
SHORTEST_WINDOW_STEPS = 3.0  # a wait of so few steps may be the steps


@dataclass(frozen=True, slots=True)
class Admission:
    """How newcomers get in. kind: static, window, or free (nothing says that a seat is kept from them); window_s: where there is one."""

    kind: str
    window_s: float | None = None


FREE = Admission("free")


def admission_of(queued: Floats, scheduled: Floats, ended: Floats, step_s: float | None) -> Admission:
    """The rule that the moments of one engine's requests follow. ended: when each gave up its seat; step_s: of a usual step, None unknown.

    Whether a seat was free is not asked here: a full engine, too, may hold all its requests equally long.
    """
    known = np.isfinite(queued) & np.isfinite(scheduled) & np.isfinite(ended) & (ended > scheduled)
    if known.sum() < ENOUGH_ADMISSIONS:
        return FREE
    queued, scheduled, ended = queued[known], scheduled[known], ended[known]
    # A batch of equally long answers holds its newcomers equally long: what ends the wait is asked first.
    if _is_static(queued, scheduled, ended, step_s or 0.0):
        return Admission("static")
    window_s = _window_s(queued, scheduled, step_s or 0.0)
    return FREE if window_s is None else Admission("window", window_s)


def _window_s(queued: Floats, scheduled: Floats, step_s: float) -> float | None:
    """The wait that nearly all first ones of those who got in together had."""
    order = np.argsort(scheduled, kind="stable")
    starts = np.flatnonzero(np.diff(scheduled[order], prepend=-np.inf) > CLOCK_S)
    longest = np.maximum.reduceat((scheduled - queued)[order], starts)
    if len(longest) < ENOUGH_ADMISSIONS:
        return None
    usual = float(np.median(longest))
    if usual < max(WAITED_S, SHORTEST_WINDOW_STEPS * step_s):
        return None
    same = np.abs(longest - usual) <= SAME_WAIT_RATIO * usual
    early = longest < usual / 2
    return usual if same.mean() >= HELD_RATIO and early.mean() <= EARLY_RATIO else None


def _is_static(queued: Floats, scheduled: Floats, ended: Floats, step_s: float) -> bool:
    """Requests waited while seats were given up one by one, hardly any got in before the last of those that ran had ended, and nearly
    all first ones then did at once."""
    left = np.maximum(ended - CLOCK_S, scheduled)
    running = level(scheduled, left)
    before = np.concatenate(([0.0], running.value[:-1]))
    busy_from = running.time[(running.value > 0.5) & (before < 0.5)]
    leaves = np.sort(left)
    passing = leaves[running.at(leaves) > 0.5]  # others ran on
    waited = scheduled - queued > WAITED_S
    begun = busy_from[np.maximum(np.searchsorted(busy_from, scheduled, side="right") - 1, 0)]
    passed = waited & (_between(passing, queued, scheduled) > 0)
    refilled = waited & (_between(leaves, begun, scheduled) > 0)
    if passed.sum() < ENOUGH_PASSED or refilled.sum() > REFILL_RATIO * passed.sum():
        return False
    first = passed & (scheduled <= begun + CLOCK_S)
    last = leaves[np.maximum(np.searchsorted(leaves, scheduled[first], side="right") - 1, 0)]
    at_once = scheduled[first] - last <= 2 * CLOCK_S + step_s
    return bool(first.any() and at_once.mean() >= HELD_RATIO)


def _between(moments: Floats, start: Floats, end: Floats) -> Floats:
    """How many of some ascending moments lie in each (start, end)."""
    return np.asarray(np.searchsorted(moments, end, side="left") - np.searchsorted(moments, start, side="right"), float)
