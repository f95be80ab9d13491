"""Histograms as cumulative counts by upper edge, made one: over ranks and series of one engine, whatever edges each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Shape = dict[float, float]  # upper edge -> cumulative count


def merged_shapes(shapes: Iterable[Shape], how: Callable[[float, float], float]) -> Shape:
    """One histogram by `how` (add, max), at the edges of which each of them tells: exponential ones have edges only where they
    counted. Empty where there are none."""
    merged: Shape | None = None
    for shape in shapes:
        if merged is None:
            merged = shape
        elif merged.keys() == shape.keys():
            merged = {edge: how(count, shape[edge]) for edge, count in merged.items()}
        else:
            both = [(edge, count_at(merged, edge), count_at(shape, edge)) for edge in {*merged, *shape}]
            merged = {edge: how(one, two) for edge, one, two in both if one is not None and two is not None}
    return merged or {}


def count_at(shape: Shape, edge: float) -> float | None:
    """The cumulative count at an edge, also at one that the histogram does not have where nothing was counted around it; else None."""
    if edge in shape:
        return shape[edge]
    below = max((own for own in shape if own < edge), default=None)
    above = min((own for own in shape if own > edge), default=None)
    count = 0.0 if below is None else shape[below]
    return count if above is not None and shape[above] == count else None
