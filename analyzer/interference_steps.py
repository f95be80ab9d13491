"""Whose prompts took the time that requests lost, from the steps of their engine: who was in each step is the engine's own word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phasewise.analyzer.blame import Axis, Losses, Prompts, running
from phasewise.analyzer.composition import DECODE
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.intervals import Bools, Floats, or_zero, rates, valid
from phasewise.analyzer.step_gaps import TURNS
from phasewise.analyzer.step_table import Ints
from phasewise.analyzer.step_times import CAUSES, own_prefill, prompt_costs
from phasewise.analyzer.stepwise import Met

PARTS = (
    "front",
    "queue",
    "prefill",
    "decode",
)  # of a request, each divided by itself: their seconds were closed one by one
_DECODING, _BETWEEN, _ONE = range(3)  # kinds of density: a step's others' prompts, a step that held a prompt, a second


def step_axis(met: Met, rows: Rows, seen: Bools, asked: Floats) -> Axis:
    """Cells are the steps. seen: all rows whose steps are in sight anywhere; asked: [parts, targets] booked seconds."""
    target = np.arange(len(rows)) if rows.target is None else rows.target
    cost, hidden = prompt_costs(met.table, met.times, met.everyone)
    prompts, nobody = _prompts(met, rows, seen, cost, hidden)
    lost = met.times.by_cause[CAUSES.index("interference")]
    held = met.table.cycle_s * (met.table.prefill_tokens > 0)
    density = np.stack((lost, held, np.ones(len(lost))))
    decoding, between, turns = _decoding(met), _between(met, held), _turns(met, lost)
    place = np.full(len(rows), -1)
    place[target] = np.arange(len(target))
    own = np.flatnonzero(place[met.everyone.row] >= 0)  # where the targets' chunks stand among all
    chunks, which = _chunks(met, own, cost, hidden)
    runs = [decoding, between, turns]
    pairs = [_own(one, target, prompts) for one in runs]
    pairs.append((np.arange(len(which)), own[which]))
    runs.append(chunks)
    starts = np.cumsum([0, *(len(one.victim) for one in runs)])
    losses = Losses(*(np.concatenate([getattr(one, name) for one in runs]) for name in Losses.__slots__))
    but = (
        np.concatenate([loss + start for (loss, _), start in zip(pairs, starts[:-1], strict=True)]).astype(np.int64),
        np.concatenate([prompt for _, prompt in pairs]).astype(np.int64),
    )
    return _asked(Axis(density, nobody, prompts, losses, but), asked)


def _asked(axis: Axis, booked: Floats) -> Axis:
    """Without losses that nothing is booked to."""
    one = axis.losses
    kept = booked[one.part, one.victim] > 0
    if kept.all():
        return axis
    number = np.cumsum(kept) - 1
    still = kept[axis.but[0]]
    losses = Losses(*(getattr(one, name)[kept] for name in Losses.__slots__))
    return Axis(axis.density, axis.nobody, axis.prompts, losses, (number[axis.but[0][still]], axis.but[1][still]))


def _prompts(met: Met, rows: Rows, seen: Bools, cost: Floats, nobody: Floats) -> tuple[Prompts, Floats]:
    """Chunks as the steps tell them. Prompt tokens of no request with steps are those of requests without that were prefilled then, in
    proportion of their tokens a second; what is left is nobody's."""
    step, row = met.everyone.step, met.everyone.row
    told = np.ones(len(row), dtype=np.bool_)
    start, end = rows["scheduled_unix_ns"], rows["first_token_unix_ns"]
    unseen = np.flatnonzero(met.own & ~seen & valid(start, end))
    if not len(unseen) or not nobody.any():
        return Prompts(row, step, step + 1, cost, told), nobody
    # The steps with such tokens that end after a prompt began and begin before it ended.
    open_ = np.flatnonzero(nobody > 0)
    low = np.searchsorted(met.table.end[open_], start[unseen], side="right")
    high = np.maximum(np.searchsorted(met.table.start[open_], end[unseen], side="left"), low)
    count = high - low
    which = np.repeat(np.arange(len(unseen)), count)
    at = open_[np.repeat(low, count) + np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)]
    uncached = rows["input_tokens"] - or_zero(rows["cached_tokens"])
    rate = rates((end - start)[unseen], uncached[unseen])[which]
    total = np.bincount(at, weights=rate, minlength=len(nobody))
    share = np.divide(nobody, total, out=np.zeros_like(nobody), where=total > 0)
    left = np.where(total > 0, 0.0, nobody)
    joined = Prompts(
        np.concatenate((row, unseen[which])).astype(np.int64),
        np.concatenate((step, at)).astype(np.int64),
        np.concatenate((step, at)).astype(np.int64) + 1,
        np.concatenate((cost, rate * share[at])),
        np.concatenate((told, np.zeros(len(at), dtype=np.bool_))),
    )
    return joined, left


