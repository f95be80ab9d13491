"""Settings that decide who runs when: slots, step budgets, replicas, routing, policies, separated phases."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary.change import MATTERS, Change, Choose, Lever, more, switch
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, finite


def _slots(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    short = at_least(summary.kv_usage, 0.9) or at_least(summary.preemptions, 1)
    if change.raised and not short:
        return Lever(
            "queue.slots",
            "slot_limit",
            ("raise_max_num_seqs", "admission_control"),
            "With more slots the same load waits less.",
            ("ttft", "e2e", "throughput"),
            symptoms=frozenset({"compute"}),
        )
    if change.lowered and short:
        return Lever(
            "kv.preempt",
            "too_many_residents",
            ("lower_max_num_seqs", "admission_control", "kv_cache_quantization"),
            "With fewer residents nobody is thrown out of the pool.",
            symptoms=frozenset({"queueing"}),
        )
    return None


def _smaller_budget(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    pace = max(change.gains.get("tpot", 0.0), change.gains.get("itl", 0.0))
    if change.lowered and pace >= MATTERS and not at_least(summary.preemptions, 1):
        return Lever(
            "interference",
            "prefill_interference",
            ("cap_prefill_per_step", "interleave_decode_with_prefill", "prefill_decode_disaggregation"),
            "With less prefill in a step, decode goes on.",
            ("tpot", "itl"),
            symptoms=frozenset({"bandwidth", "queueing"}),
        )
    if change.raised and (summary.input_tokens or 0) > (finite(change.here) or 0):
        return Lever(
            "prefill.compute",
            "small_chunks",
            ("raise_prefill_chunk",),
            "Larger chunks compute the same prompt in fewer steps.",
            ("ttft", "e2e", "throughput"),
            symptoms=frozenset({"host", "queueing"}),
        )
    return None


def _disaggregated(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if change.there is True and change.best(("tpot", "itl")) is not None:
        return Lever(
            "interference",
            "prefill_interference",
            ("prefill_decode_disaggregation", "cap_prefill_per_step"),
            "On separate instances decode no longer waits for prefill.",
            ("tpot", "itl"),
            symptoms=frozenset({"bandwidth"}),
        )
    if change.there is False:
        return Lever(
            "communication.network",
            "kv_transfer",
            ("enable_rdma_transfer", "collect_missing_signals"),
            "On one instance the same requests are faster: moving KV costs more than it gives.",
            ("ttft", "e2e", "throughput"),
            0.5,
        )
    return None


def _routing(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    ours = summary.number("prefix_cache_hit_ratio")
    theirs = change.point.number("prefix_cache_hit_ratio")
    name = str(change.there or "").lower()
    if (ours is not None and theirs is not None and theirs > ours + 0.1) or any(
        w in name for w in ("cache", "prefix", "kv", "session", "affinity")
    ):
        return Lever(
            "prefill.compute",
            "scattered_prefix",
            ("cache_aware_routing",),
            "Requests that reach the replica with their prefix are faster.",
            ("ttft", "e2e", "throughput"),
            symptoms=frozenset({"queueing"}),
        )
    return Lever(
        "queue.upstream",
        "uneven_replicas",
        ("least_loaded_routing",),
        "Another way to choose the replica waits less.",
        ("ttft", "e2e", "throughput"),
    )


def _policy(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """Another order of admission: fairer, or one that does not throw anybody out."""
    if at_least(summary.preemptions, 1) and at_most(change.point.number("preemptions_count"), 0):
        evicting = ("no_evict_scheduling", "admission_control")
        return Lever("kv.preempt", "admission_rule", evicting, "With another policy nobody is preempted.")
    fairer = ("fair_or_priority_scheduling",)
    return Lever("queue.policy", "policy", fairer, "Another scheduling policy waits less.", ("ttft", "e2e"))


_CHUNKS = switch(
    "interference",
    "prefill_interference",
    ("interleave_decode_with_prefill", "cap_prefill_per_step"),
    "With chunked prefill decode goes on.",
    ("tpot", "itl", "e2e"),
    frozenset({"bandwidth", "queueing"}),
)


_COPIES = more(
    "queue.capacity",
    "overload",
    ("add_replicas", "autoscale_on_queue_depth"),
    "With more replicas the same load waits less.",
    ("ttft", "e2e"),
    frozenset({"compute"}),
)


ADMISSION: Mapping[str, Choose] = {
    "engine.max_num_seqs": _slots,
    "engine.effective_max_num_seqs": _slots,
    "engine.max_num_batched_tokens": _smaller_budget,
    "engine.prefill_chunk_tokens": _smaller_budget,
    "engine.max_prefills_per_step": more("queue.budget", "serial_prefill", ("batch_prefill_across_requests",), "With several prompts a step the others start sooner.", ("ttft", "e2e", "throughput"), frozenset({"compute"})),
    "engine.chunked_prefill": _CHUNKS,
    "engine.prefill_decode_disaggregation": _disaggregated,
    "engine.replicas": _COPIES,
    "engine.data_parallel": _COPIES,
    "engine.routing_policy": _routing,
    "engine.scheduler_policy": _policy,
}  # fmt: skip
