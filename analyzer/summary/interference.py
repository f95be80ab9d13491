"""Others' prefill inside one's decode: steps that carry a chunk are long, and everybody who decodes waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    given,
    nothing_waits,
    objection,
    reading,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, at_least, at_most, finite, near, ratio

_LONG_PROMPT_TOKENS = 2000
_ADVICE = (
    Tempting("weight_only_quantization", "acts on the decode step; decode alone is fast"),
    Tempting("kv_cache_quantization", "acts on KV bytes; memory is not short"),
    Tempting("speculative_decoding", "acts on decode; decode alone is fast"),
    Tempting("raise_prefill_chunk", "lengthens the very step that decoding requests wait for"),
    Tempting("raise_max_num_seqs", "lets more prompts into the same steps"),
)


def beside_prefill(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """One class of requests decodes fast alone and slowly beside the long prompts of another."""
    evidence: list[Evidence] = []
    strength = 0.0
    for alone in summary.comparators:
        if not _is_alone(summary, alone):
            continue
        for name, here, there in (
            ("tpot_s", summary.observed.token_s, alone.token_s),
            ("e2e_s", summary.observed.typical_s("e2e"), alone.typical_s("e2e")),
            ("ttft_s", summary.observed.typical_s("ttft"), alone.typical_s("ttft")),
            ("itl_tail_s", summary.observed.tail_s("itl"), alone.tail_s("itl")),
        ):
            slower = ratio(here, there)
            if slower is not None and slower >= 1.5:
                strength = either(strength, 0.7 if name in ("tpot_s", "itl_tail_s") else 0.5)
                evidence.append(
                    computed(
                        name, here, there, "s", f"observed and {alone.place}", "the same requests without the others"
                    )
                )
        added = _difference(summary.observed.typical_s("e2e"), alone.typical_s("e2e"))
        burst = summary.seconds("prefill_burst_max")
        if near(added, burst, 0.15):
            strength = either(strength, 0.5)
            evidence.append(
                computed(
                    "added_e2e_s",
                    added,
                    burst,
                    "s",
                    "e2e and prefill_burst_max_ms",
                    "what is added is as long as the others' prefill",
                )
            )
        break
    if not evidence:
        return
    yield from _blamed(summary, machine, strength, evidence, "prefill_interference")


def _is_alone(summary: Summary, point: Point) -> bool:
    """The run has fewer workload groups than the observed one."""
    fewer = (point.differs or {}).get("workload.groups")
    groups = summary.settings.raw("workload.groups")
    return isinstance(fewer, list) and isinstance(groups, list) and len(fewer) < len(groups)


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def long_steps(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The step that carries a chunk is as long as the time between two tokens of those who decode."""
    budget = summary.count("engine.prefill_chunk_tokens") or summary.count("engine.max_num_batched_tokens")
    rate = summary.number("prefill_rate_tok_per_s")
    step = summary.seconds("prefill_step") or (
        ratio(budget, rate) if summary.number("prefill_step_ms") is None else None
    )
    pace = summary.observed.token_s or summary.observed.tail_s("itl")
    mixed = _mixed(summary)
    evidence: list[Evidence] = []
    strength = 0.0
    if step and pace and step > 0.2 and pace >= 0.5 * step and mixed:
        strength = 0.5
        evidence.append(
            computed(
                "tpot_s",
                pace,
                step,
                "s",
                "tpot and prefill_step_ms",
                "a decoding request gets about one token a prefill step",
            )
        )
        if near(step, ratio(budget, rate), 0.2) and budget:
            strength = either(strength, 0.3)
            evidence.append(
                computed(
                    "prefill_step_s",
                    step,
                    ratio(budget, rate),
                    "s",
                    "step budget / prefill rate",
                    "the step is full of prompt tokens",
                )
            )
    run = summary.number("consecutive_prefill_steps_max_count")
    burst = summary.seconds("prefill_burst_max")
    if at_least(run, 5) or (burst is not None and burst >= 1 and mixed):
        strength = either(strength, 0.6)
        evidence.extend(given(summary, "consecutive_prefill_steps_max_count", "steps in a row that decode nothing"))
        evidence.extend(given(summary, "prefill_burst_max_ms", "decode stands still for this long"))
    tail, middle = summary.tail_s("itl"), summary.seconds("itl_p50")
    policy = (summary.text("engine.scheduler_policy") or "").lower()
    unchunked = summary.truth("engine.chunked_prefill") is False or ("prefill" in policy and "first" in policy)
    if tail and middle and tail >= 5 * middle and unchunked:
        strength = either(strength, 0.55)
        evidence.append(_gaps(tail, middle, "and prompts are not chunked"))
    elif tail and middle and tail >= 5 * middle and mixed and not separated(summary):
        longest = _longest_prompt(summary)
        strength = either(strength, 0.4)
        evidence.append(_gaps(tail, middle, "while long prompts arrive"))
        if at_least(ratio(longest, budget), 1.5):
            strength = either(strength, 0.3)
            evidence.append(
                computed(
                    "chunks_per_prompt",
                    ratio(longest, budget),
                    1.0,
                    "count",
                    "input_tokens / step budget",
                    "a long prompt fills several steps in a row",
                )
            )
    if unchunked and evidence:
        evidence.extend(
            configured(summary.observed, "engine.chunked_prefill", "whole prompts run before decoding goes on", True)
        )
        evidence.extend(configured(summary.observed, "engine.scheduler_policy", "who goes first"))
    if evidence:
        yield from _blamed(summary, machine, strength, evidence, "prefill_interference")


