"""Phases of requests booked to causes where no steps tell: what others did at the same time comes from the overlap of requests, what
the engine looked like from its samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phasewise.analyzer.booked import Booked
from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.decoding import clean_tpot_s, interference_s, preempted_s
from phasewise.analyzer.intervals import Bools, Floats, Steps, level, or_zero, own_share_s, valid
from phasewise.analyzer.overlaps import Overlaps
from phasewise.analyzer.queueing import REASONS, Samples, slot_limit, tells_reasons, wait_reasons
from phasewise.analyzer.steady import DecodeSplit
from phasewise.collector.context import Setting

HOUR_S = 3600.0
SATURATED_RATIO = 0.9  # of the busy time spent prefilling: the engine has no room for more prompts
FRONTEND_COVERS = ("C,F", "C", "F")
PREFILL_COVERS = ("P", "P,F", "C,P,F", "C,P")
PHASES = ("queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s")
_STATED = {
    "queue_slot_s": "queue.slots",
    "queue_kv_s": "kv.wait",
    "queue_budget_s": "queue.budget",
    "queue_window_s": "queue.window",
    "queue_policy_s": "queue.policy",
    "queue_upstream_s": "queue.upstream",
}


def known_s(values: Floats) -> Floats:
    """Negative and unknown count as nothing; what they hide lands in the residual."""
    return np.fmax(values, 0.0)


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
    for reason in REASONS:
        cause = "queue.capacity" if saturated and reason in ("queue.slots", "queue.budget") else reason
        part = np.divide(or_zero(reasons[reason]), total, out=np.zeros_like(total), where=total > 0)
        unplaced = (total <= 0) & (reason == "unexplained")
        booked.add(cause, left * np.where(unplaced, 1.0, part))


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


def book_prefill(booked: Booked, rows: Rows, around: Overlaps) -> None:
    """Of each prefill what its own tokens took of the steps it shared with other prompts; the rest is theirs."""
    prefill = known_s(rows["prefill_s"])
    start, end = rows["scheduled_unix_ns"], rows["first_token_unix_ns"]
    end = np.where(np.isfinite(prefill), np.minimum(end, start + prefill), end)
    uncached = rows["input_tokens"] - or_zero(rows["cached_tokens"])
    together = around.siblings.counts(len(rows)) if around.siblings.groups else 1.0
    own = np.minimum(own_share_s(start, end, uncached / together) * together, end - start)
    share = np.divide(own, end - start, out=np.ones_like(prefill), where=valid(start, end))
    prefill, share = rows.chosen(prefill), rows.chosen(share)
    share = np.where(np.isnan(share), 1.0, share)
    booked.add("prefill.compute", prefill * share)
    booked.add("interference", prefill * (1.0 - share))


def book_decode(booked: Booked, rows: Rows, samples: Samples, around: Overlaps, split: DecodeSplit) -> None:
    """Decoding by clean steps, others' prefill and preemption, calibrated on all requests that end in one clock hour."""
    hour = np.floor(rows["finished_unix_ns"] / HOUR_S + rows.origin_unix_ns / 1e9 / HOUR_S)
    asked = rows.chosen(hour)
    inside = slice(_run(hour, asked[0]).start, _run(hour, asked[-1]).stop)  # all hours that targets end in
    hour, start, end = hour[inside], rows["first_token_unix_ns"], rows["finished_unix_ns"]
    decode = known_s(rows["decode_s"][inside])
    gaps = or_zero(rows["output_tokens"][inside] - 1)
    overlap = around.others_prefill_s(inside, start, end)
    preempting = _preempting(samples, start[inside], end[inside], rows["preemptions"][inside])
    clean = {
        one: clean_tpot_s(decode[here], gaps[here], overlap[here], bool(preempting[here].any()))
        for one in np.unique(asked).tolist()
        for here in (_run(hour, one),)
    }
    if rows.target is not None:
        picked = rows.target - inside.start
        decode, gaps, overlap, preempting = decode[picked], gaps[picked], overlap[picked], preempting[picked]
    others, lost = np.empty(len(asked)), np.empty(len(asked))
    for one, clean_s in clean.items():
        mine = _run(asked, one)
        others[mine] = interference_s(decode[mine], gaps[mine], overlap[mine], clean_s)
        lost[mine] = preempted_s(decode[mine], gaps[mine], others[mine], clean_s, preempting[mine])
    booked.add("interference", others)
    booked.add("kv.preempt", lost)
    for cause, share in split.shares(decode - others - lost, gaps).items():
        booked.add(cause, share)


def _run(ascending: Floats, value: float) -> slice:
    """Where a value stands."""
    low, high = (int(np.searchsorted(ascending, value, side=side)) for side in ("left", "right"))
    return slice(low, high)


def _preempting(samples: Samples, start: Floats, end: Floats, preemptions: Floats) -> Bools:
    """Requests in whose decode the engine's preemption counter moved, or that say so themselves."""
    own = or_zero(preemptions) > 0
    moved = samples.hold(or_zero(samples.preempted) > 0)
    return np.asarray(own if not len(moved.time) else own | (or_zero(moved.integral(start, end)) > 0))
