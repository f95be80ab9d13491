"""Attribution for engines that send steps: every second of a request booked by what the steps it passed through were made of.

A run of decode steps costs two look-ups in prefix sums; only the steps of a request's own prompt are looked at one by one.
Between the runs of one request lie waits: for blocks after a preemption, for others' prompts that took the step's tokens, for a
tool. Phases (queue, prefill, decode) are the request's own figures; the parts found for each are made to add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.composition import (
    DECODE,
    Chunks,
    Segments,
    covered_rows,
    read_chunks,
    read_segments,
)
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.intervals import Bools, Floats
from phasewise.analyzer.machine import Machine, machine
from phasewise.analyzer.step_gaps import TURNS, Gaps, between_steps, gaps_of, seated_elsewhere
from phasewise.analyzer.step_parts import PARTS
from phasewise.analyzer.step_table import REASONS, Ints, RunningSum, StepTable, range_max, read_tables
from phasewise.analyzer.step_times import CAUSES as STEP_CAUSES
from phasewise.analyzer.step_times import StepTimes, own_prefill, step_times
from phasewise.analyzer.step_waiting import QUEUES, Waiter, vacant_steps, waits
from phasewise.collector.context import Context
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import CAUSES

COVERED_RATIO = 0.9  # of a request's steps must be in sight
# In a prefill the request's own phase names the resource (architecture section 5).
_PREFILL_CAUSE = {
    "compute": "prefill.compute", "weights": "decode.weights", "kv": "prefill.attention_io",
    "attention_io": "prefill.attention_io", "host": "host", "communication": "communication.node",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stepwise:
    """Rows of requests booked by their steps. booked: seconds by cause of queue, prefill and decode, 0 where a row is not chosen;
    early: those of queue and prefill alone; outside_s: external time after the first token; measured_s: seconds that no fit
    divided; the others are columns of `requests`, NaN where unknown."""

    chosen: Bools
    booked: Mapping[str, Floats]
    early: Mapping[str, Floats]
    outside_s: Floats
    measured_s: Floats
    decode_batch_mean: Floats
    kv_usage_admission_ratio: Floats
    kv_usage_peak_ratio: Floats


@dataclass(frozen=True, slots=True)
class Met:
    """What the targets met in the steps of one instance, for whoever asks whose prompts these were (`interference_steps`).

    own: all rows that may have run there; told: those whose steps are in sight; covered: targets that are booked by them. everyone: chunks of all rows; chunks,
    segments, gaps: of the targets, with their place among these as row; before: segments before the first token. turns: waits for the
    step that ran when the wait began, as (target, step, seconds); booked: seconds of `interference` by phase, one figure a target.
    """

    table: StepTable
    times: StepTimes
    own: Bools
    told: Bools
    covered: Bools
    everyone: Chunks
    chunks: Chunks
    segments: Segments
    before: Bools
    gaps: Gaps
    turns: Mapping[str, tuple[Ints, Ints, Floats]]
    booked: Mapping[str, Floats]


def book_steps(
    context: Context, model: str | None, rows: Rows, rulebook: Rulebook, met: list[Met] | None = None
) -> Stepwise | None:
    """Books queue, prefill and decode of every target whose steps are in sight; None where no request has any.

    rows: of `context.requests`; model: what most of them name. What steps were made of and how long they take is found from all of these.
    met: what the targets met is added to it, an entry an instance.
    """
    if context.steps.is_empty() or context.requests["segments"].null_count() == len(rows):
        return None
    tables = read_tables(context.steps, rows.origin_unix_ns)
    built = machine(context.settings, model, rulebook)
    ledger = _Ledger(rows.targets)
    any_covered = False
    for name, table in tables.items():
        own = np.ones(len(rows), dtype=np.bool_)
        if len(tables) > 1:  # else several processes may be one replica, and one of them has the steps
            own = (rows.series("instance") == name).fill_null(False).to_numpy()
        any_covered |= _book_instance(ledger, table, own, rows, built, met)
    if not any_covered:
        return None
    return Stepwise(
        ledger.chosen,
        ledger.part,
        ledger.early.part,
        ledger.outside,
        ledger.measured,
        ledger.batch,
        ledger.admission,
        ledger.peak,
    )


class _Phase:
    """Seconds by cause of one phase of all targets, while they are added up; a cause that nothing is booked to is not there."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.part: dict[str, Floats] = {}
        self.measured = np.zeros(rows)

    def add(self, cause: str, row: Ints, seconds: Floats, *, measured: bool = False) -> None:
        if not seconds.any():
            return
        one = np.bincount(row, weights=seconds, minlength=self.rows).astype(np.float64, copy=False)
        self.put(cause, one)
        if measured:
            self.measured = self.measured + one

    def put(self, cause: str, seconds: Floats) -> None:
        """Adds one figure a row."""
        self.part[cause] = self.part[cause] + seconds if cause in self.part else seconds

    def add_step(self, row: Ints, step: Ints, seconds: Floats, times: StepTimes) -> None:
        """Waits for a step to end, by what that step was made of."""
        if not len(row):
            return
        filled = [k for k in range(len(STEP_CAUSES)) if times.by_cause[k].any()]
        whole = {k: times.by_cause[k][step] for k in filled}
        total = sum(whole.values(), start=np.zeros(len(step)))
        for k, one in whole.items():
            share = np.divide(one, total, out=np.zeros_like(one), where=total > 0)
            self.add(STEP_CAUSES[k], row, share * seconds)
        self.add("host", row, np.where(total > 0, 0.0, seconds))

    def close(self, length: Floats, between: Floats) -> None:
        """Makes the parts add up to `length`. What is missing passed between the steps ([scheduler, other] seconds), the rest of
        it is unexplained; what is too much is taken from all parts alike."""
        total = sum((self.part[cause] for cause in CAUSES if cause in self.part), start=np.zeros(self.rows))
        missing, available = np.clip(length - total, 0.0, None), between.sum(axis=0)
        used = np.divide(np.minimum(missing, available), available, out=np.zeros(self.rows), where=available > 0)
        factor = np.divide(length, total, out=np.ones(self.rows), where=total > length)
        self.part = {cause: seconds * factor for cause, seconds in self.part.items()}
        self.measured = self.measured * factor + between[0] * used
        self.put("host.scheduler", between[0] * used)
        self.put("host", between[1] * used)
        self.put("unexplained", np.clip(missing - available, 0.0, None))