def _losses(victim: Ints, low: Ints, high: Ints, part: Ints | int, kind: int, scale: Floats) -> Losses:
    n = len(victim)
    parts = np.full(n, part) if isinstance(part, int) else part
    return Losses(victim, low, high, parts.astype(np.int64), np.full(n, kind, dtype=np.int64), scale)


def _decoding(met: Met) -> Losses:
    own = met.segments.where(met.segments.phase == DECODE)
    return _losses(own.row, own.low, own.high, PARTS.index("decode"), _DECODING, np.ones(len(own.row)))


def _between(met: Met, held: Floats) -> Losses:
    """Waits for its turn while others' prompts ran: the steps with a prompt in them, by their length."""
    gaps = met.gaps
    seconds = gaps.wall_s * gaps.turn_share[TURNS.index("interference")]
    some = ~gaps.lost & ~gaps.tool & (seconds > 0)
    low, high = gaps.low[some], np.maximum(gaps.high, gaps.low)[some]
    sums = running(held[None])[0]
    whole = sums[high] - sums[low]
    scale = np.divide(seconds[some], whole, out=np.zeros_like(whole), where=whole > 0)
    part = np.where(gaps.early[some], PARTS.index("prefill"), PARTS.index("decode"))
    return _losses(gaps.row[some], low, high, part, _BETWEEN, scale)


def _turns(met: Met, lost: Floats) -> Losses:
    """Waits for the step that ran when they began: what its prompts made it longer, as its decoding sequences see it."""
    whole = met.times.by_cause.sum(axis=0)
    share = np.divide(lost, whole, out=np.zeros_like(lost), where=whole > 0)
    found = []
    for name, (row, step, seconds) in met.turns.items():
        found.append(_losses(row, step, step + 1, PARTS.index(name), _ONE, seconds * share[step]))
    return Losses(*(np.concatenate([getattr(one, name) for one in found]) for name in Losses.__slots__))


def _chunks(met: Met, own: Ints, cost: Floats, hidden: Floats) -> tuple[Losses, Ints]:
    """Steps of the targets' own prompts that held others' too, and which of `own` these are. Their own tokens are left out of the
    division (`Axis.but`), so that what is left of a second has to be counted as a whole one."""
    chunks, segments = met.chunks, met.segments
    prompts = segments.phase != DECODE
    early = np.repeat(met.before[prompts], (segments.high - segments.low)[prompts])
    others, _ = own_prefill(met.table, met.times, chunks)
    total = np.bincount(met.everyone.step, weights=cost, minlength=len(met.table)) + hidden
    rest = total[chunks.step] - cost[own]
    which = np.flatnonzero(~chunks.recompute & (others > 0) & (rest > 1e-9 * total[chunks.step]))
    scale = others[which] * total[chunks.step[which]] / rest[which]
    part = np.where(early[which], PARTS.index("prefill"), PARTS.index("decode"))
    step = chunks.step[which]
    return _losses(chunks.row[which], step, step + 1, part, _ONE, scale), which


def _own(losses: Losses, target: Ints, prompts: Prompts) -> tuple[Ints, Ints]:
    """Pairs of a loss and a prompt of the same request in one of its steps: segments that contradict each other, and no request loses
    time to itself."""
    if not len(losses.victim) or not len(prompts.row):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    far = int(max(losses.high.max(), prompts.high.max())) + 1
    key = target[losses.victim] * far + losses.low
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], prompts.row * far + prompts.low, side="right") - 1
    loss = order[np.maximum(at, 0)]
    same = (at >= 0) & (target[losses.victim[loss]] == prompts.row) & (losses.high[loss] > prompts.low)
    return loss[same], np.flatnonzero(same)


def seen_anywhere(mets: Sequence[Met], rows: int) -> Bools:
    """Rows of which any engine process tells the steps."""
    found = np.zeros(rows, dtype=np.bool_)
    for met in mets:
        found |= met.told
    return found
