"""Sequences of one call (n > 1): they share its prompt, so none of them waits for the prefill of another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from phasewise.analyzer.intervals import Floats, Index, valid


@dataclass(frozen=True, slots=True)
class Siblings:
    """groups: rows of each call of several sequences, [calls, sequences], one array for all calls of the same size."""

    groups: tuple[Index, ...] = ()

    def counts(self, rows: int) -> Floats:
        """How many sequences the call of each of so many rows has."""
        found = np.ones(rows)
        for group in self.groups:
            found[group] = group.shape[1]
        return found

    def covered_s(self, start: Floats, end: Floats, low: Floats, high: Floats) -> Floats:
        """Seconds of each row's [low, high) that lie in [start, end) of other sequences of its call; 0 where unknown."""
        found = np.zeros(len(start))
        for group in self.groups:
            found[group] = _covered_s(start[group], end[group], low[group], high[group])
        return found


def _covered_s(start: Floats, end: Floats, low: Floats, high: Floats) -> Floats:
    """The same for calls of one size, [calls, sequences]."""
    known = valid(start, end)
    begins, ends = np.where(known, start, np.inf), np.where(known, end, -np.inf)
    order = np.argsort(begins, axis=1)
    found = np.zeros(start.shape)
    for k in range(start.shape[1]):
        others = order[order != k].reshape(len(order), -1)
        from_, to = low[:, k, None], high[:, k, None]
        # Bounded by [low, high), in order of their starts: each adds what lies beyond the furthest end before it.
        first = np.clip(np.take_along_axis(begins, others, axis=1), from_, to)
        last = np.clip(np.take_along_axis(ends, others, axis=1), from_, to)
        before = np.maximum.accumulate(np.concatenate((from_, last[:, :-1]), axis=1), axis=1)
        found[:, k] = np.clip(last - np.maximum(first, before), 0.0, None).sum(axis=1)
    return np.where(valid(low, high), found, 0.0)


def siblings_of(call_key: pl.Series) -> Siblings:
    """Rows that share a call, by the key of it; those without a key share none."""
    shared = pl.DataFrame({"call_key": call_key}).with_row_index("row").drop_nulls()
    several = shared.filter(pl.col("call_key").is_duplicated()).group_by("call_key", maintain_order=True).agg("row")
    sizes = several["row"].list.len()
    return Siblings(
        tuple(
            several["row"].filter(sizes == size).explode().to_numpy().astype(np.intp).reshape(-1, size)
            for size in sorted(sizes.unique().to_list())
        )
    )
