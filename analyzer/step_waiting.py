"""Why requests waited, from the steps that ran meanwhile: what the engine states, and what its batch looked like.

A stated wait for a slot is one of three. Seats that a static batch keeps for sequences that have ended are empty ones. Where all
seats are used, a larger batch serves more per second only as far as its steps do not grow in proportion and the KV pool holds
it: if not, the engine is at its capacity and a slot would not help.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.composition import Chunks
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.step_table import REASONS, Ints, RunningSum, StepTable
from phasewise.analyzer.step_times import StepTimes

LARGER = 2.0  # the batch that is asked about, as a multiple of the one that ran
GAIN_RATIO = 0.05  # more requests per second than now, to call it worth a slot
QUEUES = (
    "queue.slots",
    "queue.capacity",
    "queue.empty_slots",
    "queue.budget",
    "queue.window",
    "queue.policy",
    "kv.wait",
)
_CAUSE = {
    "slot": "queue.slots",
    "kv": "kv.wait",
    "budget": "queue.budget",
    "window": "queue.window",
    "policy": "queue.policy",
}
CLOCK_S = 0.002  # beyond the step that ran at arrival by this: still that step


@dataclass(frozen=True, slots=True)
class Waits:
    """m requests' seconds in the queue. by_cause: by QUEUES; step_s: the wait for the step that ran at arrival to end, `step` its
    index (-1: none ran); idle_s: waited while nothing ran; unexplained_s: the rest."""

    by_cause: Floats
    step_s: Floats
    step: Ints
    idle_s: Floats
    unexplained_s: Floats


@dataclass(frozen=True, slots=True)
class Waiter:
    """m requests. queued, scheduled: moments; queue_s: seconds, at least 0; stated: [reasons, m] seconds, 0 where the engine
    names none; returned: [reasons, m] of these, waits after a preemption, which are not in queue_s."""

    queued: Floats
    scheduled: Floats
    queue_s: Floats
    stated: Floats
    returned: Floats


def waits(table: StepTable, times: StepTimes, vacant: Floats, who: Waiter) -> Waits:
    """What is stated is taken first; of the rest, the step that ran at arrival; of what is still left, what the steps' own counts
    of waiting sequences say. vacant: 1 in steps with a seat that nobody sits on."""
    queued, scheduled, queue_s = who.queued, who.scheduled, who.queue_s
    over = np.clip(who.stated.sum(axis=0) - queue_s, 0.0, None)
    later = np.minimum(who.returned, who.stated)
    part = np.divide(over, later.sum(axis=0), out=np.zeros_like(over), where=later.sum(axis=0) > 0)
    stated = who.stated - later * np.minimum(part, 1.0)
    total = stated.sum(axis=0)
    stated = stated * np.divide(queue_s, total, out=np.ones_like(total), where=total > queue_s)
    rest = np.clip(queue_s - stated.sum(axis=0), 0.0, None)
    step = table.at(queued)
    running = (step >= 0) & (queued < np.append(table.end, -np.inf)[step])
    left = np.where(running, np.append(table.end + table.gap_s, 0.0)[step] - queued, 0.0)
    step_s = np.where(running, np.where(rest <= left + CLOCK_S, rest, left), 0.0)
    rest = rest - step_s
    low = np.clip(step + 1, 0, len(table))
    high = np.clip(table.at(scheduled - CLOCK_S) + 1, 0, len(table))
    counted, covered = _counted(table, low, high)
    known = covered.sum(axis=0) > 0
    stated = stated + np.where(known, rest * counted, 0.0)
    rest = np.where(known, 0.0, rest)
    idle = np.where(~running & (high <= low), rest, 0.0)
    by_cause = np.zeros((len(QUEUES), len(queue_s)))
    for reason, seconds in zip(REASONS, stated, strict=True):
        by_cause[QUEUES.index(_CAUSE[reason])] += seconds
    slots, capacity, empty = _slots(table, times, vacant, by_cause[0], low, high)
    by_cause[0], by_cause[1], by_cause[2] = slots, capacity, empty
    return Waits(by_cause, step_s, np.where(running, step, -1), idle, rest - idle)


def _counted(table: StepTable, low: Ints, high: Ints) -> tuple[Floats, Floats]:
    """Shares of the reasons that sequences were waiting for over runs of steps, [reasons, m]: each step counts by its time. And
    the seconds they rest on."""
    count = np.nan_to_num(table.waiting)
    if not count.any():
        return np.zeros((len(REASONS), len(low))), np.zeros((len(REASONS), len(low)))
    all_waiting = count.sum(axis=0)
    share = np.divide(count, all_waiting, out=np.zeros_like(count), where=all_waiting > 0)
    seconds = RunningSum.of(share * table.cycle_s).between(low, high)
    total = seconds.sum(axis=0)
    return np.divide(seconds, total, out=np.zeros_like(seconds), where=total > 0), seconds


def _slots(
    table: StepTable, times: StepTimes, vacant: Floats, wait: Floats, low: Ints, high: Ints
) -> tuple[Floats, Floats, Floats]:
    """Waits for a slot divided into slots, capacity and empty seats, by the steps of [low, high) in which sequences wait for one;
    of requests that meet none, by all such steps."""
    if not wait.any():
        return wait, wait, wait
    asked = np.nan_to_num(table.waiting[REASONS.index("slot")]) > 0
    if not asked.any():
        asked = np.ones(len(table), dtype=np.bool_)
    weight = asked * table.cycle_s
    room = np.where(np.isfinite(table.kv_ratio) & (table.kv_ratio > 0), 1.0 / np.fmax(table.kv_ratio, 1e-9), LARGER)
    columns = np.stack(
        (weight, weight * vacant, asked * times.regular, asked * times.fixed, weight * np.clip(room, 1.0, LARGER))
    )
    columns = np.where(np.isfinite(columns), columns, 0.0)
    sums = RunningSum.of(columns).between(low, high)
    sums = np.where(sums[0] > 0, sums, columns.sum(axis=1)[:, None])
    seconds, empty_s, regular, fixed, roomy = sums
    whole = np.maximum(seconds, 1e-300)
    empty = wait * np.clip(empty_s / whole, 0.0, 1.0)
    worth = gain_ratio(fixed / np.maximum(regular, 1e-300), roomy / whole) >= GAIN_RATIO
    full = wait - empty
    return np.where(worth, full, 0.0), np.where(worth, 0.0, full), empty


def gain_ratio(fixed_share: Floats, larger: Floats) -> Floats:
    """Requests per second gained by a batch `larger` times the one that runs, when fixed_share of a step does not grow with it:
    larger / (fixed + larger * (1 - fixed)) - 1. Arrivals are taken to fill it."""
    fixed = np.clip(fixed_share, 0.0, 1.0)
    return larger / (fixed + larger * (1.0 - fixed)) - 1.0


def vacant_steps(table: StepTable, chunks: Chunks, elsewhere: Floats) -> Floats:
    """1 in steps with a seat that nobody sits on. elsewhere: sequences with a seat that are not in the step.

    `running` may be counted after the step, when those that ended in it are gone: who was in the step counts too.
    """
    prompts = np.bincount(chunks.step, minlength=len(table)).astype(np.float64)
    inside = table.sequences + np.maximum(prompts, table.prefill_tokens > 0) + elsewhere
    seated = np.fmax(inside, np.nan_to_num(table.running))
    return np.asarray(np.nan_to_num(table.slots_reserved) > seated + 0.5, dtype=np.float64)
