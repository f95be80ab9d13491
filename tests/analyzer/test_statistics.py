"""Percentiles with what they rest on."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.analyzer.statistics import percentile, rounded, summary


def test_linear_interpolation_and_interval() -> None:
    found = percentile(np.arange(1.0, 101.0), 0.5)
    assert found.value == pytest.approx(50.5)
    assert found.n == 100
    assert found.low is not None
    assert found.high is not None
    assert found.low < 50.5 < found.high


def test_too_few_values_are_marked() -> None:
    assert percentile(np.ones(99), 0.99).few
    assert not percentile(np.ones(100), 0.99).few
    empty = percentile([np.nan], 0.5)
    assert (empty.value, empty.n, empty.few) == (None, 0, True)


def test_interval_covers_the_true_percentile_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        found = percentile(random.exponential(size=200), 0.95)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= -np.log(0.05) <= found.high
    assert hits / 400 >= 0.93


def test_summary_names_what_rests_on_few() -> None:
    found = summary(np.linspace(0, 1, 50))
    assert found["n"] == 50
    assert found["few"] == ["p99"]


def test_six_significant_digits() -> None:
    assert rounded(0.12345678) == 0.123457
    assert rounded(float("nan")) is None
    assert rounded(None) is None
