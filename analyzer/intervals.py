"""Arithmetic on time intervals, vectorised: unions, coverage, concurrency, shares of a shared resource.

All times are float seconds on one axis; arrays are one-dimensional NumPy arrays of equal length n unless said otherwise.
Intervals are half-open [start, end); an interval with NaN in it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def valid(start: Floats, end: Floats) -> Bools:
    """Which intervals are known and not empty."""
    return np.isfinite(start) & np.isfinite(end) & (end > start)


@dataclass(frozen=True, slots=True)
class Steps:
    """A right-continuous step function of time: value[k] holds on [time[k], time[k+1]); 0 before the first time."""

    time: Floats
    value: Floats

    def at(self, t: Floats) -> Floats:
        """Value at each t."""
        if not len(self.time):
            return np.zeros_like(t, dtype=float)
        k = np.searchsorted(self.time, t, side="right") - 1
        return np.where(k >= 0, self.value[np.maximum(k, 0)], 0.0)

    def integral(self, start: Floats, end: Floats) -> Floats:
        """Integral over each [start, end); NaN in, NaN out; an empty or reversed interval gives 0."""
        (found,) = integrals(self.time, (self.value,), start, end)
        return found

    def where(self, chosen: Bools) -> Steps:
        """The same function, 0 where not chosen (one flag a step)."""
        return Steps(self.time, np.where(chosen, self.value, 0.0))


def integrals(time: Floats, values: Sequence[Floats], start: Floats, end: Floats) -> list[Floats]:
    """Integral over each [start, end) of several step functions that step at the same times; see Steps.integral."""
    unknown = np.isnan(start + end)
    nothing = np.where(unknown, np.nan, 0.0)
    if not len(time):
        return [np.where(end > start, 0.0, nothing) for _ in values]
    width = np.diff(time)
    places = []
    for t in (start, end):
        k = np.searchsorted(time, t, side="right") - 1
        inside = np.maximum(k, 0)
        places.append((k >= 0, inside, t - time[inside]))

    def primitive(value: Floats, area: Floats, place: tuple[Bools, npt.NDArray[np.intp], Floats]) -> Floats:
        begun, inside, since = place
        return np.where(begun, area[inside] + value[inside] * since, 0.0)

    found = []
    for value in values:
        area = np.concatenate(([0.0], np.cumsum(value[:-1] * width)))
        difference = primitive(value, area, places[1]) - primitive(value, area, places[0])
        found.append(np.where(end > start, difference, nothing))
    return found


def level(start: Floats, end: Floats, weight: Floats | None = None) -> Steps:
    """How many intervals hold each moment (or the sum of their weights)."""
    ok = valid(start, end)
    load = np.ones(int(ok.sum())) if weight is None else np.nan_to_num(weight[ok])
    times = np.concatenate((start[ok], end[ok]))
    change = np.concatenate((load, -load))
    if not len(times):
        return Steps(np.empty(0), np.empty(0))
    moments, which = np.unique(times, return_inverse=True)
    total = np.cumsum(np.bincount(which, weights=change, minlength=len(moments)).astype(np.float64))
    # A sum of floats that should be zero is not: a millionth of the largest weight is silence.
    total[np.abs(total) < 1e-6 * max(float(load.max(initial=0.0)), 1e-300)] = 0.0
    return Steps(moments, total)


def covered(start: Floats, end: Floats) -> Steps:
    """1 where at least one interval lies, else 0."""
    count = level(start, end)
    return Steps(count.time, (count.value > 0.5).astype(float))


def own_share_s(start: Floats, end: Floats, amount: Floats) -> Floats:
    """Seconds of each interval that are its own, when intervals that overlap share time by their rates amount / length.

    Two prompts prefilled in the same steps each get the part of those steps that their tokens took: for prompt i with rate
    r_i, the integral of r_i / sum of rates over its interval. The rest of the interval belongs to the others.
    An interval with an unknown amount counts with the mean rate of the known ones, or rate 1.
    """
    ok = valid(start, end)
    length = np.where(ok, end - start, np.nan)
    rate = amount / length
    known = rate[np.isfinite(rate) & (rate > 0)]
    rate = np.where(np.isfinite(rate) & (rate > 0), rate, float(known.mean()) if len(known) else 1.0)
    total = level(start, end, rate)
    inverse = Steps(total.time, np.divide(1.0, total.value, out=np.zeros_like(total.value), where=total.value > 0))
    own = rate * inverse.integral(start, end)
    return np.where(ok, np.clip(own, 0.0, length), np.nan)