class _Ledger(_Phase):
    """All phases together, and which rows they speak for."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.chosen = np.zeros(rows, dtype=np.bool_)
        self.early = _Phase(rows)
        self.outside = np.zeros(rows)
        self.batch, self.admission, self.peak = (np.full(rows, np.nan) for _ in range(3))

    def take(self, phase: _Phase, covered: Bools, *, early: bool) -> None:
        whole = bool(covered.all())
        for into in (self, self.early) if early else (self,):
            for cause, seconds in phase.part.items():
                into.put(cause, seconds if whole else np.where(covered, seconds, 0.0))
            into.measured = into.measured + np.where(covered, phase.measured, 0.0)


def _book_instance(
    ledger: _Ledger, table: StepTable, own: Bools, rows: Rows, built: Machine, met: list[Met] | None
) -> bool:
    """Whether any request has its steps in this table."""
    everyone = read_segments(rows.series("segments"), own, table)
    inside = covered_rows(everyone, table, rows["arrival_unix_ns"], rows["finished_unix_ns"], COVERED_RATIO)
    everyone = everyone.where(inside[everyone.row] & (everyone.high > everyone.low))
    covered = rows.chosen(inside)
    if not covered.any():
        return bool(inside.any())
    all_chunks = read_chunks(everyone, table, rows["input_tokens"], rows["cached_tokens"])
    times = step_times(table, all_chunks, built)
    vacant = vacant_steps(table, all_chunks, seated_elsewhere(everyone, table))
    segments, chunks = everyone, all_chunks
    if rows.target is not None:
        place = np.full(len(rows), -1)
        place[rows.target] = np.arange(len(rows.target))
        segments, chunks = everyone.placed(place), all_chunks.placed(place)
    before = _before_first(segments)
    prefill, decode = _Phase(ledger.rows), _Phase(ledger.rows)
    _book_decoding(decode, segments, times)
    _book_chunks(prefill, decode, segments, before, chunks, times, table)
    decode_s = _known(rows.own("decode_s"))
    wall = _known(rows.own("finished_unix_ns") - rows.own("first_token_unix_ns"))
    ledger.outside = np.where(covered, np.clip(wall - decode_s, 0.0, None), ledger.outside)
    external = _book_delivery(decode, segments, table, rows.own("finished_unix_ns"), wall, decode_s)
    gaps = gaps_of(segments, before, table, external)
    after_tools = _book_gaps(prefill, decode, gaps, times, external)
    early, late = between_steps(segments, before, table, ledger.rows)
    prefill.close(_known(rows.own("prefill_s")), early)
    decode.close(decode_s, late)
    ledger.take(prefill, covered, early=True)
    ledger.take(decode, covered, early=False)
    queue, arrived = _queue(covered, rows, table, times, vacant, gaps)
    ledger.take(queue, covered, early=True)
    _surroundings(ledger, segments, table)
    if met is not None:
        phases = {"queue": queue, "prefill": prefill, "decode": decode}
        nothing = np.zeros(ledger.rows)
        booked = {name: phase.part.get("interference", nothing) for name, phase in phases.items()}
        turns = {"queue": arrived, "decode": after_tools}
        met.append(Met(table, times, own, inside, covered, all_chunks, chunks, segments, before, gaps, turns, booked))
    ledger.chosen |= covered
    return True


def _known(values: Floats) -> Floats:
    return np.clip(np.nan_to_num(values), 0.0, None)


def _before_first(segments: Segments) -> Bools:
    """Which segments lie before the first token: those before the first that decodes."""
    decoding = (segments.phase == DECODE).astype(np.int64)
    seen = np.cumsum(decoding)
    starts = np.flatnonzero(segments.opens)
    base = np.repeat((seen - decoding)[starts], np.diff(np.append(starts, len(segments.row))))
    return np.asarray(seen - base == 0, dtype=np.bool_)


def _book_decoding(decode: _Phase, segments: Segments, times: StepTimes) -> None:
    own = segments.where(segments.phase == DECODE)
    for cause, seconds in zip(STEP_CAUSES, times.by_cause, strict=True):
        if seconds.any():
            (total,) = RunningSum.of(seconds[None]).between(own.low, own.high)
            decode.add(cause, own.row, total)


def _book_chunks(
    prefill: _Phase, decode: _Phase, segments: Segments, before: Bools, chunks: Chunks, times: StepTimes,
    table: StepTable,
) -> None:  # fmt: skip
    """Steps of the request's own prompt; all of a step that computes again what a preemption lost is lost to it."""
    prompts = segments.phase != DECODE
    early = np.repeat(before[prompts], (segments.high - segments.low)[prompts])
    others, rest = own_prefill(table, times, chunks)
    excess, cold = times.excess[chunks.step], times.cold[chunks.step]
    for phase, inside in ((prefill, early), (decode, ~early)):
        again = inside & chunks.recompute
        phase.add("kv.preempt", chunks.row[again], table.duration[chunks.step[again]], measured=True)
        first = inside & ~chunks.recompute
        row = chunks.row[first]
        phase.add("interference", row, others[first])
        phase.add("cold_start", row, np.where(cold, excess, 0.0)[first])
        phase.add("host", row, np.where(cold, 0.0, excess)[first])
        for part, seconds in zip(PARTS, rest, strict=True):
            phase.add(_PREFILL_CAUSE[part], row, seconds[first])