def _gaps(tail_s: float, middle_s: float, circumstance: str) -> Evidence:
    said = f"single gaps are many times the usual one {circumstance}"
    return computed("itl_tail_s", tail_s, middle_s, "s", "observed.itl", said)


def separated(summary: Summary) -> bool:
    """Prefill runs on other devices than decode."""
    return summary.truth("engine.prefill_decode_disaggregation") is True


def _longest_prompt(summary: Summary) -> float | None:
    groups = summary.settings.raw("workload.groups")
    lengths = (
        [finite(g.get("input_tokens")) for g in groups if isinstance(g, Mapping)] if isinstance(groups, list) else []
    )
    return max((n for n in (*lengths, summary.input_tokens) if n is not None), default=None)


def _mixed(summary: Summary) -> bool:
    """Prompts arrive while others decode: several groups, or several requests with long prompts."""
    groups = summary.settings.raw("workload.groups")
    several = isinstance(groups, list) and len(groups) >= 2
    return several or (at_least(summary.in_flight, 2) and at_least(summary.input_tokens, _LONG_PROMPT_TOKENS))


def unfair_lanes(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Requests of one wave decode at very different rates, the more so the longer the prompts, without preemption."""
    point = summary.observed
    spread = ratio(point.number("decode_rate_max_tok_per_s"), point.number("decode_rate_min_tok_per_s"))
    name = "decode_rate_spread"
    if spread is None:
        spread, name = ratio(point.seconds("tpot_max"), point.seconds("tpot_min")), "tpot_spread"
    prompt = summary.input_tokens
    if spread is None or spread < 4 or at_most(summary.in_flight, 1):
        return
    evidence = [
        computed(
            name,
            spread,
            1.0,
            "ratio",
            f"{point.place}.decode_rate",
            "requests of one wave get very different shares of the steps",
        )
    ]
    strength = 0.35 if spread < 8 else 0.45
    if at_least(prompt, _LONG_PROMPT_TOKENS):
        strength = either(strength, 0.3)
        evidence.extend(configured(point, "workload.input_tokens", "prompts are long"))
    growing = _grows(summary, spread)
    if growing is not None:
        strength = either(strength, 0.5)
        evidence.append(growing)
    first_wait = ratio(point.seconds("ttft_max"), point.seconds("ttft_min"))
    if at_least(first_wait, 3):
        strength = either(strength, 0.2)
        evidence.append(
            computed(
                "ttft_spread",
                first_wait,
                1.0,
                "ratio",
                f"{point.place}.ttft",
                "early ones decode while late ones are still prefilled",
            )
        )
    yield from _blamed(summary, machine, strength, evidence, "unfair_lanes")


def _grows(summary: Summary, spread: float) -> Evidence | None:
    runs = []
    for tokens, point in summary.series("workload.input_tokens"):
        high, low = point.number("decode_rate_max_tok_per_s"), point.number("decode_rate_min_tok_per_s")
        if high is None or low is None:
            high, low = point.seconds("tpot_max"), point.seconds("tpot_min")
        value = ratio(high, low)
        if value is not None:
            runs.append((tokens, value))
    if len(runs) >= 2 and all(b[1] > a[1] for a, b in pairwise(runs)) and runs[-1][1] >= 1.5 * runs[0][1]:
        return computed(
            "spread_at_shortest",
            runs[0][1],
            spread,
            "ratio",
            "sweep over workload.input_tokens",
            "the spread grows with the prompt length",
        )
    return None


def budget_trade(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Runs with a smaller step budget decode faster (and prefill slower): decode waits for prefill steps."""
    for path in ("engine.max_num_batched_tokens", "engine.prefill_chunk_tokens"):
        paces = _over(summary, path, lambda p: p.token_s or p.tail_s("itl"))
        waits = _over(summary, path, lambda p: p.typical_s("ttft"))
        whole = summary.observed.token_s or summary.observed.tail_s("itl")
        smallest = min(paces, default=None)
        if smallest is None:
            continue
        fastest = paces[smallest]
        slowest = whole or paces[max(paces)]
        ordered = [paces[key] for key in sorted(paces)]
        if slowest < 1.3 * fastest or any(b < 0.95 * a for a, b in pairwise(ordered)):
            continue
        evidence = [
            computed(
                "tpot_s",
                slowest,
                fastest,
                "s",
                f"sweep over {path}",
                f"falls to this with a budget of {smallest:g} tokens",
            )
        ]
        strength = 0.6
        if len(waits) >= 2 and waits[min(waits)] > 1.2 * waits[max(waits)]:
            strength = either(strength, 0.4)
            evidence.append(
                computed(
                    "ttft_s",
                    waits[min(waits)],
                    waits[max(waits)],
                    "s",
                    f"sweep over {path}",
                    "what decode gains, prefill pays",
                )
            )
        yield from _blamed(summary, machine, strength, evidence, "prefill_interference")


def _over(summary: Summary, path: str, value: object) -> Mapping[float, float]:
    assert callable(value)
    found: dict[float, float] = {}
    for point in (*summary.sweep, *summary.arms, *((summary.baseline,) if summary.baseline else ())):
        setting = point.count(path)
        if point.differs is None or set(point.differs) != {path} or setting is None:
            continue
        number = value(point)
        if isinstance(number, float):
            found[setting] = number
    return found


def stalls(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Tail against the run it is compared with, where that one has less prefill beside it."""
    grown = summary.number("tpot_p99_over_baseline_ratio")
    if grown is None or grown < 1.5 or at_least(summary.preemptions, 1):
        return
    evidence = list(
        given(
            summary,
            "tpot_p99_over_baseline_ratio",
            "the slowest decode is many times slower than in the run it is compared with",
            1.0,
        )
    )
    strength = 0.35
    if _mixed(summary):
        strength = either(strength, 0.35)
        evidence.extend(configured(summary.observed, "workload.input_tokens", "long prompts run beside it"))
    for point in summary.comparators:
        if any(
            path in (point.differs or {}) for path in ("engine.prefill_decode_disaggregation", "engine.chunked_prefill")
        ):
            strength = either(strength, 0.45)
            evidence.append(
                computed(
                    "differs",
                    ", ".join(point.differs or {}),
                    None,
                    "word",
                    point.place,
                    "the run it is compared with separates the phases",
                )
            )
            break
    yield from _blamed(summary, machine, strength, evidence, "prefill_interference")


def _blamed(
    summary: Summary, machine: Machine, strength: float, evidence: list[Evidence], mechanism: str
) -> Iterator[Hypothesis]:
    """The hypothesis, strengthened by nothing waiting and no preemption, weakened by a full pool."""
    if at_most(summary.preemptions, 0):
        strength = either(strength, 0.2)
        evidence.extend(given(summary, "preemptions_count", "nothing was preempted"))
    elif at_least(summary.preemptions, 1):
        strength *= 0.4
        evidence.extend(
            objection(summary.place_of("preemptions_count"), "preemptions_count", "preemption stalls decode as well")
        )
    strength = supported(strength, evidence, 0.1, nothing_waits(summary))
    if summary.kv_usage is not None and summary.kv_usage < 0.85:
        evidence.extend(reading(summary.place_of("kv_cache_usage_ratio"), "kv_cache_usage_ratio", "memory is free"))
    yield Hypothesis(
        cause="interference",
        mechanism=mechanism,
        strength=min(strength, 0.96),
        sentence="Requests that decode wait for the prefill steps of others.",
        evidence=tuple(evidence),
        techniques=_techniques(summary, mechanism),
        tempting=_ADVICE,
        symptoms=frozenset({"queueing", "bandwidth", "host"}),
        share=_lost_share(summary),
        phase="tpot",
    )


def _lost_share(summary: Summary) -> float | None:
    """Share of the time per token that the others' prefill takes: what the same requests do not need alone."""
    for alone in summary.comparators:
        if _is_alone(summary, alone):
            kept = ratio(alone.token_s, summary.observed.token_s)
            return None if kept is None else max(0.0, 1 - kept)
    return None


def _techniques(summary: Summary, mechanism: str) -> tuple[str, ...]:
    policy = (summary.text("engine.scheduler_policy") or "").lower()
    whole = summary.truth("engine.chunked_prefill") is False or ("prefill" in policy and "first" in policy)
    found = ["interleave_decode_with_prefill"] if whole else ["cap_prefill_per_step"]
    if mechanism == "unfair_lanes":
        found.append("fair_or_priority_scheduling")
    elif whole:
        found.append("cap_prefill_per_step")
    elif summary.truth("engine.chunked_prefill") is None:
        found.append("interleave_decode_with_prefill")
    if not separated(summary):
        found.append("prefill_decode_disaggregation")
    return tuple(found)
