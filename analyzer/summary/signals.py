"""A summary in the signal vocabulary of the rules, so that technique files judge it as they judge telemetry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phasewise.analyzer.conditions import Value
from phasewise.analyzer.summary.decode import batch_of, drafting, step_s
from phasewise.analyzer.summary.hypothesis import Hypothesis
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.memory import pool_tokens
from phasewise.analyzer.summary.points import Summary, first, near, ratio
from phasewise.analyzer.summary.prefix import reuse
from phasewise.collector.context import Setting
from phasewise.rules.engine_settings import SETTINGS

# Mechanisms that are, by themselves, the truth of a signal.
_FOUND: Mapping[str, tuple[str, ...]] = {
    "proxy_buffering": ("proxy_buffering",),
    "gateway_limit": ("gateway_limit",),
    "ttft_definition": ("ttft_definition_conflict",),
    "load_generator": ("load_generator_limit",),
    "blocked_event_loop": ("blocking_span",),
    "grammar_compilation": ("grammar_first_use",),
    "grammar_per_token": ("grammar_per_token",),
    "slow_kernel": ("quant_kernel_slow",),
    "slow_collectives": ("parallel_slowdown",),
}
# From which strength on a hypothesis that did not win still counts as a fact for the conditions of techniques.
_FACT = 0.6


def signals_of(summary: Summary, machine: Machine, hypotheses: Iterable[Hypothesis]) -> dict[str, Value]:
    """Every signal the summary tells; what it does not tell is absent."""
    found = {
        **_load(summary),
        **_memory(summary, machine),
        **_lengths_and_phases(summary),
        **_roof(summary, machine),
        **_settings(summary, machine),
        **_host(summary),
        **_around(summary),
    }
    for one in hypotheses:
        for name in _FOUND.get(one.mechanism, ()) if one.strength >= _FACT else ():
            found[name] = True
    return {name: value for name, value in found.items() if value is not None}


def settings_of(summary: Summary) -> dict[str, Setting]:
    """Engine settings as the sender states them."""
    found: dict[str, Setting] = {}
    for name in SETTINGS:
        value = summary.settings.raw(f"engine.{name}")
        if isinstance(value, str | int | float | bool):
            found[name] = Setting(value, "summary")
    return found


def _load(summary: Summary) -> dict[str, Value]:
    limit = summary.count("engine.effective_max_num_seqs") or summary.count("engine.max_num_seqs")
    running, waiting = summary.peak("requests_running"), summary.waiting
    in_flight = summary.in_flight
    full: float | None = None
    if limit and running is not None:
        full = 1.0 if near(running, limit, 0.1) else 0.0 if running < 0.9 * limit else None
    elif limit and in_flight and in_flight > limit:
        full = 1.0
    return {
        "requests_count": first((summary.number("samples_count"), summary.count("workload.num_requests"))),
        "concurrency_mean": in_flight,
        "running_mean": summary.number("requests_running"),
        "running_max": running,
        "waiting_mean": summary.number("requests_waiting"),
        "waiting_max": waiting,
        "slots_limit_count": limit,
        "slots_full_ratio": full,
        "arrival_rate_per_s": summary.count("workload.request_rate_per_s"),
        "utilization_ratio": min(1.0, running / limit) if limit and running is not None else None,
        "replicas_count": first((summary.count("engine.replicas"), summary.count("engine.data_parallel"))),
        "classes_count": _groups(summary),
    }


def _groups(summary: Summary) -> float | None:
    groups = summary.settings.raw("workload.groups")
    return float(len(groups)) if isinstance(groups, list) and groups else None


def _memory(summary: Summary, machine: Machine) -> dict[str, Value]:
    tokens, load = summary.sequence_tokens, summary.in_flight
    preempted, samples = summary.preemptions, summary.number("samples_count") or summary.count("workload.num_requests")
    tier = summary.text("engine.kv_offload")
    return {
        "kv_usage_p95_ratio": summary.kv_usage,
        "kv_usage_max_ratio": summary.kv_usage,
        "kv_pool_tokens": pool_tokens(summary, machine),
        "kv_need_tokens": tokens * load if tokens and load else None,
        "kv_bytes_per_token": machine.kv_bytes_per_token,
        "preemptions_count": preempted,
        "preemptions_per_request": ratio(preempted, samples),
        "kv_offload": None if tier is None else tier.lower() != "none",
        "kv_dtype_bits": machine.kv_bits,
    }


def _lengths_and_phases(summary: Summary) -> dict[str, Value]:
    prompt, output = summary.input_tokens, summary.output_tokens
    found = reuse(summary)
    budget = summary.count("engine.max_num_batched_tokens")
    whole = summary.typical_s("e2e")
    return {
        "prefix_caching": summary.truth("engine.prefix_caching"),
        "prefix_hit_ratio": first((summary.number("prefix_cache_hit_ratio"), found.hit if found else None)),
        "prefix_reusable_ratio": found.reusable if found else None,
        "prefix_evicted_ratio": ratio(summary.number("prefix_evicted_tokens_count"), prompt),
        "input_tokens_p50": prompt,
        "output_tokens_p50": output,
        "prefill_token_ratio": ratio(prompt, prompt + output) if prompt is not None and output is not None else None,
        "ttft_p50_s": summary.typical_s("ttft"),
        "ttft_p95_s": summary.tail_s("ttft"),
        "tpot_p50_s": summary.typical_s("tpot"),
        "queue_p95_s": first((summary.seconds("queue_p99"), summary.seconds("queue_p50"))),
        "prefill_rate_tok_per_s": summary.number("prefill_rate_tok_per_s"),
        "queue_ratio": ratio(summary.seconds("queue_p50"), whole),
        "prefill_ratio": ratio(summary.typical_s("prefill"), whole),
        "step_token_budget_tokens": budget,
        "prompts_over_budget_ratio": (1.0 if prompt > budget else 0.0) if prompt and budget else None,
        "prefill_requests_per_step_mean": first(
            (summary.number("prefill_requests_per_step_count"), summary.count("engine.max_prefills_per_step"))
        ),
    }


def _roof(summary: Summary, machine: Machine) -> dict[str, Value]:
    batch, pace = batch_of(summary), step_s(summary)
    context = (summary.input_tokens or 0.0) + (summary.output_tokens or 0.0) / 2
    read = machine.step_bytes(batch or 1.0, context) if summary.input_tokens else None
    exact = machine.read_low_bytes == machine.read_high_bytes
    floor = machine.floor_s(batch or 1.0, context) if exact else None
    prompt = summary.input_tokens
    least, took = machine.prefill_floor_s(prompt) if prompt else None, summary.typical_s("prefill")
    kv_share = ratio(read[1], sum(read)) if read and exact and machine.kv_bytes_per_token else None
    if kv_share is None and batch == 1 and (prompt or 0.0) <= 4096:
        kv_share = 0.05  # one short sequence: the weights are all but everything
    return {
        "decode_batch_mean": batch,
        "decode_over_roof_ratio": ratio(pace, floor),
        "prefill_over_roof_ratio": ratio(took, least),
        "decode_kv_io_ratio": kv_share,
        "decode_weight_io_ratio": None if kv_share is None else 1 - kv_share,
    }


def _settings(summary: Summary, machine: Machine) -> dict[str, Value]:
    graphs, policy = summary.text("engine.cuda_graphs"), (summary.text("engine.scheduler_policy") or "").lower()
    gpu, offloaded = machine.gpu, summary.text("engine.weight_offload")
    stated = summary.settings.raw("engine.speculation") is not None
    return {
        "device_kind": machine.kind if machine.kind in ("gpu", "npu", "cpu") else None,
        "device_has_fp8": gpu.multiplies("fp8") if gpu else None,
        "device_has_int8": gpu.multiplies("int8") if gpu else None,
        "devices_count": summary.count("hardware.count"),
        "tensor_parallel_count": summary.count("engine.tensor_parallel"),
        "weight_bits": machine.weight_bits,
        "memory_utilization_ratio": summary.count("engine.gpu_memory_utilization"),
        "chunked_prefill": summary.truth("engine.chunked_prefill"),
        "speculation": drafting(summary.observed) if stated else None,
        "spec_acceptance_ratio": summary.number("spec_acceptance_ratio"),
        "cuda_graphs": None if graphs is None else graphs != "off",
        "async_scheduling": summary.truth("engine.async_scheduling"),
        "disaggregated": summary.truth("engine.prefill_decode_disaggregation"),
        "priority_scheduling": "priority" in policy if policy else None,
        "context_limit_tokens": summary.count("engine.max_model_len"),
        "weights_offloaded": None if offloaded is None else offloaded.lower() != "none",
        "routing_policy": summary.text("engine.routing_policy"),
        "numa_nodes_count": summary.count("hardware.count") if machine.kind == "cpu" else None,
        "adapter_slots_count": summary.count("engine.adapter_slots"),
        "adapters_count": summary.count("workload.adapters_count"),
        "structured_output": summary.truth("workload.structured_output"),
        "api_servers_count": summary.count("engine.api_server_workers"),
        "preprocess_workers_count": summary.count("engine.preprocess_workers"),
        "images_per_request_mean": summary.count("workload.images_per_request"),
        "agent_turns_count": summary.count("workload.agent_turns_count"),
        "serving_timer_s": ratio(summary.count("engine.stream_interval_ms"), 1000.0),
    }


def _host(summary: Summary) -> dict[str, Value]:
    step, device, gap = (summary.seconds(name) for name in ("step", "step_device", "step_gap"))
    if gap is None and step is not None and device is not None:
        gap = max(0.0, step - device)
    times = [t for p in summary.requests if (t := p.typical_s("ttft")) is not None]
    return {
        "device_errors_count": summary.peak("gpu_health_errors_count"),
        "step_gap_ratio": ratio(gap, step or (gap + device if gap is not None and device is not None else None)),
        "cpu_busy_ratio": ratio(
            summary.number("cpu_cores_used"),
            summary.number("cpu_cores_limit") or summary.count("hardware.cpu_cores_count"),
        ),
        "cpu_throttled_ratio": summary.number("cpu_throttled_ratio"),
        "compiles_count": summary.peak("compiles_count"),
        "first_request_ratio": ratio(times[0], min(times[1:])) if len(times) >= 2 else None,
        "adapter_loads_count": summary.peak("adapter_loads_count"),
    }


def _around(summary: Summary) -> dict[str, Value]:
    ttft, whole = summary.typical_s("ttft"), summary.typical_s("e2e")
    calls = [s for s in summary.stages if s.kind == "call" and s.seconds is not None]
    total = whole or sum(s.seconds or 0.0 for s in summary.stages if s.parent is None) or None
    many = [s for s in calls if (s.calls or 1) > 1 and not s.parallel]
    most = max(many, key=lambda s: s.seconds or 0.0, default=None)
    return {
        "frontend_ratio": ratio(first((summary.typical_s("frontend"), summary.seconds("validation_p50"))), ttft),
        "preprocess_ratio": ratio(summary.seconds("preprocess_p50"), whole or ttft),
        "context_calls_count": most.calls if most else None,
        "context_calls_ratio": ratio(most.seconds, total) if most else None,
        "slow_call_ratio": ratio(max((s.per_call_s or 0.0 for s in calls), default=None), total),
        "kv_transfer_ratio": ratio(summary.seconds("kv_transfer"), whole or ttft),
    }
