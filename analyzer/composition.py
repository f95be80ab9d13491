"""What steps were made of beyond their own columns: which requests had a prompt in them, and how many tokens of each.

Steps state the prompt tokens of all requests together, requests the steps they were in (`segments`) and their prompt's length. Both
sums together determine nearly every chunk: a request alone in a step has all its tokens, a request in one step only has its
whole prompt there, and what these leave over determines the next. Where something stays open the tokens are divided so that
both sums hold as well as they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.step_table import Ints, StepTable

PREFILL, DECODE, RECOMPUTE = 1, 2, 3  # phases of a segment on the wire
PEEL_ROUNDS = 64  # chains of prompts that share steps are resolved a link a round; longer ones are rare
FIT_ROUNDS = 24
CLOCK_S = 0.05  # steps and requests of one process may disagree by this


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of consecutive steps, ordered by request and as stated. row: index of the request; low, high: range of indices in
    the table; opens: this is the first segment of its request."""

    row: Ints
    phase: Ints
    first: Ints
    last: Ints
    low: Ints
    high: Ints

    @property
    def opens(self) -> Bools:
        return np.concatenate(([True], self.row[1:] != self.row[:-1])) if len(self.row) else np.zeros(0, dtype=np.bool_)

    def where(self, chosen: Bools) -> Segments:
        return Segments(*(getattr(self, name)[chosen] for name in ("row", "phase", "first", "last", "low", "high")))


def read_segments(texts: pl.Series, own: Bools, table: StepTable) -> Segments:
    """Segments of the chosen rows of requests; `texts`: JSON lists of [phase, first step, last step]. Rows whose list is no list
    of triples have none."""
    numbers = texts.fill_null("").str.extract_all(r"\d+")
    count = numbers.list.len().to_numpy()
    usable = own & (count > 0) & (count % 3 == 0)
    flat = numbers.filter(pl.Series(usable)).explode().cast(pl.Int64, strict=False).fill_null(-1).to_numpy()
    triples = flat.reshape(-1, 3).astype(np.int64)
    row = np.repeat(np.flatnonzero(usable), count[usable] // 3).astype(np.int64)
    phase, first, last = (np.ascontiguousarray(triples[:, k]) for k in range(3))
    low, high = table.spans(first, last)
    good = (phase >= PREFILL) & (phase <= RECOMPUTE) & (first >= 0) & (last >= first)
    return Segments(row, phase, first, last, low, high).where(good)


def covered_rows(segments: Segments, table: StepTable, arrival: Floats, finished: Floats, least_ratio: float) -> Bools:
    """Requests whose steps are in the table, at least this share of them and at the time of the request."""
    n = len(arrival)
    there = np.bincount(segments.row, weights=segments.high - segments.low, minlength=n)
    stated = np.bincount(segments.row, weights=segments.last - segments.first + 1, minlength=n)
    begin, end = np.full(n, np.inf), np.full(n, -np.inf)
    some = segments.high > segments.low
    np.minimum.at(begin, segments.row[some], table.start[segments.low[some]])
    np.maximum.at(end, segments.row[some], table.end[segments.high[some] - 1])
    inside = (begin >= arrival - CLOCK_S) & (end <= finished + CLOCK_S)
    return np.asarray((stated > 0) & (there >= least_ratio * stated) & inside, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Chunks:
    """One entry a request and step in which its prompt (or what was lost by preemption) was computed.

    step: index in the table; tokens: its own in that step; past: tokens of it computed before; pairs: causal (query, key)
    pairs of the chunk.
    """

    row: Ints
    step: Ints
    recompute: Bools
    tokens: Floats
    past: Floats

    @property
    def pairs(self) -> Floats:
        return self.tokens * self.past + self.tokens * (self.tokens + 1) / 2


def read_chunks(segments: Segments, table: StepTable, input_tokens: Floats, cached_tokens: Floats) -> Chunks:
    """Own tokens of every request in every step of its prefill; see module docstring."""
    part = segments.where((segments.phase != DECODE) & (segments.high > segments.low))
    length = part.high - part.low
    row = np.repeat(part.row, length)
    offset = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    step = np.repeat(part.low, length) + offset
    again = np.repeat(part.phase == RECOMPUTE, length)
    cached = np.nan_to_num(cached_tokens)
    fresh = np.where(input_tokens - cached > 0, input_tokens - cached, np.nan)
    # A prompt that was preempted before it was done was computed in part only: its sum is not that of its chunks.
    lost = np.zeros(len(input_tokens), dtype=np.bool_)
    lost[row[again]] = True
    whole = np.where(lost, np.nan, fresh)[row]
    tokens = _divided(row, step, np.where(again, np.nan, whole), table.prefill_tokens)
    before = _running_before(row, tokens)
    return Chunks(row, step.astype(np.int64), again, tokens, before + np.where(again, 0.0, cached[row]))


def _running_before(row: Ints, tokens: Floats) -> Floats:
    """Tokens of the same request in earlier entries; entries are grouped by request, in order."""
    total = np.cumsum(tokens) - tokens
    starts = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1]))) if len(row) else np.zeros(0, dtype=np.intp)
    return total - np.repeat(total[starts], np.diff(np.append(starts, len(row))))


