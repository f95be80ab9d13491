"""What passes between the runs of steps of one request: waits after a preemption, for its turn, for a tool; and between two
steps that follow each other, the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.composition import DECODE, RECOMPUTE, Segments
from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.step_table import Ints, RunningSum, StepTable

KV_FULL_RATIO = 0.9  # of the blocks in use when a sequence was preempted or left out: it was for want of them
TOOL_S = 1e-6  # less external time than this is none
# Causes of a wait for its turn by what ran meanwhile: others' prompts; others' decoding while the pool is full; others' decoding.
TURNS = ("interference", "kv.wait", "queue.budget")


@dataclass(frozen=True, slots=True)
class Gaps:
    """k waits between two runs of one request. wall_s: how long; low, high: indices of the steps that ran meanwhile; lost: it was
    preempted; for_blocks: while the pool was full; early: before the first token; tool: a call to the outside may lie in it;
    turn_share: [turns, k] by TURNS."""

    row: Ints
    wall_s: Floats
    low: Ints
    high: Ints
    lost: Bools
    for_blocks: Bools
    early: Bools
    tool: Bools
    turn_share: Floats


def gaps_of(segments: Segments, before: Bools, table: StepTable, external_s: Floats) -> Gaps:
    """before: which segments lie before the first token; external_s: of each request, inside its decode."""
    pair, low, high, lost = _apart(segments)
    full = np.fmax(table.kv_ratio[low - 1], table.kv_ratio[np.minimum(low, len(table) - 1)])
    prompts = table.prefill_tokens > 0
    short = np.nan_to_num(table.kv_ratio) >= KV_FULL_RATIO
    kinds = np.stack((prompts, ~prompts & short, ~prompts & ~short)).astype(np.float64)
    between = RunningSum.of(kinds * table.cycle_s).between(low, high)
    total = between.sum(axis=0)
    row = segments.row[pair]
    return Gaps(
        row=row,
        wall_s=np.clip(table.start[high] - table.end[low - 1], 0.0, None),
        low=low,
        high=high,
        lost=lost,
        for_blocks=~(full < KV_FULL_RATIO),
        early=before[pair] & before[pair + 1],
        tool=~lost & (segments.phase[pair] == DECODE) & (external_s[row] > TOOL_S),
        turn_share=np.divide(between, total, out=np.zeros_like(between), where=total > 0),
    )


def _apart(segments: Segments) -> tuple[Ints, Ints, Ints, Bools]:
    """Segments that do not follow the one before in the same request: indices of these, the steps between, and which were lost."""
    same = segments.row[1:] == segments.row[:-1]
    lost = segments.phase[1:] == RECOMPUTE
    pair = np.flatnonzero(same & (lost | (segments.low[1:] > segments.high[:-1])))
    return pair, segments.high[pair], segments.low[pair + 1], lost[pair]


def seated_elsewhere(segments: Segments, table: StepTable) -> Floats:
    """Sequences that keep a seat but are not in the step, by step: a tool at work, a prompt that got no tokens."""
    _, low, high, lost = _apart(segments)
    change = np.bincount(low[~lost], minlength=len(table) + 1) - np.bincount(high[~lost], minlength=len(table) + 1)
    return np.cumsum(change)[: len(table)].astype(np.float64)


def between_steps(segments: Segments, before: Bools, table: StepTable, rows: int) -> tuple[Floats, Floats]:
    """[scheduler, other] seconds between steps of a request that follow each other, before and after the first token.

    At most: what passes between its last chunk and the next step comes partly before the token is noted, partly after; it is told
    on both sides, and each takes what it lacks.
    """
    scheduling = np.minimum(np.append(table.schedule_s[1:], 0.0), table.gap_s)
    each = np.stack((scheduling, table.gap_s - scheduling))
    inside = RunningSum.of(each).between(segments.low, segments.high - 1)
    after = each[:, segments.high - 1]
    same = segments.row[1:] == segments.row[:-1]
    follows = np.append(same & (segments.low[1:] == segments.high[:-1]), False)
    closes = before & np.append(~same | ~before[1:], True)  # the last run before the first token

    def summed(chosen: Bools, linked: Bools) -> Floats:
        seconds = np.where(chosen, inside, 0.0) + np.where(linked, after, 0.0)
        return np.stack([np.bincount(segments.row, weights=one, minlength=rows) for one in seconds])

    return summed(before, before & (follows | closes)), summed(~before, follows & (~before | closes))
