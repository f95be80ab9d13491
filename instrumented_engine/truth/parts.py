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
PROMPT, TOKEN, BETWEEN, TURN = 0, 1, 2, 3  # kinds of membership


@dataclass(frozen=True, slots=True)
class Membership:
    """Stretches of consecutive steps that requests were part of, one row each.

    row: of the request in `Run.served`; first, last: steps, inclusive; part; kind: PROMPT (its prompt, or a recomputation, was
    computed), TOKEN (it decoded), and where it had a seat and got nothing, since the tokens of the step went to others: BETWEEN
    (chunks of its prompt), TURN (it decodes).
    """

    row: Ints
    first: Ints
    last: Ints
    part: Ints
    kind: Ints


@dataclass(frozen=True, slots=True)
class RunningStep:
    """Waits for the end of a step that was running: step, share of it, and part (FIRST: from entering the queue; TOKENS: from
    the end of a tool inside the stream), by row; a request may have several."""

    row: Ints
    step: Ints
    share: Floats
    part: Ints


def first_token_steps(run: Run) -> Ints:
    """The step that gave each served request its first token."""
    firsts = np.array([one.first_token_ns for one in run.served], dtype=np.int64)
    return np.searchsorted(run.end_ns, firsts, side="left").astype(np.int64)


def membership(run: Run) -> Membership:
    """All served requests.

    A gap between two stretches is a wait of the request's own after a preemption, a tool inside the stream, or (BETWEEN, TURN)
    steps whose tokens went to others; only these belong to the steps it was part of.
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
        phase_before: int | None = None
        for phase, first, last in sequence.segments:
            if before is not None and first > before + 1:
                begin = _back(sequence, before, first, starts, ends)
                kept = min((step for step in lost if before < step <= first), default=first) - 1
                if kept >= begin:
                    kind = TURN if DECODE in (phase_before, phase) else BETWEEN
                    _append(rows, row, begin, kept, first_token, kind)
            _append(rows, row, first, last, first_token, TOKEN if phase == DECODE else PROMPT)
            before, phase_before = last, phase
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    return Membership(*(np.ascontiguousarray(table[:, column]) for column in range(5)))


def _append(rows: list[tuple[int, int, int, int, int]], row: int, first: int, last: int, token: int, kind: int) -> None:
    """One stretch, cut after the step of the first token."""
    if first <= token:
        rows.append((row, first, min(last, token), FIRST, kind))
    if last > token:
        rows.append((row, max(first, token + 1), last, TOKENS, kind))


def _back(sequence: Sequence, before: int, after: int, starts: Ints, ends: Ints) -> int:
    """The first step between these two that the request could have been part of: the next one, or the first after its tools."""
    opened, closed = int(ends[before]), int(starts[after])
    back_ns = max((end for start, end in sequence.external if opened <= start < closed), default=None)
    return before + 1 if back_ns is None else max(before + 1, int(np.searchsorted(starts, back_ns, side="left")))


def running_step(run: Run) -> RunningStep:
    """Served requests that came, or came back from a tool, while a step ran; it decides nothing for them, but its end does.

    Who is there at the very moment a plan is made is looked at by that plan: what it waits from then on has a reason.
    """
    rows: list[tuple[int, int, int, int]] = []  # row, since when, until when at most, part
    for number, one in enumerate(run.served):
        assert one.queued_ns is not None and one.scheduled_ns is not None
        rows.append((number, one.queued_ns, one.scheduled_ns, FIRST))
        first, last = one.first_token_ns, one.last_token_ns
        if one.external and first is not None and last is not None:
            rows += [(number, end, last, TOKENS) for start, end in one.external if first <= start < last]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    row, since, until, part = (np.ascontiguousarray(table[:, column]) for column in range(4))
    step = np.searchsorted(run.steps["start_ns"], since, side="left") - 1
    known = np.maximum(step, 0)
    if not len(run.noise):
        return RunningStep(row[:0], step[:0], np.zeros(0), part[:0])
    left_ns = np.minimum(run.end_ns[known], until) - since
    use = np.flatnonzero((step >= 0) & (left_ns > 0))
    share = left_ns[use] / np.maximum(run.steps["duration_ns"][known[use]], 1)
    return RunningStep(row[use], known[use], share, part[use])


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
