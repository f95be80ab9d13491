"""Histograms with edges of their own are made one where all of them tell, and nowhere else."""

from __future__ import annotations

import bisect
import math
from operator import add, sub

from hypothesis import given
from hypothesis import strategies as st

from phasewise.collector.histogram_shapes import Shape, count_at, merged_shapes

VALUES = st.lists(st.integers(1, 40).map(float), max_size=30)
EDGES = st.sets(st.integers(1, 40).map(float), max_size=8)


def shape_of(values: list[float], edges: set[float]) -> Shape:
    ordered = sorted(values)
    return {edge: float(bisect.bisect_right(ordered, edge)) for edge in sorted({*edges, math.inf})}


@given(VALUES, EDGES, VALUES, EDGES)
def test_a_sum_is_the_histogram_of_all_values(
    one: list[float], own: set[float], two: list[float], other: set[float]
) -> None:
    """Where it says a number it is the right one; it says one at every edge that both have, and at the last."""
    merged = merged_shapes([shape_of(one, own), shape_of(two, other)], add)
    truth = shape_of([*one, *two], {*own, *other})
    assert merged == {edge: truth[edge] for edge in merged}
    assert {*(own & other), math.inf} <= merged.keys() <= truth.keys()


@given(VALUES, VALUES, EDGES, EDGES)
def test_what_was_counted_since_is_a_difference(
    before: list[float], since: list[float], own: set[float], later: set[float]
) -> None:
    grown = merged_shapes([shape_of([*before, *since], later), shape_of(before, own)], sub)
    truth = shape_of(since, {*own, *later})
    assert grown == {edge: truth[edge] for edge in grown}
    assert math.inf in grown


def test_between_edges_nothing_is_known_unless_nothing_was_counted() -> None:
    shape = {1.0: 0.0, 2.0: 3.0, 4.0: 3.0, math.inf: 5.0}
    told = [(0.5, 0.0), (1.5, None), (3.0, 3.0), (4.0, 3.0), (8.0, None), (math.inf, 5.0)]
    assert [(edge, count_at(shape, edge)) for edge, _ in told] == told
    assert count_at({1.0: 2.0}, 2.0) is None  # without its last edge it does not tell how many there are


def test_copies_of_one_histogram_count_once() -> None:
    ranks: list[Shape] = [{1.0: 1.0, 2.0: 3.0, math.inf: 3.0}, {1.0: 1.0, 2.0: 2.0, math.inf: 2.0}]
    assert merged_shapes(ranks, max) == ranks[0]
    assert merged_shapes([], add) == {}
