"""Percentiles that say how much they rest on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True)
class Percentile:
    """value: linear interpolation between order statistics; low, high: distribution-free 95 % interval from order statistics.

    few: fewer values than 1 / (1 - p), so the percentile lies above every but the largest: shown, compared by nothing.
    """

    value: float | None
    n: int
    low: float | None
    high: float | None
    few: bool


def percentile(values: ArrayLike, p: float) -> Percentile:
    """Percentile p in (0, 1) of the finite values; interval by the normal approximation of binomial ranks."""
    array = np.asarray(values, dtype=float)
    array = np.sort(array[np.isfinite(array)])
    n = len(array)
    few = n < 1 / (1 - p) - 1e-9
    if n == 0:
        return Percentile(None, 0, None, None, True)
    spread = Z95 * math.sqrt(n * p * (1 - p))
    low = array[max(0, math.floor(n * p - spread) - 1)] if n > 1 else array[0]
    high = array[min(n - 1, math.ceil(n * p + spread))] if n > 1 else array[0]
    return Percentile(float(np.quantile(array, p)), n, float(low), float(high), few)


def weighted_quantile(values: ArrayLike, weights: ArrayLike, p: float) -> float | None:
    """Percentile p in (0, 1) of values that stand for so many each: linear between the middles of their shares, with equal weights
    close to, and for many values the same as, that of order statistics. None without values."""
    array, weight = np.asarray(values, dtype=float), np.asarray(weights, dtype=float)
    known = np.isfinite(array) & (weight > 0)
    if not known.any():
        return None
    order = np.argsort(array[known], kind="stable")
    array, weight = array[known][order], weight[known][order]
    middle = (np.cumsum(weight) - weight / 2) / weight.sum()
    return float(np.interp(p, middle, array))


def summary(values: ArrayLike, weights: ArrayLike | None = None) -> dict[str, object]:
    """p50, p95, p99 with n and the mark `few`, in seconds, as the verdict object carries them. weights: for how many each value
    stands, where they differ; the interval is then not told."""
    if weights is not None:
        found_w = {
            name: weighted_quantile(values, weights, p) for name, p in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        }
        plain = summary(values)
        return {
            **plain,
            **{f"{name}_s": rounded(one) for name, one in found_w.items()},
            "p95_interval_s": [None, None],
            "weighted": True,
        }
    found = {name: percentile(values, p) for name, p in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    answer: dict[str, object] = {f"{name}_s": rounded(one.value) for name, one in found.items()}
    answer["p95_interval_s"] = [rounded(found["p95"].low), rounded(found["p95"].high)]
    answer["n"] = found["p50"].n
    answer["few"] = [name for name, one in found.items() if one.few]
    return answer


def rounded(value: float | None, digits: int = 6) -> float | None:
    """Six significant digits: the same data give the same text, whatever the order of summation."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def known(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The finite ones of some values; zero in the place of the others."""
    return np.where(np.isfinite(values), values, 0.0)


def floats(frame: pl.DataFrame, column: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A column as floats, NaN where unknown."""
    return frame[column].cast(pl.Float64).fill_null(float("nan")).to_numpy().copy()
