"""Phases of requests booked to causes where no steps tell: what others did at the same time comes from the overlap of requests, what
the engine looked like from its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from phasewise.analyzer.admissions import FREE, admission_of
from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.decoding import clean_tpot_s, interference_s, preempted_s
from phasewise.analyzer.intervals import Bools, Floats, Steps, level, or_zero
from phasewise.analyzer.kernel_times import KernelTimes
from phasewise.analyzer.links import Links, divided, links_of
from phasewise.analyzer.overlaps import Overlaps, known_s
from phasewise.analyzer.queueing import REASONS, Samples, held_top, slot_limit, tells_reasons, wait_reasons
from phasewise.analyzer.stalls import stalled_s
from phasewise.analyzer.steady import DecodeSplit
from phasewise.collector.context import Setting

HOUR_S = 3600.0
SATURATED_RATIO = 0.9  # of the busy time spent prefilling: the engine has no room for more prompts
ALONE_RATIO = 0.95  # of its steps: such a prompt tells what a prompt takes
QUICK_QUANTILE = 0.25
FRONTEND_COVERS = ("C,F", "C", "F")
PREFILL_COVERS = ("P", "P,F", "C,P,F", "C,P")
PHASES = ("queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s")
_HELD_BACK = ("queue.empty_slots", "queue.window")  # by a rule of admission
_STATED = {
    "queue_slot_s": "queue.slots",
    "queue_kv_s": "kv.wait",
    "queue_budget_s": "queue.budget",
    "queue_window_s": "queue.window",
    "queue_policy_s": "queue.policy",
    "queue_upstream_s": "queue.upstream",
}


def book_waiting(
    booked: Booked, rows: Rows, settings: Mapping[str, Setting], samples: Samples, around: Overlaps
) -> None:
    """Waits by what the engine states of them, else by what was true meanwhile."""
    queue = known_s(rows.own("queue_s"))
    stated = {cause: known_s(rows.own(column)) for column, cause in _STATED.items() if rows.tells(column)}
    told: Bools | None = None
    if stated:
        told = sum(stated.values(), start=np.zeros(len(queue))) > 0
        for cause, seconds in stated.items():
            booked.add(cause, np.where(told, np.minimum(seconds, queue), 0.0))
    left = queue if told is None else np.where(told, 0.0, queue)
    if not left.any():
        return
    if not tells_reasons(settings, samples):
        booked.add("unexplained", left)
        return
    running, prefills = around.running, around.prefills
    waiting = level(rows["queued_unix_ns"], rows["scheduled_unix_ns"])
    by_spans = (None, None) if around.sampled else (running, waiting)  # too few spans tell of neither
    slots = slot_limit(settings, samples, *by_spans)
    reasons = wait_reasons(
        rows.own("queued_unix_ns"), rows.own("scheduled_unix_ns"), samples, slots, running, prefills, waiting
    )
    total = or_zero(sum((reasons[reason] for reason in REASONS), start=np.zeros(len(queue))))
    saturated = prefill_bound(running, prefills)
    admission = FREE if around.sampled else admission_of(*_admitted(rows), _usual_step_s(rows))
    if admission.kind != "free":
        _hold_back(reasons, admission.kind, running, slots.value, rows)
    for reason in (*REASONS, *_HELD_BACK):
        if reason not in reasons:
            continue
        cause = "queue.capacity" if saturated and reason in ("queue.slots", "queue.budget") else reason
        part = np.divide(or_zero(reasons[reason]), total, out=np.zeros_like(total), where=total > 0)
        unplaced = (total <= 0) & (reason == "unexplained")
        booked.add(cause, left * np.where(unplaced, 1.0, part))


def _admitted(rows: Rows) -> tuple[Floats, Floats, Floats]:
    """When each request was queued, got in and gave up its seat; the span itself ends when it is written."""
    ended = np.fmin(rows["first_token_unix_ns"] + or_zero(rows["decode_s"]), rows["finished_unix_ns"])
    return rows["queued_unix_ns"], rows["scheduled_unix_ns"], ended


def _usual_step_s(rows: Rows) -> float | None:
    gaps = rows["output_tokens"] - 1
    known = np.isfinite(rows["decode_s"]) & (gaps > 0)
    return float(np.median(rows["decode_s"][known] / gaps[known])) if known.any() else None


def _hold_back(reasons: dict[str, Floats], kind: str, running: Steps, limit: float | None, rows: Rows) -> None:
    """Gives what admission by rule took of each wait to that rule: all that neither the pool nor, but in a static batch, a lack of
    seats explains. A static batch has all its seats taken only until the first of its sequences has ended."""
    rest = reasons["queue.budget"] + reasons["unexplained"]
    reasons["queue.budget"], reasons["unexplained"] = np.zeros_like(rest), np.zeros_like(rest)
    if kind == "window":
        reasons["queue.window"] = rest
        return
    rest = rest + reasons["queue.slots"]
    top = limit if limit is not None else held_top(running)
    full = Steps(running.time, (running.value >= top - 0.5).astype(float))
    taken = or_zero(full.integral(rows.own("queued_unix_ns"), rows.own("scheduled_unix_ns")))
    reasons["queue.slots"] = np.minimum(taken, rest)
    reasons["queue.empty_slots"] = rest - reasons["queue.slots"]


def prefill_bound(running: Steps, prefills: Steps) -> bool:
    """Whether an engine prefills nearly all the time it is busy: then neither a slot nor a larger step serves more."""
    if not len(running.time):
        return False
    ends = running.time[:1], running.time[-1:]
    busy = Steps(running.time, (running.value > 0.5).astype(float)).integral(*ends)[0]
    return bool(busy > 0 and prefills.integral(*ends)[0] >= SATURATED_RATIO * busy)


def book_before_queue(booked: Booked, rows: Rows, around: Overlaps) -> None:
    """What lies before the engine marks a request queued and cannot be split ({C,F} of vLLM): the part that others' prefill
    covers is waiting for their step to end; the rest is the frontend.

    {C,F} is a difference of two clocks: it holds the delivery of the first token, during which the engine's own clock is
    decoding already. Where the phases add up to more than end to end, that delivery is counted twice and is taken out here.
    """
    if not rows.tells("combined_s"):
        return
    combined = known_s(rows.own("combined_s"))
    frontend, prefill = (rows.own_is_one_of("combined_covers", names) for names in (FRONTEND_COVERS, PREFILL_COVERS))
    if frontend.any():
        phases = sum((known_s(rows.own(name)) for name in PHASES), start=np.zeros(len(combined)))
        twice = np.where(frontend, np.clip(phases - rows.own("e2e_s"), 0.0, combined), 0.0)
        combined = combined - or_zero(twice)
        which = slice(None) if rows.target is None else rows.target
        start, end = rows["arrival_unix_ns"], rows["queued_unix_ns"]
        cold = np.where(frontend, np.minimum(around.cold_s(which, start, end), combined), 0.0)
        _add_cold(booked, cold)
        combined = combined - cold
        others = np.minimum(around.others_prefill_s(which, start, end), combined)
        booked.add("interference", np.where(frontend, others, 0.0))
        booked.add("host", np.where(frontend, combined - others, 0.0))
    if not frontend.all():
        booked.add("prefill.compute", np.where(prefill, combined, 0.0))
        booked.add("unexplained", np.where(~frontend & ~prefill, combined, 0.0))


def book_context(booked: Booked, rows: Rows) -> None:
    """The work on a request before its prefill; what a tier took of it to load KV is no work on its text."""
    whole = known_s(rows.own("context_s"))
    loading: Floats = np.minimum(known_s(rows.own("kv_load_s")), whole)
    booked.add("context", whole - loading)
    if loading.any():
        booked.add("kv.load", loading)


def read_links(rows: Rows, around: Overlaps, kernels: KernelTimes | None) -> Links | None:
    """What prompts that had their steps to themselves tell of the links; None where nothing was measured of the kernels."""
    if kernels is None:
        return None
    prefill, _, _, share = around.prompts
    cold = around.cold_s(slice(None), rows["scheduled_unix_ns"], rows["first_token_unix_ns"])
    return links_of(kernels, around.uncached_tokens, prefill, (share >= ALONE_RATIO) & (cold <= 0))


def host_step_s(rows: Rows, split: DecodeSplit) -> float:
    """What a usual step takes beyond its kernels, by the quicker ones of the decodes (others had prompts beside them); 0 unknown."""
    if split.kernels is None:
        return 0.0
    gaps = rows["output_tokens"] - 1
    known = np.isfinite(rows["decode_s"]) & (gaps > 0) & np.isfinite(split.kernels.total)
    if not known.any():
        return 0.0
    over = rows["decode_s"][known] / gaps[known] - split.kernels.total[known]
    return max(float(np.quantile(over, QUICK_QUANTILE)), 0.0)


def book_prefill(booked: Booked, rows: Rows, around: Overlaps, links: Links | None, host_s: float) -> None:
    """Of each prefill what its own tokens took of the steps it shared with other prompts; the rest is theirs. Where kernels are known, its
    own part is divided: a short prompt is read weights and a waiting host more than it is computing. host_s: of one step."""
    prefill, start, end, share = around.prompts
    cold = np.minimum(around.cold_s(slice(None), start, end), prefill)
    prefill, share, cold = rows.chosen(prefill), rows.chosen(share), rows.chosen(cold)
    share = np.where(np.isnan(share), 1.0, share)
    _add_cold(booked, cold)
    prefill = prefill - cold
    mine, others = prefill * share, prefill * (1.0 - share)
    if links is not None:
        tokens = rows.chosen(around.uncached_tokens)
        parts = links.prompts(np.maximum(or_zero(tokens), 1.0))
        expected = parts.total + host_s
        scale = np.where(np.isfinite(tokens), np.minimum(mine / expected, 1.0), 0.0)
        others, exchanged = divided(others, _typical_share(rows, links, around.uncached_tokens), others=True)
        booked.add("decode.weights", parts.weights * scale)
        booked.add("communication.node", parts.links * scale + exchanged)
        booked.add("host", (parts.floors + host_s) * scale)
        mine = np.maximum(mine - (parts.weights + parts.links + parts.floors + host_s) * scale, 0.0)
    booked.add("prefill.compute", mine)
    booked.add("interference", others)


def _typical_share(rows: Rows, links: Links, tokens: Floats) -> Floats:
    """The part of all prompts' seconds that is the links': whose prompts ran beside a request is not asked."""
    known = np.isfinite(tokens) & (rows["prefill_s"] > 0)
    if not known.any():
        return np.zeros(rows.targets)
    seconds = rows["prefill_s"][known]
    mean = math.fsum(links.share(tokens[known]) * seconds) / math.fsum(seconds)
    return np.full(rows.targets, mean)


def _add_cold(booked: Booked, seconds: Floats) -> None:
    if seconds.any():
        booked.add("cold_start", seconds)


def book_decode(
    booked: Booked, rows: Rows, samples: Samples, around: Overlaps, split: DecodeSplit, links: Links | None
) -> Floats:
    """Decoding by first steps of a process, clean steps, others' prefill, preemption and stalls of its own, calibrated on all requests
    that end in one clock hour. split: of all rows. The answer: seconds of each target's own stalls."""
    hour = np.floor(rows["finished_unix_ns"] / HOUR_S + rows.origin_unix_ns / 1e9 / HOUR_S)
    asked = rows.chosen(hour)
    inside = slice(_run(hour, asked[0]).start, _run(hour, asked[-1]).stop)  # all hours that targets end in
    hour, start, end = hour[inside], rows["first_token_unix_ns"], rows["finished_unix_ns"]
    decode = known_s(rows["decode_s"][inside])
    cold = np.minimum(around.cold_s(inside, start, end), decode)
    decode = decode - cold
    gaps = or_zero(rows["output_tokens"][inside] - 1)
    overlap = np.minimum(around.others_prefill_s(inside, start, end), np.where(cold > 0, decode, np.inf))
    preempting = _preempting(samples, start[inside], end[inside], rows["preemptions"][inside])
    others, lost, stalled = np.zeros(len(hour)), np.zeros(len(hour)), np.zeros(len(hour))
    batch = around.batch_of(inside)
    usual = None if split.kernels is None else split.kernels.total[inside]
    for one in np.unique(asked).tolist():
        here = _run(hour, one)
        clean_s = clean_tpot_s(decode[here], gaps[here], overlap[here], bool(preempting[here].any()))
        others[here] = interference_s(decode[here], gaps[here], overlap[here], clean_s)
        lost[here] = preempted_s(decode[here], gaps[here], others[here], clean_s, preempting[here])
        steady = decode[here] - others[here] - lost[here]
        chosen = ~preempting[here] & (cold[here] <= 0)
        stalled[here] = stalled_s(steady, gaps[here], batch[here], None if usual is None else usual[here], chosen)
    if rows.target is not None:
        picked = rows.target - inside.start
        decode, gaps, cold = decode[picked], gaps[picked], cold[picked]
        others, lost, stalled = others[picked], lost[picked], stalled[picked]
    _add_cold(booked, cold)
    if stalled.any():
        booked.add("unexplained", stalled)
    steady, exchanged = decode - others - lost - stalled, np.zeros(len(decode))
    if links is not None:
        others, exchanged = divided(others, _typical_share(rows, links, around.uncached_tokens), others=True)
    booked.add("interference", others)
    booked.add("kv.preempt", lost)
    for cause, share in split.part(rows).shares(steady, gaps).items():
        booked.add(cause, share + exchanged if cause == "communication.node" else share)
    return stalled


def _run(ascending: Floats, value: float) -> slice:
    """Where a value stands."""
    low, high = (int(np.searchsorted(ascending, value, side=side)) for side in ("left", "right"))
    return slice(low, high)


def _preempting(samples: Samples, start: Floats, end: Floats, preemptions: Floats) -> Bools:
    """Requests in whose decode the engine's preemption counter moved, or that say so themselves."""
    own = or_zero(preemptions) > 0
    moved = samples.hold(or_zero(samples.preempted) > 0)
    return np.asarray(own if not len(moved.time) else own | (or_zero(moved.integral(start, end)) > 0))
