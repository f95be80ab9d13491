"""Arithmetic on time intervals, vectorised: unions, coverage, concurrency, shares of a shared resource.

All times are float seconds on one axis; arrays are one-dimensional NumPy arrays of equal length n unless said otherwise.
Intervals are half-open [start, end); an interval with NaN in it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
SHORTEST_S = 1e-10
SORTED_FROM = 4096  # so many moments are looked up faster in order, sorting included


def valid(start: Floats, end: Floats) -> Bools:
    """Which intervals are known and not empty. Moments are told in nanoseconds: what is shorter is left of a sum, and no length to divide by."""
    return np.isfinite(start) & np.isfinite(end) & (end - start > SHORTEST_S)


def or_zero(values: Floats) -> Floats:
    """Unknown counts as nothing."""
    return np.where(np.isnan(values), 0.0, values)


def places(time: Floats, t: Floats) -> Index:
    """Index of the last of some ascending times at or before each t; -1 before the first, the last one for NaN.

    Neighbours in time are neighbours in memory: many moments in any order wait for memory at each step of their search.
    """
    if len(t) < SORTED_FROM or (t[1:] >= t[:-1]).all():
        return np.searchsorted(time, t, side="right") - 1
    order = np.argsort(t)
    found = np.empty(len(t), dtype=np.intp)
    found[order] = np.searchsorted(time, t[order], side="right") - 1
    return found


def held(time: Floats, value: npt.NDArray[Any], grid: Floats) -> npt.NDArray[Any]:
    """What a step function with any kind of values is at ascending moments; 0 before its first time. One look-up a step, not a moment."""
    first = np.searchsorted(grid, time, side="left")
    length = np.diff(first, append=len(grid))
    before = np.zeros(first[0] if len(first) else len(grid), dtype=value.dtype)
    return np.concatenate((before, np.repeat(value, length)))


@dataclass(frozen=True, slots=True)
class Steps:
    """A right-continuous step function of time: value[k] holds on [time[k], time[k+1]); 0 before the first time."""

    time: Floats
    value: Floats

    def at(self, t: Floats) -> Floats:
        """Value at each t."""
        if not len(self.time):
            return np.zeros_like(t, dtype=float)
        k = places(self.time, t)
        return np.where(k >= 0, self.value[np.maximum(k, 0)], 0.0)

    def integral(self, start: Floats, end: Floats) -> Floats:
        """Integral over each [start, end); NaN in, NaN out; an empty or reversed interval gives 0."""
        (found,) = integrals(self.time, (self.value,), start, end)
        return found

    def where(self, chosen: Bools) -> Steps:
        """The same function, 0 where not chosen (one flag a step)."""
        return Steps(self.time, np.where(chosen, self.value, 0.0))


def integrals(time: Floats, values: Sequence[Floats | Bools], start: Floats, end: Floats) -> list[Floats]:
    """Integral over each [start, end) of several step functions that step at the same times; see Steps.integral. A truth counts 1."""
    unknown = np.isnan(start + end)
    nothing = np.where(unknown, np.nan, 0.0)
    if not len(time):
        return [np.where(end > start, 0.0, nothing) for _ in values]
    width = np.diff(time)
    ends = []
    for t in (start, end):
        k = places(time, t)
        inside = np.maximum(k, 0)
        ends.append((k >= 0, inside, t - time[inside]))

    def primitive(value: Floats | Bools, area: Floats, place: tuple[Bools, Index, Floats]) -> Floats:
        begun, inside, since = place
        return np.where(begun, area[inside] + value[inside] * since, 0.0)

    found = []
    for value in values:
        area = np.concatenate(([0.0], np.cumsum(value[:-1] * width)))
        difference = primitive(value, area, ends[1]) - primitive(value, area, ends[0])
        found.append(np.where(end > start, difference, nothing))
    return found


def level(start: Floats, end: Floats, weight: Floats | None = None) -> Steps:
    """How many intervals hold each moment (or the sum of their weights)."""
    ok = valid(start, end)
    if not ok.any():
        return Steps(np.empty(0), np.empty(0))
    if weight is not None:
        return _load(start[ok], end[ok], or_zero(weight[ok]))[0]
    times = np.concatenate((start[ok], end[ok]))
    order = np.argsort(times)
    running = np.cumsum(np.where(order < len(order) // 2, 1.0, -1.0))
    times = times[order]
    last = np.append(times[1:] != times[:-1], True)  # of what begins and ends at one moment
    return Steps(times[last], running[last])


def _load(start: Floats, end: Floats, weight: Floats) -> tuple[Steps, Index, Index]:
    """Sum of the weights of the intervals that hold each moment, and where in it each interval begins and ends."""
    moments, place = np.unique(np.concatenate((start, end)), return_inverse=True)
    change = np.bincount(place, weights=np.concatenate((weight, -weight)), minlength=len(moments))
    total = np.cumsum(change, dtype=np.float64)
    # A sum of floats that should be zero is not: a millionth of the largest weight is silence.
    total[np.abs(total) < 1e-6 * max(float(weight.max()), 1e-300)] = 0.0
    return Steps(moments, total), place[: len(start)], place[len(start) :]


def covered(start: Floats, end: Floats) -> Steps:
    """1 where at least one interval lies, else 0."""
    count = level(start, end)
    return Steps(count.time, (count.value > 0.5).astype(float))


def rates(length: Floats, amount: Floats) -> Floats:
    """Amount a second of each; an unknown amount, or none, counts with the mean rate of the known ones, or rate 1."""
    rate = amount / length
    told = np.isfinite(rate) & (rate > 0)
    return rate if told.all() else np.where(told, rate, float(rate[told].mean()) if told.any() else 1.0)


def own_share_s(start: Floats, end: Floats, amount: Floats) -> Floats:
    """Seconds of each interval that are its own, when intervals that overlap share time by their rates amount / length.

    Two prompts prefilled in the same steps each get the part of those steps that their tokens took: for prompt i with rate
    r_i, the integral of r_i / sum of rates over its interval. The rest of the interval belongs to the others.
    An interval with an unknown amount counts with the mean rate of the known ones, or rate 1.
    """
    ok = valid(start, end)
    own = np.full(len(start), np.nan)
    if not ok.any():
        return own
    length = end[ok] - start[ok]
    rate = rates(length, amount[ok])
    total, begins, ends = _load(start[ok], end[ok], rate)
    inverse = np.divide(1.0, total.value, out=np.zeros_like(total.value), where=total.value > 0)
    area = np.concatenate(([0.0], np.cumsum(inverse[:-1] * np.diff(total.time))))
    own[ok] = np.minimum(np.maximum(rate * (area[ends] - area[begins]), 0.0), length)
    return own