def _book_delivery(
    decode: _Phase, segments: Segments, table: StepTable, finished: Floats, wall: Floats, decode_s: Floats
) -> Floats:
    """What follows a request's last step is its delivery, as far as no tool lies there; returns the external time that must lie
    before, inside the decode. The request states its decode without it. wall: seconds from the first token to the end."""
    external = np.clip(wall - decode_s, 0.0, None)
    closes = np.flatnonzero(np.append(segments.row[1:] != segments.row[:-1], True))
    row = segments.row[closes]
    after = np.clip(finished[row] - table.end[segments.high[closes] - 1], 0.0, wall[row])
    tool = np.minimum(after, external[row])
    decode.add("host", row, after - tool)
    external[row] -= tool
    return external


def _book_gaps(
    prefill: _Phase, decode: _Phase, gaps: Gaps, times: StepTimes, external: Floats
) -> tuple[Ints, Ints, Floats]:
    """Returns what was waited for a step after a tool: (target, step, seconds)."""
    for phase, inside in ((prefill, gaps.early), (decode, ~gaps.early)):
        for cause, chosen in (("kv.wait", gaps.for_blocks), ("queue.policy", ~gaps.for_blocks)):
            one = inside & gaps.lost & chosen
            phase.add(cause, gaps.row[one], gaps.wall_s[one], measured=True)
        one = inside & ~gaps.lost & ~gaps.tool
        for cause, share in zip(TURNS, gaps.turn_share, strict=True):
            phase.add(cause, gaps.row[one], (gaps.wall_s * share)[one], measured=True)
    # Beyond the tool's own time such a gap is the wait for the step that ran when it ended.
    row, last, wall = gaps.row[gaps.tool], gaps.high[gaps.tool] - 1, gaps.wall_s[gaps.tool]
    in_gaps = np.bincount(row, weights=wall, minlength=len(external))
    left = np.clip(in_gaps - external, 0.0, None)
    share = np.divide(left, in_gaps, out=np.zeros_like(left), where=in_gaps > 0)
    waited = wall * share[row]
    decode.add_step(row, last, waited, times)
    return row, last, waited


