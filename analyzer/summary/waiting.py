"""Requests that wait for a turn: slots, step budget, replicas, overload. Queueing as long as memory is not what is short."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    given,
    memory_is_free,
    objection,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.memory import FULL_RATIO, fitting_sequences, pool_tokens, reserves_contexts
from phasewise.analyzer.summary.points import Summary, at_least, at_most, near, ratio

# A pool with this much in use did not decide how many sequences run.
_EMPTY_RATIO = 0.3
# Requests that wait although fewer than this share of the slots is taken wait for something else than a slot.
_SLOTS_TAKEN_RATIO = 0.5
KERNEL_ADVICE = (
    Tempting("weight_only_quantization", "makes each step faster; the time is spent before the first step"),
    Tempting("speculative_decoding", "acts on decode; the time is spent before the first step"),
    Tempting("kv_cache_quantization", "frees KV memory, which is not what is waited for"),
    Tempting("prefix_caching", "acts on prefill; the time is spent waiting for it to start"),
)
# The strength of what only settings suggest: too little to be named.
_SUSPICION = 0.4
OVERLOAD = ("add_replicas", "admission_control", "autoscale_on_queue_depth")


def slot_limit(summary: Summary) -> float | None:
    """Sequences the engine lets run at once: what it works with, else what was asked for."""
    return summary.count("engine.effective_max_num_seqs") or summary.count("engine.max_num_seqs")


def memory_is_short(summary: Summary, machine: Machine) -> bool:
    """The KV pool decides admission: it is full, sequences are preempted, or it holds fewer than the slots would."""
    if _derived_limit(summary, machine):
        return True
    if at_least(summary.kv_usage, FULL_RATIO) or at_least(summary.preemptions, 1):
        return True
    states, running = summary.count("engine.state_cache_slots"), summary.peak("requests_running")
    asked = summary.count("engine.max_num_seqs")
    if states and asked and states < asked and (running is None or near(running, states, 0.1)):
        return True
    fits, limit = fitting_sequences(summary, machine), slot_limit(summary)
    return fits is not None and limit is not None and fits < limit and fits < (summary.in_flight or 0.0)


def _derived_limit(summary: Summary, machine: Machine) -> bool:
    """The engine works with fewer slots than asked for, as it does when its memory is too small for all.

    Not where the pool is all but empty with every slot taken, unless it is as large as that many longest contexts: then
    memory was reserved, not used.
    """
    asked, effective = summary.count("engine.max_num_seqs"), summary.count("engine.effective_max_num_seqs")
    if not asked or not effective or effective >= asked:
        return False
    empty = at_most(summary.kv_usage, _EMPTY_RATIO) and near(summary.peak("requests_running"), effective, 0.1)
    return not empty or pool_tokens(summary, machine) is None or reserves_contexts(summary, machine)


def slots(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """More requests in flight than the engine has slots, while memory is free."""
    limit, load = slot_limit(summary), summary.in_flight
    running, waiting = summary.peak("requests_running"), summary.waiting
    if limit is None or memory_is_short(summary, machine):
        return
    at_limit = running is not None and near(running, limit, 0.1)
    if not (load is not None and load > 1.05 * limit) and not (at_limit and at_least(waiting, 1)):
        return
    over = (load or limit) / limit
    strength = 0.5 if over < 2 else 0.6 if over < 4 else 0.75
    if summary.count("engine.max_num_seqs") is None:
        strength *= 0.7  # a limit the engine works with may be one it derived from its memory
    evidence: list[Evidence] = [
        computed(
            "requests_per_slot",
            over,
            1.0,
            "ratio",
            "workload.concurrency / engine.max_num_seqs",
            "more requests in flight than slots",
        )
    ]
    if at_limit:
        strength = either(strength, 0.5)
        evidence.extend(given(summary, "requests_running", "running stands at the limit", limit))
    elif running is not None and running < 0.7 * limit:
        strength *= 0.4
        evidence.extend(objection(summary.place_of("requests_running"), "requests_running", "slots are free", limit))
    if at_least(waiting, 1):
        strength = either(strength, 0.3)
        evidence.extend(given(summary, "requests_waiting", "requests wait"))
    elif at_most(waiting, 0):
        strength *= 0.3
        evidence.extend(objection(summary.place_of("requests_waiting"), "requests_waiting", "nothing waits"))
    strength = supported(strength, evidence, 0.3, memory_is_free(summary))
    share = _waited_share(summary, over)
    if share is not None:
        strength = either(strength, 0.2)
    if summary.kv_usage is None:
        strength = min(strength, 0.8)  # a full pool would look the same
    if not at_limit and not at_least(waiting, 1) and summary.seconds("queue_p50") is None and not _felt(summary):
        strength = min(strength, _SUSPICION)  # a setting below another setting: nobody was seen to wait
    for point in summary.differing_in("engine.max_num_seqs"):
        here, there = summary.observed.throughput, point.throughput
        if near(here, there, 0.05):
            strength *= 0.4
            evidence.append(
                computed(
                    "throughput", there, here, "1/s", point.place, "another slot limit changed nothing", against=True
                )
            )
    yield Hypothesis(
        cause="queue.slots",
        mechanism="slot_limit",
        strength=min(strength, 0.95),
        sentence=f"{load or running or 0:g} requests share {limit:g} slots; the others wait for one.",
        evidence=tuple(evidence),
        techniques=("raise_max_num_seqs", "admission_control"),
        tempting=(
            *KERNEL_ADVICE,
            Tempting("raise_prefill_chunk", "shortens prefill; requests wait before prefill", over),
        ),
        symptoms=frozenset({"compute"}),
        share=share,
        phase="ttft",
    )


def _felt(summary: Summary) -> bool:
    """Some wait before the first token was measured in the engine's reach, at whatever view."""
    return summary.felt_s("ttft") is not None or summary.felt_s("e2e") is not None


