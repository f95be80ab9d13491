"""A cumulative histogram as Prometheus knows it: fixed upper bounds, a sum and a count."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """bounds: inclusive upper bounds in rising order; what lies above the last counts under +Inf."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[int]:
        """One number a bound and one for +Inf: observations at or below it."""
        return list(accumulate(self._counts))


def one_two_five(most: float) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `most`: the bounds vLLM gives histograms of token counts."""
    bounds: list[float] = []
    power = 1.0
    while power <= most:
        bounds.extend(power * step for step in (1, 2, 5) if power * step <= most)
        power *= 10
    return tuple(bounds)
