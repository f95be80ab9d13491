"""What each setting acts on: which cause, in which numbers it must show, and which change it is.

One entry for each setting that people vary. `comparison` measures what moved; here stands what that means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phasewise.analyzer.summary.change import MATTERS, Change, Lever
from phasewise.analyzer.summary.flags import flag_lever
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, finite

_MANY_CLIENTS = 50.0


_ENGINE_SIDE = frozenset({"queueing", "compute", "bandwidth"})


def _gateway(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if str(change.here or "").lower() in ("", "none") or change.there not in ("none", None):
        return None
    load = summary.in_flight or 0.0
    smoother = change.gains.get("itl", 1.0) < 0.8 or change.gains.get("tpot", 1.0) < 0.8
    whole = change.gains.get("e2e")
    if smoother or (change.gains.get("ttft", 1.0) >= MATTERS and whole is not None and whole < 1.15):
        return Lever(
            "client", "proxy_buffering", ("disable_proxy_buffering", "flush_first_token_immediately"),
            "Behind the gateway the first token comes late and the others close together: it buffers.", ("ttft", "e2e"), 0.75, _ENGINE_SIDE,
        )  # fmt: skip
    if load >= _MANY_CLIENTS or at_least(summary.count("workload.num_requests"), 200):
        return Lever(
            "external", "gateway_limit", ("raise_gateway_connection_limit",),
            "The engine alone serves the same load well: the gateway lets too few requests through.", strength=0.8, symptoms=_ENGINE_SIDE,
        )  # fmt: skip
    return Lever(
        "external", "gateway", ("disable_proxy_buffering", "raise_gateway_connection_limit", "collect_missing_signals"),
        "Without the gateway the same requests are faster.", strength=0.6, symptoms=_ENGINE_SIDE,
    )  # fmt: skip


def _switch(
    cause: str,
    mechanism: str,
    techniques: tuple[str, ...],
    sentence: str,
    phases: tuple[str, ...],
    symptoms: frozenset[str] = frozenset(),
) -> Callable[[Summary, Machine, Change], Lever | None]:
    """A feature that is on in the better run and off (or unknown) in the observed one."""

    def choose(summary: Summary, machine: Machine, change: Change) -> Lever | None:
        if change.there in (False, "off", "none", None, 0):
            return None
        return Lever(cause, mechanism, techniques, sentence, phases, symptoms=symptoms)

    return choose


def _more(
    cause: str,
    mechanism: str,
    techniques: tuple[str, ...],
    sentence: str,
    phases: tuple[str, ...] = ("ttft", "tpot", "itl", "e2e", "throughput"),
    symptoms: frozenset[str] = frozenset(),
) -> Callable[[Summary, Machine, Change], Lever | None]:
    """A number that is higher in the better run."""

    def choose(summary: Summary, machine: Machine, change: Change) -> Lever | None:
        if not change.raised and not (finite(change.here) is None and finite(change.there) is not None):
            return None
        return Lever(cause, mechanism, techniques, sentence, phases, symptoms=symptoms)

    return choose


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


def _kernel(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    here = str(change.here or "").lower()
    quantized = here not in ("", "none", "auto") and change.path != "engine.attention_backend"
    kernel = summary.text("engine.quant_kernel")
    if quantized or kernel:
        decode = "ttft" not in change.gains
        return Lever(
            "decode.weights" if decode else "prefill.compute", "slow_kernel", ("use_optimized_quant_kernel", "collect_missing_signals"),
            "The same weights run faster by another kernel.", strength=0.5, symptoms=frozenset({"host"}),
        )  # fmt: skip
    if here in ("none", "auto") and str(change.there or "").lower() not in ("", "none", "auto"):
        return Lever(
            "decode.weights",
            "weight_bytes",
            ("weight_only_quantization",),
            "With smaller weights decode is faster: it waits for their bytes.",
            ("tpot", "throughput"),
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


def _grammar(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if change.path == "workload.structured_output" and change.there is not False:
        return None
    pace = max(
        change.gains.get("tpot", 0.0),
        change.gains.get("itl", 0.0),
        change.gains.get("throughput", 0.0) if "ttft" not in change.gains else 0.0,
    )
    if pace >= MATTERS and pace >= 0.5 * change.gains.get("ttft", 0.0):
        return Lever(
            "host",
            "grammar_per_token",
            ("faster_grammar_backend", "simplify_schema"),
            "Each token waits for the mask of the grammar.",
            ("tpot", "itl", "throughput"),
            0.75,
            frozenset({"bandwidth", "compute", "context"}),
        )
    return Lever(
        "context",
        "grammar_compilation",
        ("cache_compiled_grammar", "simplify_schema", "faster_grammar_backend"),
        "The grammar is compiled before the first token.",
        ("ttft", "e2e"),
        0.75,
        frozenset({"host", "queueing", "compute"}),
    )


def _threads(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if change.lowered:
        return Lever(
            "host",
            "too_many_threads",
            ("limit_cpu_threads",),
            "With fewer threads the same work is faster: they fight for cores.",
            symptoms=frozenset({"context"}),
        )
    return Lever(
        "context",
        "preprocessing",
        ("parallel_preprocessing",),
        "With more threads requests are prepared faster.",
        ("ttft", "e2e", "throughput"),
    )


def _servers(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if not change.raised:
        return None
    prepared = summary.typical_s("frontend") or summary.seconds("validation_p50") or summary.seconds("preprocess_p50")
    return Lever(
        "context" if prepared else "host", "api_server", ("scale_api_servers", "parallel_preprocessing" if prepared else "async_scheduling"),
        "With more server processes the same engine is reached sooner.", symptoms=frozenset({"queueing", "external"}),
    )  # fmt: skip


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


def _cpu(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    graphs = ("cuda_graphs",) if summary.text("engine.cuda_graphs") in ("off", None) else ()
    return Lever(
        "host",
        "slow_cpu",
        (*graphs, "async_scheduling", "limit_cpu_threads"),
        "The same device is faster with another CPU.",
        symptoms=frozenset({"bandwidth"}),
    )


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


def _wider(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """More devices on each token help: that is no fault, but says that the work of one token decides."""
    if not change.raised:
        return None
    decode = change.best(("tpot", "itl"))
    return Lever(
        "decode.weights" if decode else "prefill.compute",
        "one_device_is_slow",
        ("tensor_parallel",),
        "More devices on each token are faster: the work itself holds the time.",
        strength=0.4,
    )


def _unknown(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """A version or a kernel library: something got slower, and only a profile says what."""
    return Lever(
        "unexplained",
        "regression",
        ("collect_missing_signals", "check_device_health"),
        f"{change.path} changed and it got slower; the numbers do not say where.",
        strength=0.45,
    )


def _sampling(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    return Lever(
        "host",
        "sampling",
        ("async_scheduling", "limit_cpu_threads"),
        "Without these sampling options the same tokens come faster.",
        ("tpot", "itl", "e2e", "throughput"),
        0.6,
        frozenset({"bandwidth"}),
    )


def _images(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    if not change.lowered and change.there is not None:
        return None
    return Lever(
        "context",
        "preprocessing",
        ("parallel_preprocessing", "preprocessing_cache"),
        "With smaller or fewer images the same service is faster.",
        ("ttft", "e2e", "throughput"),
        0.5,
    )


def _stream(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    return (
        Lever(
            "host",
            "flush_timer",
            ("flush_first_token_immediately",),
            "With a shorter flush interval the first token comes earlier.",
            ("ttft", "itl"),
            0.75,
            _ENGINE_SIDE | {"external"},
        )
        if change.lowered
        else None
    )


def _flag(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    return flag_lever(change) or _unknown(summary, machine, change)


def _policy(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """Another order of admission: fairer, or one that does not throw anybody out."""
    if at_least(summary.preemptions, 1) and at_most(change.point.number("preemptions_count"), 0):
        evicting = ("no_evict_scheduling", "admission_control")
        return Lever("kv.preempt", "admission_rule", evicting, "With another policy nobody is preempted.")
    fairer = ("fair_or_priority_scheduling",)
    return Lever("queue.policy", "policy", fairer, "Another scheduling policy waits less.", ("ttft", "e2e"))


_EAGER = _switch(
    "host",
    "eager_launches",
    ("cuda_graphs",),
    "With graphs the same steps are faster: their kernels were launched one by one.",
    ("tpot", "itl", "e2e", "throughput"),
    frozenset({"bandwidth"}),
)
_ASYNC = _switch(
    "host.scheduler",
    "step_gap",
    ("async_scheduling",),
    "With the next step scheduled ahead the device idles less.",
    ("tpot", "itl", "e2e", "throughput"),
)
_CACHE = _switch(
    "prefill.compute",
    "missed_prefix",
    ("prefix_caching",),
    "With prefix caching the same prompts start sooner.",
    ("ttft", "e2e", "throughput"),
    frozenset({"queueing"}),
)
_CHUNKS = _switch(
    "interference",
    "prefill_interference",
    ("interleave_decode_with_prefill", "cap_prefill_per_step"),
    "With chunked prefill decode goes on.",
    ("tpot", "itl", "e2e"),
    frozenset({"bandwidth", "queueing"}),
)
_POOL = _more(
    "kv.wait",
    "pool_too_small",
    ("raise_gpu_memory_utilization", "kv_cache_quantization"),
    "With a larger pool the same load is held.",
    symptoms=frozenset({"queueing"}),
)
_COPIES = _more(
    "queue.capacity",
    "overload",
    ("add_replicas", "autoscale_on_queue_depth"),
    "With more replicas the same load waits less.",
    ("ttft", "e2e"),
    frozenset({"compute"}),
)
_WORKERS = _more(
    "context",
    "preprocessing",
    ("parallel_preprocessing", "scale_api_servers"),
    "With more workers requests are prepared faster.",
    ("ttft", "e2e", "throughput"),
    frozenset({"queueing", "host"}),
)
_PREPARED = _more(
    "context",
    "preprocessing",
    ("preprocessing_cache",),
    "With a larger cache fewer images are prepared twice.",
    ("ttft", "e2e", "throughput"),
)

_LEVERS: Mapping[str, Callable[[Summary, Machine, Change], Lever | None]] = {
    "engine.gateway": _gateway,
    "engine.cuda_graphs": _EAGER,
    "engine.async_scheduling": _ASYNC,
    "engine.prefix_caching": _CACHE,
    "engine.chunked_prefill": _CHUNKS,
    "engine.prefill_decode_disaggregation": _disaggregated,
    "engine.max_num_seqs": _slots,
    "engine.effective_max_num_seqs": _slots,
    "engine.max_num_batched_tokens": _smaller_budget,
    "engine.prefill_chunk_tokens": _smaller_budget,
    "engine.max_prefills_per_step": _more("queue.budget", "serial_prefill", ("batch_prefill_across_requests",), "With several prompts a step the others start sooner.", ("ttft", "e2e", "throughput"), frozenset({"compute"})),
    "engine.gpu_memory_utilization": _POOL,
    "engine.kv_pool_tokens": _POOL,
    "engine.kv_pool_gb": _POOL,
    "engine.kv_dtype": _kv_format,
    "model.kv_dtype": _kv_format,
    "engine.quantization": _kernel,
    "engine.quant_kernel": _kernel,
    "engine.replicas": _COPIES,
    "engine.data_parallel": _COPIES,
    "engine.tensor_parallel": _wider,
    "engine.routing_policy": _routing,
    "engine.scheduler_policy": _policy,
    "engine.structured_output_backend": _grammar,
    "workload.structured_output": _grammar,
    "workload.structured_output_schema": _grammar,
    "engine.adapter_slots": _adapters,
    "workload.adapters_count": _adapters,
    "engine.api_server_workers": _servers,
    "engine.preprocess_workers": _WORKERS,
    "engine.preprocess_threads": _threads,
    "engine.preprocess_cache_gb": _PREPARED,
    "engine.stream_interval_ms": _stream,
    "engine.kv_transfer_backend": _switch("communication.network", "kv_transfer", ("enable_rdma_transfer",), "Over another transport the same requests are faster.", ("ttft", "e2e", "throughput")),
    "engine.kv_offload": _offload,
    "engine.attention_backend": _unknown,
    "engine.version": _unknown,
    "hardware.cpu_cores_count": _cpu,
    "hardware.cpu_arch": _cpu,
    "workload.sampling": _sampling,
    "workload.images_per_request": _images,
    "workload.image_width_px": _images,
    "workload.image_height_px": _images,
}  # fmt: skip


def lever_of(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """What the changed setting acts on; None where the entry says that this change, in this direction, means nothing."""
    if change.path.startswith("engine.extra_flags."):
        return _flag(summary, machine, change)
    choose = _LEVERS.get(change.path)
    return None if choose is None else choose(summary, machine, change)
