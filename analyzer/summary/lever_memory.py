"""Settings that decide what device memory holds: the KV pool, its format and tiers, cached prefixes, adapters."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary.change import Change, Choose, Lever, more, switch
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least


def _kv_format(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if change.there is None:
        return None
    short = at_least(summary.kv_usage, 0.9) or at_least(summary.preemptions, 1)
    return Lever(
        "kv.preempt" if short else "decode.kv",
        "kv_bytes",
        ("kv_cache_quantization",),
        "With smaller KV entries the same load is faster.",
    )


def _offload(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if str(change.there or "none").lower() == "none":
        return None
    return Lever(
        "kv.evicted",
        "evicted_prefix",
        ("kv_offload_tier",),
        "With a second tier the prefix need not be computed again.",
        ("ttft", "e2e", "throughput"),
        symptoms=frozenset({"compute"}),
    )


def _adapters(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    better = change.raised if change.path == "engine.adapter_slots" else change.lowered
    return (
        Lever(
            "host",
            "adapter_loading",
            ("more_adapter_slots", "prefetch_adapters"),
            "With all adapters loaded the same requests are faster.",
            strength=0.75,
            symptoms=frozenset({"queueing", "kv", "compute"}),
        )
        if better
        else None
    )


_CACHE = switch(
    "prefill.compute",
    "missed_prefix",
    ("prefix_caching",),
    "With prefix caching the same prompts start sooner.",
    ("ttft", "e2e", "throughput"),
    frozenset({"queueing"}),
)


_POOL = more(
    "kv.wait",
    "pool_too_small",
    ("raise_gpu_memory_utilization", "kv_cache_quantization"),
    "With a larger pool the same load is held.",
    symptoms=frozenset({"queueing"}),
)


MEMORY: Mapping[str, Choose] = {
    "engine.gpu_memory_utilization": _POOL,
    "engine.kv_pool_tokens": _POOL,
    "engine.kv_pool_gb": _POOL,
    "engine.kv_dtype": _kv_format,
    "model.kv_dtype": _kv_format,
    "engine.kv_offload": _offload,
    "engine.prefix_caching": _CACHE,
    "engine.adapter_slots": _adapters,
    "workload.adapters_count": _adapters,
}  # fmt: skip
