"""Which time of a request an effect lies in, and which steps it was part of.

A request's time has three parts: until its first token, from there to its last token, and what follows (tools after the stream).
Each objective is about some of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from phasewise.instrumented_engine.recording import Floats, Ints
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.telemetry import DECODE
from phasewise.instrumented_engine.truth.run import Run

FIRST, TOKENS, AFTER = 0, 1, 2  # rows of an effect: until the first token, between tokens, after the last one
PARTS = 3
PROMPT, TOKEN, BETWEEN = 0, 1, 2  # kinds of membership


@dataclass(frozen=True, slots=True)
class Membership:
    """Stretches of consecutive steps that requests were part of, one row each.

    row: of the request in `Run.served`; first, last: steps, inclusive; part; kind: PROMPT (its prompt, or a recomputation, was
    computed), TOKEN (it decoded), BETWEEN (it had begun and got nothing, since the tokens of the step went to others).
    """

    row: Ints
    first: Ints
    last: Ints
    part: Ints
    kind: Ints


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The wait from entering the queue to the end of the step that was running then: step and share of it, by row."""

    row: Ints
    step: Ints
    share: Floats


def first_token_steps(run: Run) -> Ints:
    """The step that gave each served request its first token."""
    firsts = np.array([one.first_token_ns for one in run.served], dtype=np.int64)
    return np.searchsorted(run.end_ns, firsts, side="left").astype(np.int64)


def membership(run: Run) -> Membership:
    """All served requests.

    A gap between two stretches is a wait of the request's own after a preemption, a tool inside the stream, or (BETWEEN) a
    step whose tokens went to others; only the last belongs to the steps it was part of.
    """
    last_prompt = first_token_steps(run)
    losses: dict[int, list[int]] = {}
    for step, index in run.preempted:
        losses.setdefault(index, []).append(step)
    starts, ends = run.steps["start_ns"], run.end_ns
    rows: list[tuple[int, int, int, int, int]] = []
    for row, sequence in enumerate(run.served):
        lost = losses.get(sequence.index, ())
        first_token = int(last_prompt[row])
        before: int | None = None
        for phase, first, last in sequence.segments:
            if before is not None and first > before + 1 and not _away(sequence, lost, before, first, starts, ends):
                _append(rows, row, before + 1, first - 1, first_token, BETWEEN)
            _append(rows, row, first, last, first_token, TOKEN if phase == DECODE else PROMPT)
            before = last
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    return Membership(*(np.ascontiguousarray(table[:, column]) for column in range(5)))


def _append(rows: list[tuple[int, int, int, int, int]], row: int, first: int, last: int, token: int, kind: int) -> None:
    """One stretch, cut after the step of the first token."""
    if first <= token:
        rows.append((row, first, min(last, token), FIRST, kind))
    if last > token:
        rows.append((row, max(first, token + 1), last, TOKENS, kind))


def _away(sequence: Sequence, lost: Items[int], before: int, after: int, starts: Ints, ends: Ints) -> bool:
    """Whether between these two steps the request had been preempted, or a tool was at work."""
    if any(before < step < after for step in lost):
        return True
    opened, closed = int(ends[before]), int(starts[after])
    return any(start >= opened and start < closed for start, _ in sequence.external)


def running_step(run: Run) -> RunningStep:
    """Served requests that came while a step ran; it decides nothing for them, but its end does."""
    queued = np.array([one.queued_ns for one in run.served], dtype=np.int64)
    scheduled = np.array([one.scheduled_ns for one in run.served], dtype=np.int64)
    step = np.searchsorted(run.steps["start_ns"], queued, side="right") - 1
    known = np.maximum(step, 0)
    left_ns = np.minimum(run.end_ns[known], scheduled) - queued
    row = np.flatnonzero((step >= 0) & (left_ns > 0))
    share = left_ns[row] / np.maximum(run.steps["duration_ns"][known[row]], 1)
    return RunningStep(row, known[row], share)


def summed(run: Run, member: Membership, saved_s: Floats, kinds: Items[int]) -> Floats:
    """[PARTS, requests]: what a saving per step gives each request over the steps it was part of in these ways."""
    total = np.concatenate(([0.0], np.cumsum(saved_s)))
    use = np.isin(member.kind, kinds)
    gained = total[member.last[use] + 1] - total[member.first[use]]
    return gathered(run, member.row[use], member.part[use], gained)


def gathered(run: Run, row: Ints, part: Ints, seconds: Floats) -> Floats:
    """[PARTS, requests] from single amounts."""
    count = len(run.served)
    flat = np.bincount(part * count + row, weights=seconds, minlength=PARTS * count)
    return flat.astype(np.float64).reshape(PARTS, count)
