"""Interval arithmetic against the plain definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.analyzer.intervals import SORTED_FROM, Floats, covered, held, level, own_share_s, places

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=12)


def ends(found: list[tuple[int, int]]) -> tuple[Floats, Floats]:
    start = np.array([float(a) for a, _ in found])
    return start, start + np.array([float(b) for _, b in found])


@settings(deadline=None)
@given(pairs, st.tuples(st.integers(0, 50), st.integers(0, 30)))
def test_level_and_cover_count_what_overlaps(found: list[tuple[int, int]], query: tuple[int, int]) -> None:
    start, end = ends(found)
    low, high = float(query[0]), float(query[0] + query[1])
    middles = np.arange(low, high) + 0.5  # all ends are whole, so cells of one second are uniform
    count = np.array([((start <= t) & (t < end)).sum() for t in middles])
    one = (np.array([low]), np.array([high]))
    assert level(start, end).integral(*one)[0] == count.sum()
    assert covered(start, end).integral(*one)[0] == (count > 0).sum()
    assert (level(start, end).at(middles) == count).all()


@settings(deadline=None)
@given(pairs, st.data())
def test_shares_of_overlapping_prefills_add_up_to_their_union(
    found: list[tuple[int, int]], data: st.DataObject
) -> None:
    start, end = ends(found)
    amount = np.array([float(data.draw(st.integers(1, 4000))) for _ in found])
    own = own_share_s(start, end, amount)
    union = covered(start, end).integral(np.array([0.0]), np.array([100.0]))[0]
    assert np.isclose(own.sum(), union)
    assert (own <= end - start + 1e-9).all()
    assert (own > 0).all()


def test_a_prefill_alone_is_all_its_own_and_an_unknown_interval_stays_unknown() -> None:
    own = own_share_s(np.array([0.0, np.nan]), np.array([2.0, 3.0]), np.array([np.nan, 5.0]))
    assert own[0] == 2.0
    assert np.isnan(own[1])


def test_equal_prompts_in_the_same_steps_share_them_equally() -> None:
    own = own_share_s(np.zeros(4), np.full(4, 2.0), np.full(4, 100.0))
    assert np.allclose(own, 0.5)


moments = st.lists(st.one_of(st.floats(-50, 50), st.just(float("nan"))), max_size=30)


@settings(deadline=None)
@given(pairs, moments)
def test_moments_are_found_alike_in_any_order_and_number(found: list[tuple[int, int]], asked: list[float]) -> None:
    time = np.unique(np.concatenate(ends(found)))
    few = np.array(asked, dtype=np.float64)
    many = np.tile(few, SORTED_FROM // max(len(few), 1) + 1)
    assert (places(time, few) == np.searchsorted(time, few, side="right") - 1).all()
    assert (places(time, many) == np.searchsorted(time, many, side="right") - 1).all()


@settings(deadline=None)
@given(pairs, st.lists(st.integers(-5, 70), max_size=20))
def test_a_step_function_is_the_same_on_a_grid_and_at_its_moments(
    found: list[tuple[int, int]], asked: list[int]
) -> None:
    steps = level(*ends(found))
    grid = np.unique(np.array(asked, dtype=np.float64))
    assert (held(steps.time, steps.value, grid) == steps.at(grid)).all()
    assert (held(steps.time, steps.value > 1.5, grid) == (steps.at(grid) > 1.5)).all()
    assert not held(np.empty(0), np.empty(0), grid).any()


@settings(deadline=None)
@given(pairs, st.data())
def test_equal_weights_are_counts(found: list[tuple[int, int]], data: st.DataObject) -> None:
    start, end = ends(found)
    unknown = np.array([data.draw(st.booleans()) for _ in found])
    start = np.where(unknown, np.nan, start)
    counted, weighted = level(start, end), level(start, end, np.ones(len(start)))
    assert np.array_equal(counted.time, weighted.time)
    assert np.array_equal(counted.value, weighted.value)


def test_what_is_left_of_a_sum_is_no_interval() -> None:
    """Its rate would be beyond any number: a property drew a prefill of 9.45e-308 s."""
    own = own_share_s(np.zeros(2), np.array([9.453742e-308, 1.0]), np.array([17.0, 17.0]))
    assert np.isnan(own[0]) and own[1] == 1.0
