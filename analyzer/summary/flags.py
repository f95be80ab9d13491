"""Flags outside the vocabulary (`extra_flags`), read by the words in their names and values."""

from __future__ import annotations

from phasewise.analyzer.summary.change import Change, Lever

_FLAG_WORDS: tuple[tuple[tuple[str, ...], Lever], ...] = (
    (("numa", "membind", "interleave_mem"), Lever("decode.weights", "numa_placement", ("numa_local_placement",), "Memory next to the cores that read it is faster.")),
    (("thread", "omp", "cpu_affinity", "cores"), Lever("host", "too_many_threads", ("limit_cpu_threads",), "Another number of threads is faster.")),
    (("partial_prefill", "long_prefill", "prefill_budget", "mixed_prefill"), Lever("interference", "prefill_interference", ("cap_prefill_per_step", "fair_or_priority_scheduling", "interleave_decode_with_prefill"), "With less prefill beside it decode goes on.")),
    (("ucx", "nixl", "rdma", "nccl_ib", "transfer"), Lever("communication.network", "kv_transfer", ("enable_rdma_transfer",), "Over another transport the same transfer is faster.")),
    (("no_evict", "evict", "reserve", "retract", "admission"), Lever("kv.preempt", "admission_rule", ("no_evict_scheduling", "reserve_full_prompt_on_admission", "admission_control"), "With another rule of admission nothing is thrown out.")),
    (("warmup", "compile_cache", "compile"), Lever("cold_start", "cold_start", ("warmup_before_ready", "persistent_compile_cache"), "Without compiling while serving it is faster.")),
    (("event_loop", "uvloop", "executor", "worker"), Lever("host", "blocked_event_loop", ("move_blocking_work_off_event_loop", "scale_api_servers"), "With the work elsewhere the loop is free.")),
    (("keep_alive", "keepalive", "unload", "resident"), Lever("cold_start", "model_reload", ("keep_model_resident",), "With the model kept loaded nobody waits for it.")),
)  # fmt: skip


def flag_lever(change: Change) -> Lever | None:
    """What a flag acts on, by its words; None where they say nothing."""
    words = f"{change.path.rpartition('.')[2]} {change.there} {change.here}".lower()
    return next((lever for pattern, lever in _FLAG_WORDS if any(word in words for word in pattern)), None)
