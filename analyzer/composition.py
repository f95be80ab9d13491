"""What steps were made of beyond their own columns: which requests had a prompt in them, and how many tokens of each.

Steps state the prompt tokens of all requests together, requests the steps they were in (`segments`) and their prompt's length. Both
sums together determine nearly every chunk: a request alone in a step has all its tokens, a request in one step only has its
whole prompt there, and what these leave over determines the next. Where something stays open the tokens are divided so that
both sums hold as well as they can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from phasewise.analyzer.intervals import Bools, Floats, Index
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

    def placed(self, place: Ints) -> Segments:
        """Those of the requests that have a place (not -1), with that as their row."""
        own = self.where(place[self.row] >= 0)
        return replace(own, row=place[own.row])


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

    def placed(self, place: Ints) -> Chunks:
        """Those of the requests that have a place (not -1), with that as their row."""
        own = self.at(place[self.row] >= 0)
        return replace(own, row=place[own.row])

    def at(self, which: Bools | slice) -> Chunks:
        return Chunks(*(getattr(self, name)[which] for name in ("row", "step", "recompute", "tokens", "past")))


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
    left_row = np.full(int(row.max()) + 1, np.nan)
    left_row[row] = whole
    left_step = step_tokens.astype(np.float64)
    found = np.full(len(row), np.nan)
    left = _Open(np.arange(len(row)), row, step)
    for _ in range(PEEL_ROUNDS):
        before = len(left.place)
        left = _peel(found, left, left_row, left_step)
        if len(left.place) in (0, before):
            break
    if len(left.place):
        _fit(found, left, left_row, left_step)
    return found


@dataclass(frozen=True, slots=True)
class _Open:
    """Entries whose tokens are not known yet."""

    place: Index
    row: Ints
    step: Ints

    def at(self, which: Bools) -> _Open:
        return _Open(self.place[which], self.row[which], self.step[which])


def _peel(found: Floats, left: _Open, left_row: Floats, left_step: Floats) -> _Open:
    """Settles entries that are the last open one of their request, then of their step; those that are open still."""
    for by_request in (True, False):
        if by_request:
            alone = (np.bincount(left.row, minlength=len(left_row)) == 1) & np.isfinite(left_row)
            chosen = alone[left.row]
        else:
            chosen = (np.bincount(left.step, minlength=len(left_step)) == 1)[left.step]
        if not chosen.any():
            continue
        one = left.at(chosen)
        row, step = one.row, one.step
        value = left_row[row] if by_request else np.fmin(left_step[step], left_row[row])
        settled = np.clip(np.fmin(value, left_step[step]), 0.0, None)
        # Several requests may end in one step: together they have no more than its tokens.
        taken = np.bincount(step, weights=settled, minlength=len(left_step))
        over = np.divide(left_step, taken, out=np.ones_like(taken), where=taken > left_step)
        settled *= over[step]
        found[one.place] = settled
        left_step -= np.bincount(step, weights=settled, minlength=len(left_step))
        left_row -= np.bincount(row, weights=settled, minlength=len(left_row))
        np.clip(left_step, 0.0, None, out=left_step)
        np.clip(left_row, 0.0, None, out=left_row)
        left = left.at(~chosen)
    return left


def _fit(found: Floats, left: _Open, left_row: Floats, left_step: Floats) -> None:
    """Divides what is open by proportional fitting to both sums, ending with the steps' (those are measured)."""
    row, step = left.row, left.step
    sharing = np.bincount(step, minlength=len(left_step))
    tokens = left_step[step] / sharing[step]
    for _ in range(FIT_ROUNDS):
        by_row = np.bincount(row, weights=tokens, minlength=len(left_row))
        factor = np.divide(left_row, by_row, out=np.ones_like(by_row), where=(by_row > 0) & np.isfinite(left_row))
        tokens = tokens * factor[row]
        by_step = np.bincount(step, weights=tokens, minlength=len(left_step))
        factor = np.divide(left_step, by_step, out=np.ones_like(by_step), where=by_step > left_step)
        tokens = tokens * factor[step]
    found[left.place] = tokens
