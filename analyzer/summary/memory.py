"""KV memory: pools that are full, too small for what must be resident, or that shrank the slots."""

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
    objection,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, near, ratio

FULL_RATIO = 0.9
_RISING = ("rising", "rising_slowly")
_ADVICE = (
    Tempting(
        "raise_max_num_seqs", "more slots admit more sequences into a pool that cannot hold them: more preemption"
    ),
    Tempting("speculative_decoding", "drafts need KV memory too, and memory is what is short"),
    Tempting("prefix_caching", "saves prefill; the pool is filled by sequences that run"),
    Tempting("raise_prefill_chunk", "fills the pool faster"),
)


def pool_tokens(summary: Summary, machine: Machine) -> float | None:
    """Tokens the KV pool holds: as stated, else its bytes over all ranks / bytes of a token."""
    stated = summary.count("engine.kv_pool_tokens")
    if stated:
        return stated
    size, each = summary.count("engine.kv_pool_gb"), machine.kv_bytes_per_token
    return size * 1e9 * summary.ranks / each if size and each else None


def fitting_sequences(summary: Summary, machine: Machine) -> float | None:
    """Sequences of the workload's length that the pool holds together."""
    return ratio(pool_tokens(summary, machine), summary.sequence_tokens)


def reserves_contexts(summary: Summary, machine: Machine) -> bool:
    """The engine works with about as many slots as longest contexts fit its pool: it reserves them, used or not."""
    longest, effective = summary.count("engine.max_model_len"), summary.count("engine.effective_max_num_seqs")
    return near(ratio(pool_tokens(summary, machine), longest), effective, 0.5)


