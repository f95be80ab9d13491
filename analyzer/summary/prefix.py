"""Prompt tokens that were computed before: kept and found, never kept, kept elsewhere, or thrown out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    given,
    nothing_preempted,
    nothing_waits,
    reading,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.memory import pool_tokens
from phasewise.analyzer.summary.points import Point, Summary, at_least, at_most, first, near, ratio

_SESSIONS = ("extending_session", "returning_session", "identical_repeat")
_ADVICE = (
    Tempting("speculative_decoding", "acts on decode; the time is prefill that was done before"),
    Tempting("weight_only_quantization", "acts on bytes per decode step; the time is prefill that was done before"),
    Tempting("add_replicas", "splits the traffic further, so that fewer prefixes meet their cache"),
    Tempting("raise_max_num_seqs", "nothing waits for a slot"),
)


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a prompt earlier prompts contained, and how much of it came from the cache; both 0 to 1."""

    reusable: float
    stated: bool  # from numbers, not from the pattern's name
    hit: float | None
    hit_place: Point | None


def reuse(summary: Summary) -> Reuse | None:
    """What the traffic repeats and what of it was found; None where the summary says nothing about repetition."""
    shared, prompt = summary.count("workload.shared_prefix_tokens"), summary.input_tokens
    pattern = summary.text("workload.prefix_pattern")
    reusable = first((summary.count("workload.reusable_prefix_ratio"), ratio(shared, prompt)))
    stated = reusable is not None
    if reusable is None and pattern in _SESSIONS:
        reusable = 0.9
    if reusable is None and shared:
        reusable, stated = 0.5, False
    if reusable is None:
        return None
    place = summary.place_of("prefix_cache_hit_ratio")
    hit = place.number("prefix_cache_hit_ratio") if place else None
    if hit is None:
        place = summary.place_of("prefix_cache_hit_tokens_count")
        tokens = place.number("prefix_cache_hit_tokens_count") if place else None
        hit = ratio(tokens, prompt or shared)
    if hit is None and prompt:
        place = summary.place_of("prompt_tokens_computed_count")
        done = place.number("prompt_tokens_computed_count") if place else None
        hit = max(0.0, 1 - done / prompt) if done is not None else None
    return Reuse(min(reusable, 1.0), stated, None if hit is None else min(hit, 1.0), place)