def _divided(row: Ints, step: Ints, whole: Floats, step_tokens: Floats) -> Floats:
    """Tokens of each entry, from the sums by request (`whole`, the same on all its entries, NaN unknown) and by step."""
    if not len(row):
        return np.zeros(0)
    rows, row = np.unique(row, return_inverse=True)
    steps, step = np.unique(step, return_inverse=True)
    left_row = np.full(len(rows), np.nan)
    left_row[row] = whole
    left_step = step_tokens[steps].astype(np.float64)
    found = np.full(len(row), np.nan)
    for _ in range(PEEL_ROUNDS):
        if not _peel(found, row, step, left_row, left_step):
            break
    if np.isnan(found).any():
        _fit(found, row, step, left_row, left_step)
    return found


def _peel(
    found: Floats, row: npt.NDArray[np.intp], step: npt.NDArray[np.intp], left_row: Floats, left_step: Floats
) -> bool:
    """Settles entries that are the last open one of their request, then of their step; whether there were any."""
    moved = False
    for by_request in (True, False):
        open_ = np.isnan(found)
        per_row = np.bincount(row[open_], minlength=len(left_row))
        per_step = np.bincount(step[open_], minlength=len(left_step))
        if by_request:
            chosen = open_ & (per_row[row] == 1) & np.isfinite(left_row[row])
            value = left_row[row]
        else:
            chosen = open_ & (per_step[step] == 1)
            value = np.fmin(left_step[step], left_row[row])
        if not chosen.any():
            continue
        moved = True
        found[chosen] = np.clip(np.fmin(value, left_step[step]), 0.0, None)[chosen]
        # Several requests may end in one step: together they have no more than its tokens.
        taken = np.bincount(step[chosen], weights=found[chosen], minlength=len(left_step))
        over = np.divide(left_step, taken, out=np.ones_like(taken), where=taken > left_step)
        found[chosen] *= over[step[chosen]]
        left_step -= np.bincount(step[chosen], weights=found[chosen], minlength=len(left_step))
        left_row -= np.bincount(row[chosen], weights=found[chosen], minlength=len(left_row))
        np.clip(left_step, 0.0, None, out=left_step)
        np.clip(left_row, 0.0, None, out=left_row)
    return moved


def _fit(
    found: Floats, row: npt.NDArray[np.intp], step: npt.NDArray[np.intp], left_row: Floats, left_step: Floats
) -> None:
    """Divides what is open by proportional fitting to both sums, ending with the steps' (those are measured)."""
    open_ = np.flatnonzero(np.isnan(found))
    row, step = row[open_], step[open_]
    sharing = np.bincount(step, minlength=len(left_step))
    tokens = left_step[step] / sharing[step]
    for _ in range(FIT_ROUNDS):
        by_row = np.bincount(row, weights=tokens, minlength=len(left_row))
        factor = np.divide(left_row, by_row, out=np.ones_like(by_row), where=(by_row > 0) & np.isfinite(left_row))
        tokens = tokens * factor[row]
        by_step = np.bincount(step, weights=tokens, minlength=len(left_step))
        factor = np.divide(left_step, by_step, out=np.ones_like(by_step), where=by_step > left_step)
        tokens = tokens * factor[step]
    found[open_] = tokens