def pool_too_small(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The pool cannot hold the sequences that are in flight, or the longest context the engine admits."""
    evidence: list[Evidence] = []
    strength = 0.0
    fits, load = fitting_sequences(summary, machine), summary.in_flight
    limit = summary.count("engine.effective_max_num_seqs") or summary.count("engine.max_num_seqs")
    wanted = min(load, limit) if load and limit else load
    if fits is not None and wanted is not None and fits < 0.95 * wanted:
        strength = 0.6 if fits < 0.7 * wanted else 0.5
        evidence.append(
            computed(
                "sequences_that_fit",
                fits,
                wanted,
                "count",
                "engine.kv_pool_tokens / tokens of a sequence",
                "the pool holds fewer sequences than are in flight",
            )
        )
        running = summary.peak("requests_running")
        if near(running, fits, 0.25):
            strength = either(strength, 0.4)
            evidence.extend(given(summary, "requests_running", "running stands where the pool is full", fits))
    asked, effective = summary.count("engine.max_num_seqs"), summary.count("engine.effective_max_num_seqs")
    if asked and effective and effective < 0.95 * asked:
        strength = either(strength, 0.65)
        evidence.extend(
            configured(
                summary.observed, "engine.effective_max_num_seqs", "the engine lowered its own slot limit", asked
            )
        )
    tokens, longest = pool_tokens(summary, machine), summary.count("engine.max_model_len")
    reserved = bool(asked and effective and effective < asked) and reserves_contexts(summary, machine)
    if reserved:
        strength = either(strength, 0.4)
        said = "of the longest contexts fit the pool: the engine reserves them, used or not"
        source = "engine.kv_pool_tokens / engine.max_model_len"
        evidence.append(computed("contexts_that_fit", ratio(tokens, longest), effective, "count", source, said))
    if tokens and longest and tokens < longest:
        strength = either(strength, 0.5)
        evidence.append(
            computed(
                "kv_pool_tokens",
                tokens,
                longest,
                "tokens",
                "engine.kv_pool_tokens",
                "the pool cannot hold one context of the longest length",
            )
        )
    states = summary.count("engine.state_cache_slots")
    if states and (wanted or asked) and states < (wanted or asked or 0.0):
        strength = either(strength, 0.55)
        evidence.extend(
            configured(
                summary.observed, "engine.state_cache_slots", "fewer state slots than sequences", wanted or asked
            )
        )
        if near(summary.peak("requests_running"), states, 0.1):
            strength = either(strength, 0.4)
            evidence.extend(given(summary, "requests_running", "running stands at the number of state slots", states))
    if not evidence:
        return
    strength, more = _pressure(summary, strength, reserved)
    yield Hypothesis(
        cause="kv.wait",
        mechanism="pool_too_small",
        strength=min(strength, 0.97),
        sentence="The KV pool is smaller than what has to be resident.",
        evidence=(*evidence, *more),
        techniques=_techniques(summary, machine),
        tempting=_ADVICE,
        symptoms=frozenset({"queueing", "compute"}),
        phase="e2e",
    )


def _pressure(summary: Summary, strength: float, reserved: bool) -> tuple[float, list[Evidence]]:
    """Gauges and counters that confirm or refute a shortage. reserved: room in the pool refutes nothing."""
    evidence: list[Evidence] = []
    if at_least(summary.kv_usage, FULL_RATIO):
        strength = either(strength, 0.4)
        evidence.extend(given(summary, "kv_cache_usage_ratio", "the pool is full"))
    elif at_most(summary.kv_usage, 0.7) and not reserved:
        strength *= 0.3
        evidence.extend(
            objection(summary.place_of("kv_cache_usage_ratio"), "kv_cache_usage_ratio", "the pool has room")
        )
    if at_least(summary.preemptions, 1):
        strength = either(strength, 0.5)
        evidence.extend(given(summary, "preemptions_count", "sequences were thrown out to make room"))
    elif at_most(summary.preemptions, 0) and not at_least(summary.kv_usage, FULL_RATIO) and not reserved:
        strength *= 0.7
        evidence.extend(objection(summary.place_of("preemptions_count"), "preemptions_count", "nothing was preempted"))
    return strength, evidence


def pool_full(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """A pool at the top with preemptions or waiting behind it."""
    usage, preempted = summary.kv_usage, summary.preemptions
    trend, running_trend = summary.word("preemptions_trend"), summary.word("requests_running_trend")
    full = at_least(usage, FULL_RATIO)
    evidence: list[Evidence] = []
    strength = 0.0
    if full:
        strength = 0.4
        evidence.extend(given(summary, "kv_cache_usage_ratio", "the KV pool is full"))
    if at_least(preempted, 1):
        strength = either(strength, 0.65)
        evidence.extend(given(summary, "preemptions_count", "running sequences were preempted"))
    if trend in _RISING:
        strength = either(strength, 0.6)
        evidence.extend(_trend(summary, "preemptions_trend", "preemptions keep coming"))
    if running_trend == "oscillating" and (trend in _RISING or full or at_least(preempted, 1)):
        strength = either(strength, 0.3)
        evidence.extend(_trend(summary, "requests_running_trend", "sequences are let in and thrown out again"))
    if full and at_least(summary.waiting, 1):
        strength = either(strength, 0.45)
        evidence.extend(given(summary, "requests_waiting", "and requests wait in front of it"))
    if not evidence or (not full and usage is not None and usage < 0.6 and not at_least(preempted, 1)):
        return
    collapse = _collapse(summary)
    if collapse is not None:
        strength = either(strength, 0.4)
        evidence.append(collapse)
    for healthy in _healthy_at_the_same_usage(summary):
        strength *= 0.35
        evidence.append(healthy)
    preempts = at_least(preempted, 1) or trend in _RISING
    yield Hypothesis(
        cause="kv.preempt" if preempts else "kv.wait",
        mechanism="pool_full",
        strength=min(strength, 0.97),
        sentence="The KV pool is full: sequences are held back or thrown out and computed again.",
        evidence=tuple(evidence),
        techniques=_techniques(summary, machine),
        tempting=_ADVICE,
        symptoms=frozenset({"queueing", "compute", "bandwidth"}),
        phase="e2e",
    )


def _trend(summary: Summary, name: str, text: str) -> Iterator[Evidence]:
    word = summary.word(name)
    if word is not None:
        yield computed(name, word, None, "word", f"observed.{name}", text)


def _collapse(summary: Summary) -> Evidence | None:
    """Throughput or pace that falls to a third once preemption begins, in the order of the timeline."""
    for before, after in pairwise(summary.timeline):
        early, late = before.number("preemptions_count"), after.number("preemptions_count")
        if early is None or late is None or late <= early:
            continue
        fast, slow = before.throughput, after.throughput
        if fast and slow and slow < fast / 3:
            return computed(
                "throughput", slow, fast, "1/s", f"{before.place} to {after.place}", "falls when the preemption happens"
            )
    return None


def _healthy_at_the_same_usage(summary: Summary) -> Iterator[Evidence]:
    """A run that is not slow although its pool is as full."""
    for point in summary.comparators:
        usage = point.number("kv_cache_usage_ratio")
        if usage is None or not near(usage, summary.kv_usage, 0.05):
            continue
        for phase in ("ttft", "tpot", "e2e"):
            here, there = summary.typical_s(phase), point.typical_s(phase)
            if here and there and here > 1.5 * there and not at_least(summary.preemptions, 1):
                yield computed(
                    "kv_cache_usage_ratio", usage, summary.kv_usage, "ratio", point.place, "a run that is not slow has the same usage",
                    against=True,
                )  # fmt: skip
                return


def offload_slower(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Bringing KV back from another tier takes longer than it saves."""
    tier = summary.text("engine.kv_offload")
    if tier is None or tier.lower() == "none":
        return
    for point in summary.differing_in("engine.kv_offload"):
        for phase in ("ttft", "tpot", "e2e"):
            here, there = summary.typical_s(phase), point.typical_s(phase)
            other = point.text("engine.kv_offload")
            if here and there and here > 1.3 * there and other in ("none", None):
                yield Hypothesis(
                    cause="kv.load",
                    mechanism="offload_slower",
                    strength=0.75,
                    sentence=f"KV kept on {tier} comes back more slowly than it would be computed again.",
                    evidence=(
                        computed(f"{phase}_s", here, there, "s", point.place, "is lower without the second tier"),
                    ),
                    techniques=("raise_gpu_memory_utilization", "add_gpu_memory", "kv_cache_quantization"),
                    tempting=_ADVICE,
                    phase=phase,
                )
                return


def _techniques(summary: Summary, machine: Machine) -> tuple[str, ...]:
    """Changes that make the pool larger, tokens smaller or the residents fewer, the free ones first."""
    given_share = summary.count("engine.gpu_memory_utilization")
    used, size = summary.number("gpu_memory_used_gb"), summary.count("hardware.memory_gb")
    spare = at_most(given_share, 0.84) or (used is not None and size is not None and used < 0.85 * size)
    longest, typical = summary.count("engine.max_model_len"), summary.sequence_tokens
    tokens = pool_tokens(summary, machine)
    found: list[str] = []
    if spare:
        found.append("raise_gpu_memory_utilization")
    if "util" in (summary.text("engine.scheduler_policy") or "").lower():
        found.append("no_evict_scheduling")
    if longest and typical and longest >= 4 * typical and tokens and tokens < longest * (summary.in_flight or 1):
        found.append("reduce_max_model_len")
    few = at_most(summary.peak("requests_running"), 8) or (longest and tokens and tokens < 8 * longest)
    preempts = at_least(summary.preemptions, 1) or summary.word("preemptions_trend") in _RISING
    if preempts:
        found.extend(
            ("reserve_full_prompt_on_admission", "lower_max_num_seqs")
            if few and not spare
            else ("lower_max_num_seqs", "admission_control")
        )
    if machine.kv_bits is None or machine.kv_bits > 8:
        found.append("kv_cache_quantization")
    if not preempts:
        found.append("admission_control")
    if not spare and given_share is None:
        found.append("raise_gpu_memory_utilization")
    found.append("add_gpu_memory")
    return tuple(dict.fromkeys(found))
