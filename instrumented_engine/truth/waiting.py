"""Waiting effects: one limit is lifted, everything else stays, and the engine runs anew with the same arrivals, seed and noise.

The saving is counted on the waiting of each request only: the queue, the waits after a preemption, and for the KV pool also the
time in which lost tokens were computed again. A run without a limit schedules differently, so a step number may meet another
batch than before; its noise is that of the number, which moves a request by a fraction of one step.

Two limits can hide one another: lifted alone, each only hands the wait to the other. What all lifts together save beyond the single
ones is given to the reasons the request in fact waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.recording import Floats
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS
from phasewise.instrumented_engine.truth.parts import FIRST, PARTS, TOKENS, first_token_steps, gathered
from phasewise.instrumented_engine.truth.run import Run, run

LIMITS = ("slots", "budget", "window", "policy", "kv")
REASON_OF_LIMIT = {"slots": "slot", "budget": "budget", "window": "window", "policy": "policy", "kv": "kv"}
EMPTY_SLOTS = "empty_slots"  # static batching only: the same seats, given on as soon as their sequence ends
ALL = "all"
BACKLOG_ROUNDS, BACKLOG_MOST = 8, 512  # requests of a backlog: so many for each seat, at most
_SPARE_RATIO = 0.02  # of the pool: the scheduler keeps 1 % free when somebody enters
GAIN_RATIO = 0.05  # more requests a second, to say that seats raise throughput


@dataclass(frozen=True, slots=True)
class Waits:
    """[PARTS, requests] of a run's served requests: waiting, and computing again what a preemption had lost."""

    waited_s: Floats
    recomputed_s: Floats


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds a served request would wait less, [PARTS, requests] by cause, and the reruns behind them, by lift.

    slots_raise_throughput: with twice the seats this engine serves a backlog faster.
    """

    by_cause: Mapping[str, Floats]
    reruns: Mapping[str, Run]
    slots_raise_throughput: bool


def lifted(config: EngineConfig, limit: str, factual: Run) -> EngineConfig:
    """The settings with one of LIMITS (or EMPTY_SLOTS, or ALL) gone; as large as this run's requests could ever use.

    What pools keep for their classes is policy: lifting another limit leaves it as many seats, tokens and blocks as it was.
    """
    count = len(factual.arrivals)
    tokens = [spec.prompt_tokens + (spec.stop_after_tokens or spec.max_output_tokens) for spec in factual.arrivals]
    if limit == EMPTY_SLOTS:
        return replace(config, batching="continuous")
    if limit == "slots":
        reserved = sum(share.reserved_slots for share in config.tenants.values())
        seats = max(config.max_num_seqs, count + reserved + 1)  # one more: a window ends early when all are asked for
        pools = tuple(replace(p, slot_ratio=_same(p.slot_ratio, config.max_num_seqs, seats)) for p in config.pools)
        return replace(config, batching="continuous", max_num_seqs=seats, pools=pools)
    if limit == "budget":
        budget = max(config.step_token_budget, sum(tokens) + count)
        pools = tuple(
            replace(p, budget_ratio=_same(p.budget_ratio, config.step_token_budget, budget)) for p in config.pools
        )
        return replace(
            config, step_token_budget=budget, prefill_chunk_tokens=None, max_prefill_tokens=None, pools=pools
        )
    if limit == "window":
        return replace(config, batching_window_s=0.0)
    if limit == "policy":
        return replace(config, order="fcfs", preempt_for_priority=False, tenants={}, pools=())
    if limit == "kv":
        each = [-(-total // config.block_tokens) + 1 for total in tokens]
        if config.kv_layout == "contiguous":
            each = [-(-config.max_model_tokens // config.block_tokens)] * count
        blocks = max(config.kv_blocks, round(sum(each) * (1 + _SPARE_RATIO)) + 1)
        pools = tuple(replace(p, kv_ratio=_same(p.kv_ratio, config.kv_blocks, blocks)) for p in config.pools)
        return replace(config, kv_blocks=blocks, pools=pools)
    assert limit == ALL, limit
    config = lifted(config, "policy", factual)
    for one in LIMITS:
        config = lifted(config, one, factual)
    return config


def _same(ratio: float, of: int, of_more: int) -> float:
    """The share of more that is as much as `ratio` was of less."""
    return ratio if of == of_more else int(ratio * of + 1e-9) / of_more


def held(config: EngineConfig, factual: Run) -> tuple[str, ...]:
    """The limits that were ever reached; lifting one of the others saves nobody anything. (It changes nothing at all, but that a
    batching window ends early once those who wait fill the seats: with more seats it would last longer.)"""
    steps = factual.steps
    reached = {reason: bool(steps[f"waiting_{reason}"].any()) for reason in QUEUE_REASONS}
    for one in factual.served:
        for reason, waited in zip(QUEUE_REASONS, one.waits_ns, strict=True):
            reached[reason] = reached[reason] or waited > 0
    tokens = steps["prefill_tokens"] + steps["decode_sequences"]
    policy = config.order != "fcfs" or bool(config.pools) or bool(config.tenants)
    bound = {
        "slots": reached["slot"] or bool((steps["slots_reserved"] >= config.max_num_seqs).any()),
        "budget": reached["budget"] or bool((tokens >= config.step_token_budget).any()),
        "window": config.batching_window_s > 0,
        "policy": policy,
        "kv": reached["kv"] or bool(steps["preemptions"].any()),
    }
    return tuple(limit for limit in LIMITS if bound[limit])


def waits_of(one: Run) -> Waits:
    """From the moments the engine stamped: entering the queue to first admission, preemption to the step it went on in."""
    row_of = {sequence.index: row for row, sequence in enumerate(one.served)}
    queue = np.zeros((PARTS, len(one.served)))
    for row, sequence in enumerate(one.served):
        assert sequence.scheduled_ns is not None and sequence.queued_ns is not None
        queue[FIRST, row] = (sequence.scheduled_ns - sequence.queued_ns) / 1e9
    starts = one.steps["start_ns"]
    first_token = first_token_steps(one)
    for put_back, index in one.preempted:
        loser = row_of.get(index)
        if loser is None:
            continue
        again = next((max(first, put_back) for _, first, last in one.served[loser].segments if last >= put_back), None)
        if again is not None:
            lost_in = FIRST if put_back <= first_token[loser] else TOKENS
            queue[lost_in, loser] += (starts[again] - starts[put_back]) / 1e9
    chunks = one.chunks
    lost = np.flatnonzero(chunks["recompute"] > 0)
    rows = np.array([row_of.get(int(index), -1) for index in chunks["request"][lost]], dtype=np.int64)
    lost, rows = lost[rows >= 0], rows[rows >= 0]
    step = chunks["step"][lost]
    part = np.where(step <= first_token[rows], FIRST, TOKENS).astype(np.int64)
    again_s = gathered(one, rows, part, one.steps["duration_ns"][step] / 1e9)
    return Waits(queue, again_s)


def waiting_effects(config: EngineConfig, factual: Run, seed: int) -> Waiting:
    """Each limit that was reached, lifted alone; see module docstring."""
    limits = held(config, factual)
    wanted = list(limits)
    static = config.batching == "static"
    if static and "slots" in limits:
        wanted.append(EMPTY_SLOTS)

    def without(limit: str) -> Run:
        return run(lifted(config, limit, factual), factual.law, factual.arrivals, seed)

    reruns = {limit: without(limit) for limit in wanted}
    if len(limits) > 1 or any(_still_waits(reruns[limit]) for limit in limits):
        reruns[ALL] = without(ALL)
    before = waits_of(factual)
    saved = {limit: before.waited_s - _aligned(factual, rerun) for limit, rerun in reruns.items()}
    raises = "slots" in limits and _seats_raise_throughput(config, factual, seed)
    slots_cause = "queue.slots" if raises else "queue.capacity"
    by_cause: dict[str, Floats] = {}

    def add(cause: str, seconds: Floats) -> None:
        by_cause[cause] = by_cause[cause] + seconds if cause in by_cause else seconds

    for limit in limits:
        if limit == "slots":
            empty = saved.get(EMPTY_SLOTS)
            if empty is not None:
                add("queue.empty_slots", empty)
            add(slots_cause, saved["slots"] - (empty if empty is not None else 0.0))
        elif limit == "kv":
            add("kv.wait", saved["kv"])
            add("kv.preempt", before.recomputed_s - _aligned(factual, reruns["kv"], recomputed=True))
        else:
            add(f"queue.{limit}", saved[limit])
    if ALL in reruns:
        single = sum((np.clip(saved[limit], 0.0, None) for limit in limits), start=np.zeros_like(before.waited_s))
        hidden = np.clip(saved[ALL] - single, 0.0, None)
        for limit, seconds in _by_reason(factual, limits, hidden).items():
            add({"slots": slots_cause, "kv": "kv.wait"}.get(limit, f"queue.{limit}"), seconds)
    return Waiting(by_cause, reruns, raises)


def _still_waits(rerun: Run) -> bool:
    """Whether a limit that was never reached before holds somebody, now that another is gone."""
    return any(any(one.waits_ns) for one in rerun.served)


def _aligned(factual: Run, rerun: Run, recomputed: bool = False) -> Floats:
    """The rerun's waits in the rows of the factual run; a request the rerun did not serve keeps its factual ones."""
    waits, other = waits_of(factual), waits_of(rerun)
    mine, theirs = (waits.recomputed_s, other.recomputed_s) if recomputed else (waits.waited_s, other.waited_s)
    row_of = {sequence.index: row for row, sequence in enumerate(rerun.served)}
    found = mine.copy()
    for row, sequence in enumerate(factual.served):
        there = row_of.get(sequence.index)
        if there is not None:
            found[:, row] = theirs[:, there]
    return found


