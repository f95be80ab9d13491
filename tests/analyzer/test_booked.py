"""Parts of a request are made to add up to what it took, and what was booked stays where it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.analyzer.booked import CLAMP_RATIO, CLAMP_S, Booked
from phasewise.rules.vocabulary import CAUSES

seconds = st.floats(0, 100, allow_subnormal=False)
rows = st.lists(
    st.tuples(st.one_of(seconds, st.just(float("nan"))), st.dictionaries(st.sampled_from(CAUSES), seconds, max_size=5)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(rows)
def test_parts_add_up_or_nothing_is_told(told: list[tuple[float, dict[str, float]]]) -> None:
    e2e = np.array([length for length, _ in told])
    booked = Booked(len(told))
    for cause in CAUSES:
        booked.add(cause, np.array([parts.get(cause, 0.0) for _, parts in told]))
    cut = booked.close(e2e)
    for k, (length, parts) in enumerate(told):
        total, over = sum(booked[cause][k] for cause in CAUSES), sum(parts.values()) - length
        if np.isnan(length):
            assert total == 0
        elif over > max(CLAMP_S, CLAMP_RATIO * length) + 1e-9:
            assert booked["unexplained"][k] == total == length
        elif over <= max(CLAMP_S, CLAMP_RATIO * length) - 1e-9:
            assert total == pytest.approx(length, abs=1e-9) or over > max(parts.values(), default=0.0)
            assert all(booked[cause][k] >= min(value, 0.0) for cause, value in parts.items())
            assert bool(cut[k]) == (over > 1e-9) or abs(over - 1e-9) < 1e-12


def test_a_cause_nobody_fills_is_zero_and_not_among_the_filled() -> None:
    booked = Booked(2)
    booked.add("host", np.array([1.0, 2.0]))
    booked.add("host", np.array([0.5, 0.5]))
    booked.add("context", np.array([0.0, 1.0]))
    assert booked.filled == ("context", "host")
    assert booked["kv.wait"].tolist() == [0.0, 0.0]
    assert booked.total(("host", "kv.wait", "context")).tolist() == [1.5, 3.5]


def test_closing_leaves_the_arrays_it_was_given_alone() -> None:
    own = np.array([1.0])
    booked = Booked(1)
    booked.add("host", own)
    booked.close(np.array([0.999]))
    assert booked["host"].tolist() == [0.999]
    assert own.tolist() == [1.0]


def test_rows_are_replaced_whole() -> None:
    booked = Booked(3)
    booked.add("host", np.array([1.0, 1.0, 1.0]))
    booked.replace(np.array([True, False, True]), {"kv.wait": np.array([2.0, 2.0, 2.0])})
    assert booked["host"].tolist() == [0.0, 1.0, 0.0]
    assert booked["kv.wait"].tolist() == [2.0, 0.0, 2.0]