def _waited_share(summary: Summary, over: float) -> float | None:
    """Share of a closed loop's request time that is waiting: with k requests a slot, (k - 1) / k of it.

    The estimate where no queue time is given; a measured one goes before it (`shares.winner_share`).
    """
    return 1 - 1 / over if over > 1 and summary.text("workload.arrival") in (None, "closed_loop", "burst") else None


def offered_above_served(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """An open loop that brings more than is served, or a queue that grows over time, with memory to spare."""
    if memory_is_short(summary, machine):
        return
    strength = 0.0
    evidence: list[Evidence] = []
    offered, done = summary.count("workload.request_rate_per_s"), summary.number("request_throughput_per_s")
    waiting = summary.waiting
    if offered and done and done < 0.9 * offered and not at_most(waiting, 0.5):
        strength = 0.5 if at_least(waiting, 1) else 0.4
        evidence.append(
            computed(
                "requests_per_s",
                done,
                offered,
                "1/s",
                "observed.request_throughput_per_s",
                "fewer are served than arrive",
            )
        )
    line = [w for p in summary.timeline if (w := p.number("requests_waiting")) is not None]
    if len(line) >= 3 and line[-1] >= 2 * max(line[0], 1.0) and all(b >= 0.9 * a for a, b in pairwise(line)):
        strength = either(strength, 0.5)
        evidence.append(
            computed(
                "requests_waiting",
                line[-1],
                line[0],
                "count",
                "timeline",
                "the queue grows through the whole observation",
            )
        )
    if at_least(summary.number("failed_requests_count"), 1) and evidence:
        evidence.extend(given(summary, "failed_requests_count", "requests fail meanwhile"))
    if not evidence:
        return
    if at_least(waiting, 1):
        strength = either(strength, 0.2)
        evidence.extend(given(summary, "requests_waiting", "requests wait"))
    strength = supported(strength, evidence, 0.3, memory_is_free(summary))
    yield _queue(summary, strength, evidence, "offered_above_served")


def engine_queue(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The engine itself reports waiting as the larger part of the time to first token."""
    if memory_is_short(summary, machine):
        return
    strength = 0.0
    evidence: list[Evidence] = []
    share: float | None = None
    for point in summary.views:
        queued, ttft, part = point.seconds("queue_p50"), point.typical_s("ttft"), "time to first token"
        if queued is None or ttft is None:
            tail = point.seconds("queue_p99"), point.tail_s("ttft")
            if None not in tail:
                queued, ttft = tail
            elif queued is not None:
                ttft, part = point.typical_s("e2e"), "request"
        worked = point.typical_s("prefill") or 0.0
        if queued is None or ttft is None or queued <= 0.05 or queued < 0.5 * ttft or queued <= worked:
            continue
        share = ratio(queued, ttft) if part != "request" else None
        strength = 0.6
        place = f"{point.place}.queue"
        evidence.append(computed("queue_s", queued, ttft, "s", place, f"is the larger part of the {part}"))
        break
    waiting, running = summary.waiting, summary.peak("requests_running")
    if waiting is not None and waiting >= max(2.0, 0.25 * _beside(summary, waiting)):
        strength = either(strength, 0.4)
        evidence.extend(given(summary, "requests_waiting", "a queue stands in the engine"))
        typical = [
            (q, t) for p in summary.views if (q := p.seconds("queue_p50")) is not None and (t := p.typical_s("ttft"))
        ]
        if typical and all(q < 0.05 * t for q, t in typical):
            strength *= 0.5
            evidence.extend(
                objection(
                    summary.place_of("queue_p50_ms"),
                    "queue_p50_ms",
                    "the median request does not wait: the queue does not stand",
                )
            )
        elif waiting >= (running or 0.0):
            strength = either(strength, 0.25)
    elif evidence and at_most(waiting, 0):
        strength *= 0.6
        evidence.extend(
            objection(summary.place_of("requests_waiting"), "requests_waiting", "nothing waits at this moment")
        )
    if not evidence:
        return
    strength = supported(strength, evidence, 0.35, memory_is_free(summary))
    limit = slot_limit(summary)
    if limit and summary.kv_usage is None and waiting and _beside(summary, waiting) < _SLOTS_TAKEN_RATIO * limit:
        strength *= 0.5
        evidence.append(
            computed(
                "requests_running", _beside(summary, waiting), limit, "count", "requests_running, max_num_seqs",
                "slots are free although requests wait: what holds them, memory or the step budget, was not measured",
                against=True,
            )
        )  # fmt: skip
    yield _queue(summary, strength, evidence, "engine_queue", share)


def _beside(summary: Summary, waiting: float) -> float:
    """Requests that run while others wait: the gauge, else what the declared concurrency leaves."""
    running = summary.peak("requests_running")
    return running if running is not None else max(0.0, (summary.in_flight or 0.0) - waiting)


def _queue(
    summary: Summary, strength: float, evidence: list[Evidence], mechanism: str, share: float | None = None
) -> Hypothesis:
    """A queue with free memory: at the slot limit it is the limit, else the capacity of the deployment."""
    limit, running = slot_limit(summary), summary.peak("requests_running")
    limited = limit is not None and (
        near(running, limit, 0.1) or (running is None and (summary.in_flight or 0) > limit)
    )
    if limited:
        evidence.extend(given(summary, "requests_running", "running stands at the slot limit", limit))
    return Hypothesis(
        cause="queue.slots" if limited else "queue.capacity",
        mechanism=mechanism,
        strength=min(strength, 0.9),
        sentence="Requests wait to be scheduled while memory is free."
        if summary.kv_usage is not None
        else "Requests wait to be scheduled; whether memory is short was not measured.",
        evidence=tuple(evidence),
        techniques=("raise_max_num_seqs", "add_replicas", "admission_control") if limited else OVERLOAD,
        tempting=KERNEL_ADVICE,
        symptoms=frozenset({"compute"}),
        share=share,
        phase="ttft",
        caveat=None if summary.kv_usage is not None or limited else "the use of the KV pool",
    )


def serial_prefill(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Prompts are computed one after another although a step could take several: the last waits for all others."""
    per_step = summary.number("prefill_requests_per_step_count") or summary.count("engine.max_prefills_per_step")
    load = summary.count("workload.num_requests") if summary.text("workload.arrival") == "burst" else None
    load = summary.in_flight or load
    own = summary.typical_s("prefill") or ratio(summary.input_tokens, summary.number("prefill_rate_tok_per_s"))
    last = summary.seconds("ttft_max") or summary.tail_s("ttft")
    if load is None or load < 4 or own is None:
        return
    evidence: list[Evidence] = []
    strength = 0.0
    predicted = load * own / max(per_step or 1.0, 1.0)
    if last is not None and near(last, predicted, 0.35):
        strength = 0.5
        evidence.append(
            computed(
                "last_ttft_s",
                last,
                predicted,
                "s",
                "ttft_max",
                f"is that of {load:g} prompts computed one after another",
            )
        )
    if at_most(per_step, 2):
        strength = either(strength, 0.6 if evidence else 0.45)
        evidence.extend(given(summary, "prefill_requests_per_step_count", "requests that share a prefill step"))
        evidence.extend(configured(summary.observed, "engine.max_prefills_per_step", "limit of prefills in one step"))
    if not evidence or memory_is_short(summary, machine):
        return
    floor = machine.prefill_floor_s(summary.input_tokens) if summary.input_tokens else None
    if floor is not None and own <= 2.5 * floor:
        strength *= 0.4  # one prompt alone fills the device: sharing a step would gain nothing
        evidence.append(
            computed("prefill_s", own, floor, "s", "prefill", "one prompt keeps the device busy already", against=True)
        )
    usual = summary.typical_s("ttft")
    if last is not None and usual is not None and usual >= 0.85 * last:
        strength *= 0.4
        said = "most wait as long as the last: they do not come one after another"
        evidence.append(computed("ttft_s", usual, last, "s", "ttft", said, against=True))
    yield Hypothesis(
        cause="queue.budget",
        mechanism="serial_prefill",
        strength=min(strength, 0.93),
        sentence="Prompts are prefilled one at a time; each request waits for all that came before it.",
        evidence=tuple(evidence),
        techniques=("batch_prefill_across_requests", "fair_or_priority_scheduling"),
        tempting=(
            *KERNEL_ADVICE,
            Tempting("cuda_graphs", "shortens decode steps"),
            Tempting("add_gpu_memory", "memory is not waited for"),
        ),
        symptoms=frozenset({"compute"}),
        share=1 - 1 / load,
        phase="ttft",
    )


def uneven_replicas(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """One replica has a queue while another has room."""
    copies = max(summary.count("engine.replicas") or 1.0, summary.count("engine.data_parallel") or 1.0)
    if copies < 2:
        return
    rows = [*summary.requests, *summary.timeline, *summary.arms]
    evidence: list[Evidence] = []
    strength = 0.0
    for metric in ("requests_waiting", "requests_running", "kv_cache_usage_ratio"):
        known = [(p, v) for p in rows if not p.differs and (v := p.number(metric)) is not None and p.word("name")]
        if len(known) < 2:
            continue
        most, least = max(known, key=lambda e: e[1]), min(known, key=lambda e: e[1])
        if most[1] >= 3 * max(least[1], 1e-3) and (metric != "requests_waiting" or most[1] >= 2):
            strength = either(strength, 0.6)
            evidence.append(
                computed(
                    metric,
                    most[1],
                    least[1],
                    "count",
                    f"{most[0].place} and {least[0].place}",
                    f"{most[0].name} against {least[0].name}",
                )
            )
    if not evidence:
        return
    evidence.extend(configured(summary.observed, "engine.routing_policy", "how the router picks a replica"))
    yield Hypothesis(
        cause="queue.upstream",
        mechanism="uneven_replicas",
        strength=min(strength, 0.9),
        sentence="The router loads the replicas unevenly: requests wait at one while another has room.",
        evidence=tuple(evidence),
        techniques=("least_loaded_routing", "add_replicas"),
        tempting=KERNEL_ADVICE,
        symptoms=frozenset({"kv"}),
        phase="ttft",
    )