def _seats_raise_throughput(config: EngineConfig, factual: Run, seed: int) -> bool:
    """Whether a backlog of the run's requests is done sooner with twice the seats.

    Asked of a backlog, since in the run itself arrivals set the throughput wherever the engine keeps up with them: a queue near
    its limit empties at once when the limit goes, and the same requests are served in the same time. A static batch is asked as
    the continuous one it could be: its empty seats are accounted for apart.
    """
    few = replace(config, batching="continuous")
    most = min(BACKLOG_MOST, BACKLOG_ROUNDS * config.max_num_seqs)
    backlog = tuple(
        replace(spec, arrival_ns=factual.arrivals[0].arrival_ns, context_ns=0, tools=())
        for spec in factual.arrivals[:most]
    )
    many = replace(few, max_num_seqs=2 * config.max_num_seqs)
    seconds = [run(one, factual.law, backlog, seed).span_s for one in (few, many)]
    return seconds[0] > (1 + GAIN_RATIO) * seconds[1]


def _by_reason(factual: Run, limits: tuple[str, ...], hidden: Floats) -> dict[str, Floats]:
    """Splits a saving by the reasons for which each request waited, those of lifted limits only."""
    waited = np.array([one.waits_ns for one in factual.served], dtype=np.float64).reshape(len(factual.served), -1)
    mine = np.array([QUEUE_REASONS.index(REASON_OF_LIMIT[limit]) for limit in limits])
    reasons = waited[:, mine]
    total = reasons.sum(axis=1, keepdims=True)
    share = np.divide(reasons, total, out=np.zeros_like(reasons), where=total > 0)
    return {limit: hidden * share[:, column] for column, limit in enumerate(limits)}