def missed_prefix(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Prompts repeat what was sent before, and the cache gives little or nothing of it back."""
    found = reuse(summary)
    if found is None or found.reusable < 0.2:
        return
    evidence: list[Evidence] = []
    strength = 0.0
    caching = summary.truth("engine.prefix_caching")
    if found.hit is not None:
        if found.hit > 0.6 * found.reusable:
            return
        strength = 0.7 if found.hit <= 0.1 * found.reusable else 0.55
        evidence.append(
            computed(
                "prefix_hit_ratio",
                found.hit,
                found.reusable,
                "ratio",
                found.hit_place.place if found.hit_place else "observed",
                "far less comes from the cache than earlier prompts contain",
            )
        )
    if caching is False:
        strength = either(strength, 0.55)
        evidence.extend(configured(summary.observed, "engine.prefix_caching", "prefix caching is switched off"))
    repeated = _repeat_as_slow(summary)
    if repeated is not None:
        strength = either(strength, 0.55)
        evidence.append(repeated)
    elsewhere = _hits_elsewhere(summary)
    if elsewhere is not None:
        strength = either(strength, 0.5)
        evidence.append(elsewhere[1])
    if not evidence:
        return
    if not found.stated:
        strength *= 0.9
    evidence.extend(configured(summary.observed, "workload.prefix_pattern", "how prompts share their beginnings"))
    strength = supported(strength, evidence, 0.15, nothing_waits(summary, "nothing waits: the time is work"))
    dropped = _dropped(summary, machine)
    if dropped is not None:
        yield Hypothesis(
            cause="kv.evicted",
            mechanism="evicted_prefix",
            strength=min(either(strength, 0.5), 0.95),
            sentence="A prefix that was in the pool was dropped before it was needed again, and is computed once more.",
            evidence=(*evidence, dropped),
            techniques=_kept(summary),
            tempting=(*_ADVICE, Tempting("lower_max_num_seqs", "no running sequence drives the prefix out")),
            symptoms=frozenset({"compute", "queueing"}),
            phase="ttft",
        )
        return
    spread = _scattered(summary, found)
    if spread is not None:
        yield Hypothesis(
            cause="prefill.compute",
            mechanism="scattered_prefix",
            strength=min(either(strength, 0.4), 0.95),
            sentence="Requests reach replicas that do not hold their prefix.",
            evidence=(*evidence, *spread),
            techniques=("cache_aware_routing", "kv_offload_tier"),
            tempting=_ADVICE,
            symptoms=frozenset({"queueing"}),
            phase="ttft",
        )
        return
    switched_off = caching is False
    techniques = ["prefix_caching"] if switched_off else ["restore_prefix_cache_hits"]
    if elsewhere is not None and any("speculation" in path for path in elsewhere[0].differs or {}):
        techniques.append("disable_or_shorten_speculation")
    if caching is None and found.hit is None:
        techniques = ["prefix_caching"]
    if summary.text("workload.prefix_pattern") in ("extending_session", "returning_session"):
        techniques.append("kv_offload_tier")
    yield Hypothesis(
        cause="prefill.compute",
        mechanism="missed_prefix",
        strength=min(strength, 0.95),
        sentence="Work that an earlier request did already is done again: the prefix cache does not hit.",
        evidence=tuple(evidence),
        techniques=tuple(techniques),
        tempting=_ADVICE if not switched_off else _ADVICE[:2],
        symptoms=frozenset({"queueing"}),
        share=found.reusable - (found.hit or 0.0),
        phase="ttft",
    )


def _repeat_as_slow(summary: Summary) -> Evidence | None:
    """The second time the same prompt takes as long as the first."""
    if summary.text("workload.prefix_pattern") != "identical_repeat":
        return None
    times = [(p, t) for p in summary.requests if (t := p.typical_s("ttft")) is not None]
    if len(times) < 2 or not near(times[0][1], times[1][1], 0.2):
        return None
    return computed(
        "ttft_s", times[1][1], times[0][1], "s", times[1][0].place, "the repeat takes as long as the first time"
    )


def _hits_elsewhere(summary: Summary) -> tuple[Point, Evidence] | None:
    """A run with one setting changed that does find the prefix."""
    for point in summary.comparators:
        tokens, ours = point.number("prefix_cache_hit_tokens_count"), summary.number("prefix_cache_hit_tokens_count")
        if tokens is None or ours is None:
            tokens, ours = point.number("prefix_cache_hit_ratio"), summary.number("prefix_cache_hit_ratio")
        if tokens is not None and ours is not None and tokens > 2 * ours and tokens > 0.1:
            changed = ", ".join(sorted(point.differs or {})) or "nothing else"
            return point, computed(
                "prefix_hits", ours, tokens, "count", point.place, f"the cache hits once {changed} is changed"
            )
    return None


def _dropped(summary: Summary, machine: Machine) -> Evidence | None:
    evicted = summary.number("prefix_evicted_tokens_count")
    if evicted:
        return next(
            iter(given(summary, "prefix_evicted_tokens_count", "were in the pool and dropped before this request")),
            None,
        )
    groups, shared = summary.count("workload.prefix_groups_count"), summary.count("workload.shared_prefix_tokens")
    pool = pool_tokens(summary, machine)
    if groups and shared and pool and groups * shared > pool:
        return computed(
            "prefix_tokens_in_all",
            groups * shared,
            pool,
            "tokens",
            "prefix_groups_count x shared_prefix_tokens",
            "all shared prefixes together do not fit the pool",
        )
    prompt, pattern = summary.input_tokens, summary.text("workload.prefix_pattern")
    if pool and prompt and pattern == "returning_session" and pool < prompt * max(summary.in_flight or 1.0, 1.0):
        return computed(
            "prompt_tokens",
            prompt,
            pool,
            "tokens",
            "engine.kv_pool_tokens",
            "one session does not fit the pool beside the others",
        )
    if at_least(summary.kv_usage, 0.95) and pattern == "returning_session":
        return next(iter(given(summary, "kv_cache_usage_ratio", "the pool is full when the session comes back")), None)
    return None


def _scattered(summary: Summary, found: Reuse) -> tuple[Evidence, ...] | None:
    copies = max(summary.count("engine.replicas") or 1.0, summary.count("engine.data_parallel") or 1.0)
    policy = (summary.text("engine.routing_policy") or "").lower()
    if copies < 2 or any(word in policy for word in ("cache", "prefix", "session", "sticky", "affinity", "kv")):
        return None
    if summary.truth("engine.prefix_caching") is False:
        return None
    return (
        computed(
            "replicas",
            copies,
            1.0,
            "count",
            "engine.replicas",
            f"a prefix meets its cache by chance, about once in {copies:g}",
        ),
        *configured(summary.observed, "engine.routing_policy", "the router does not look at prefixes"),
    )


def _kept(summary: Summary) -> tuple[str, ...]:
    found = []
    if (summary.text("engine.kv_offload") or "none").lower() == "none":
        found.append("kv_offload_tier")
    if max(summary.count("engine.replicas") or 1.0, summary.count("engine.data_parallel") or 1.0) > 1:
        found.append("cache_aware_routing")
    if at_most(summary.count("engine.gpu_memory_utilization"), 0.84):
        found.append("raise_gpu_memory_utilization")
    return (*found, "kv_cache_quantization", "add_gpu_memory")


def two_populations(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Within one session most turns are fast and some take many times as long: those that miss the cache."""
    pattern = summary.text("workload.prefix_pattern")
    if pattern not in ("extending_session", "returning_session", "identical_repeat", "shared_system_prompt", "grouped"):
        return
    rows = [(p, t) for p in summary.requests if (t := p.typical_s("ttft")) is not None]
    typical, worst = (
        summary.observed.typical_s("ttft"),
        summary.observed.seconds("ttft_max") or summary.observed.tail_s("ttft"),
    )
    evidence: list[Evidence] = []
    strength = 0.0
    if typical and worst and worst >= 8 * typical:
        strength = 0.4
        evidence.append(
            computed("ttft_max_s", worst, typical, "s", "observed.ttft", "a few turns take many times as long as most")
        )
    misses = [(p, t) for p, t in rows if at_most(_row_hits(p), 0.1)]
    others = [t for p, t in rows if not at_most(_row_hits(p), 0.1)]
    if misses and others and max(t for _, t in misses) >= 4 * min(others):
        row, slow = max(misses, key=lambda entry: entry[1])
        strength = either(strength, 0.6)
        evidence.append(
            computed("ttft_s", slow, min(others), "s", row.place, "the slow ones are those without a cache hit")
        )
        evidence.extend(reading(row, "prefix_cache_hit_ratio", "nothing came from the cache"))
    if not evidence:
        return
    if at_most(summary.waiting, 0):
        strength = either(strength, 0.25)
        evidence.extend(given(summary, "requests_waiting", "nothing waits"))
    elif at_least(summary.waiting, 1) or at_least(summary.in_flight, 8):
        strength *= 0.4
    strength = supported(strength, evidence, 0.1, nothing_preempted(summary))
    yield Hypothesis(
        cause="prefill.compute",
        mechanism="periodic_miss",
        strength=min(strength, 0.93),
        sentence="Some turns lose their cached prefix and compute the whole conversation again.",
        evidence=tuple(evidence),
        techniques=("restore_prefix_cache_hits", "kv_offload_tier"),
        tempting=_ADVICE,
        phase="ttft",
    )


def _row_hits(point: Point) -> float | None:
    return first((point.number("prefix_cache_hit_ratio"), point.number("prefix_cache_hit_tokens_count")))