def _queue(
    covered: Bools, rows: Rows, table: StepTable, times: StepTimes, vacant: Floats, gaps: Gaps
) -> tuple[_Phase, tuple[Ints, Ints, Floats]]:
    """The waits, and those of them for the step that ran at arrival: (target, step, seconds)."""
    row = np.flatnonzero(covered).astype(np.int64)
    stated = np.stack([_known(rows.own(f"queue_{reason}_s")[row]) for reason in REASONS])
    returned = np.zeros((len(REASONS), len(covered)))
    for reason, why in (("kv", gaps.for_blocks), ("policy", ~gaps.for_blocks)):
        again = gaps.lost & why
        returned[REASONS.index(reason)] = np.bincount(
            gaps.row[again], weights=gaps.wall_s[again], minlength=len(covered)
        )
    who = Waiter(
        queued=rows.own("queued_unix_ns")[row],
        scheduled=rows.own("scheduled_unix_ns")[row],
        queue_s=_known(rows.own("queue_s")[row]),
        stated=stated,
        returned=returned[:, row],
    )
    found = waits(table, times, vacant, who)
    phase = _Phase(len(covered))
    for cause, seconds in zip(QUEUES, found.by_cause, strict=True):
        phase.add(cause, row, seconds, measured=True)
    phase.add("host", row, found.idle_s)
    phase.add("unexplained", row, found.unexplained_s)
    there = found.step >= 0
    arrived = row[there], found.step[there], found.step_s[there]
    phase.add_step(*arrived, times)
    return phase, arrived


def _surroundings(ledger: _Ledger, segments: Segments, table: StepTable) -> None:
    """Mean batch while decoding, and KV use when admitted and at its highest."""
    own = segments.where(segments.phase == DECODE)
    sums = RunningSum.of(np.stack((table.duration, table.duration * table.sequences))).between(own.low, own.high)
    seconds, weighted = (np.bincount(own.row, weights=one, minlength=ledger.rows) for one in sums)
    np.divide(weighted, seconds, out=ledger.batch, where=seconds > 0)
    opens = segments.opens
    ledger.admission[segments.row[opens]] = table.kv_ratio[segments.low[opens]]
    if np.isfinite(table.kv_ratio).any():
        highest = range_max(np.nan_to_num(table.kv_ratio, nan=-np.inf), segments.low, segments.high)
        peak = np.full(ledger.rows, -np.inf)
        np.maximum.at(peak, segments.row, highest)
        known = np.isfinite(peak)
        ledger.peak[known] = peak[known]
