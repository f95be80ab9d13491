"""Things that the first request finds missing: compiled kernels, a loaded model, a loaded adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from phasewise.analyzer.summary.host import HOST_ADVICE
from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    either,
    given,
    nothing_waits,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, at_least, at_most


def compiling(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Kernels or graphs are compiled while requests wait, or the first request pays for what later ones find ready."""
    evidence: list[Evidence] = []
    strength = 0.0
    compiles = summary.peak("compiles_count")
    if at_least(compiles, 1):
        strength = 0.65
        evidence.extend(given(summary, "compiles_count", "were compiled while requests were served", 0))
    first_slow = _first_slow(summary)
    if first_slow is not None:
        row, slow, later = first_slow
        if not _explained_by_cache(summary):
            strength = either(strength, 0.65 if slow >= 5 * later else 0.5)
            said = "the first request takes many times as long as the next ones"
            evidence.append(computed("first_ttft_s", slow, later, "s", row.place, said))
            mean, count = summary.observed.seconds("ttft_mean"), summary.number("samples_count")
            if mean is not None and at_most(count, 10) and mean > 2 * later:
                evidence.append(
                    computed(
                        "ttft_mean_s", mean, later, "s", "observed.ttft_mean_ms", "the mean is made by that one request"
                    )
                )
    if not evidence:
        return
    if summary.truth("workload.structured_output") and not at_least(compiles, 1):
        return  # a grammar that is compiled once: context
    if summary.count("workload.adapters_count"):
        strength *= 0.5
    strength = supported(strength, evidence, 0.15, nothing_waits(summary))
    yield Hypothesis(
        cause="cold_start",
        mechanism="cold_start",
        strength=min(strength, 0.93),
        sentence="Requests wait for code to be compiled or a model to be loaded that later requests find ready.",
        evidence=tuple(evidence),
        techniques=("warmup_before_ready", "persistent_compile_cache", "keep_model_resident"),
        tempting=(
            *HOST_ADVICE,
            Tempting("raise_prefill_chunk", "acts on each prompt; only the first is slow"),
            Tempting("low_precision_compute", "acts on each prompt; only the first is slow"),
        ),
        symptoms=frozenset({"compute", "queueing", "context"}),
        phase="ttft",
    )


def _first_slow(summary: Summary) -> tuple[Point, float, float] | None:
    """(row, its TTFT, median TTFT of the later ones) where the first single request is far slower than those after it."""
    rows = [(p, t) for p in summary.requests if (t := p.typical_s("ttft") or p.typical_s("e2e")) is not None]
    if len(rows) < 2:
        rows = [(p, t) for p in summary.timeline if (t := p.typical_s("ttft")) is not None]
    if len(rows) < 2 or any((p.number("count") or 1) > 1 or p.group for p, _ in rows):
        return None
    sizes = [n for p, _ in rows if (n := p.input_tokens) is not None]
    if sizes and max(sizes) > 1.5 * min(sizes):
        return None
    return slow_first(rows, 0.3)


def slow_first(rows: Sequence[tuple[Point, float]], least_s: float) -> tuple[Point, float, float] | None:
    """(row, its seconds, median of the later ones) where the first takes three times as long, and `least_s` more."""
    if len(rows) < 2:
        return None
    (row, slow), later = rows[0], median(t for _, t in rows[1:])
    return (row, slow, later) if slow >= 3 * later and slow - later > least_s else None


def _explained_by_cache(summary: Summary) -> bool:
    """Later requests are faster because they find the prompt of the first in the prefix cache."""
    hits = [
        h
        for p in summary.requests[1:]
        if (h := p.number("prefix_cache_hit_tokens_count") or p.number("prefix_cache_hit_ratio"))
    ]
    repeated = summary.text("workload.prefix_pattern") in (
        "identical_repeat",
        "extending_session",
        "shared_system_prompt",
    )
    return bool(hits) or (repeated and summary.truth("engine.prefix_caching") is not False)


def adapters(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """More adapters in the traffic than fit on the device: each change loads one."""
    wanted, fit = summary.count("workload.adapters_count"), summary.count("engine.adapter_slots")
    loads = summary.peak("adapter_loads_count")
    evidence: list[Evidence] = []
    strength = 0.0
    if wanted and fit and wanted > fit:
        strength = 0.65
        evidence.append(
            computed(
                "adapters_per_slot",
                wanted / fit,
                1.0,
                "ratio",
                "workload.adapters_count / engine.adapter_slots",
                "more adapters than slots",
            )
        )
    if at_least(loads, 1):
        strength = either(strength, 0.6)
        evidence.extend(given(summary, "adapter_loads_count", "adapters were loaded while requests were served", 0))
    first_use = _first_use(summary)
    if first_use is not None:
        strength = either(strength, 0.55)
        evidence.append(first_use)
    if not evidence:
        return
    strength = supported(strength, evidence, 0.1, nothing_waits(summary))
    crowded = bool(wanted and fit and wanted > fit)
    yield Hypothesis(
        cause="host",
        mechanism="adapter_loading",
        strength=min(strength, 0.94),
        sentence="Requests wait for their adapter to be loaded into device memory.",
        evidence=tuple(evidence),
        techniques=("more_adapter_slots", "prefetch_adapters")
        if crowded or fit is None
        else ("prefetch_adapters", "more_adapter_slots"),
        tempting=HOST_ADVICE,
        symptoms=frozenset({"queueing", "compute", "kv"}),
        phase="ttft",
    )


def _first_use(summary: Summary) -> Evidence | None:
    """Requests that are the first of their adapter are far slower than those that find it loaded."""
    seen: set[str] = set()
    cold: list[float] = []
    warm: list[float] = []
    for row in summary.requests:
        adapter, ttft = row.word("adapter"), row.typical_s("ttft")
        if adapter is None or ttft is None:
            continue
        (warm if adapter in seen else cold).append(ttft)
        seen.add(adapter)
    if not cold or not warm or median(cold) < 2 * median(warm):
        return None
    return computed(
        "first_use_ttft_s",
        median(cold),
        median(warm),
        "s",
        "requests[].adapter",
        "the first request of an adapter is far slower than later ones",
    )
