"""Situations for tests of matching: what was found, told by rich signals or by hardly any."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.conditions import Situation, Value
from phasewise.analyzer.matching import Matched
from phasewise.collector.context import Setting
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

# What a queue at its slot limit looks like in scraped telemetry of a real engine, nearly empty KV pool.
OVERLOAD: Mapping[str, Value] = {
    "status": "slow", "slots_full_ratio": 0.98, "slots_limit_count": 8.0, "running_max": 8.0, "waiting_max": 88.0, "utilization_ratio": 0.99,
    "kv_usage_max_ratio": 0.07, "kv_usage_p95_ratio": 0.06, "preemptions_count": 0.0, "kv_dtype_bits": 16.0, "prefix_caching": True,
    "prefix_hit_ratio": 0.0, "decode_batch_mean": 7.8, "decode_bound": "bandwidth", "decode_kv_io_ratio": 0.04, "decode_weight_io_ratio": 0.96,
    "weight_bits": 16.0, "input_tokens_p50": 60.0, "input_tokens_p95": 90.0, "replicas_count": 1.0, "device_kind": "cpu", "contention_ratio": 0.9,
}  # fmt: skip
STARVED: Mapping[str, Value] = {
    "status": "slow", "kv_usage_max_ratio": 1.0, "kv_usage_p95_ratio": 0.99, "preemptions_count": 22.0, "kv_dtype_bits": 16.0, "waiting_max": 8.0,
    "slots_full_ratio": 0.0, "slots_limit_count": 64.0, "memory_utilization_ratio": None, "prefix_caching": False, "decode_batch_mean": 6.0,
    "kv_pool_tokens": 4096.0, "kv_need_tokens": 9000.0, "decode_bound": "bandwidth",
}  # fmt: skip
MIXED: Mapping[str, Value] = {
    "status": "slow", "kv_usage_max_ratio": 0.3, "preemptions_count": 0.0, "kv_dtype_bits": 16.0, "long_prompt_ratio": 0.85, "chunked_prefill": True,
    "prefix_caching": True, "prefix_hit_ratio": 0.0, "input_tokens_p50": 80.0, "input_tokens_p95": 3000.0, "decode_batch_mean": 5.0,
}  # fmt: skip

# 64 slots over a pool for 10 requests: preemptions are many and cheap, the wait for blocks holds the time.
SHORT_POOL: Mapping[str, Value] = {
    "status": "slow", "kv_usage_max_ratio": 1.0, "kv_usage_p95_ratio": 1.0, "preemptions_count": 420.0, "preemptions_per_request": 1.4,
    "kv_dtype_bits": 16.0, "kv_pool_tokens": 6000.0, "kv_need_tokens": 117_600.0, "waiting_max": 189.0, "requests_count": 300.0,
    "slots_full_ratio": 0.0, "memory_utilization_ratio": 0.9, "prefix_caching": True, "input_tokens_p50": 200.0, "input_tokens_p95": 200.0,
    "decode_batch_mean": 20.0, "utilization_ratio": 0.2, "paged_kv": True, "replicas_count": 1.0,
}  # fmt: skip
SHORT_POOL_SHARES = {"kv.wait": 0.887, "kv.preempt": 0.034, "decode.weights": 0.047, "decode.kv": 0.029}
# 512 tokens a step, prompts of 2000 tokens that queue for it.
SHORT_BUDGET: Mapping[str, Value] = {
    "status": "slow", "kv_usage_max_ratio": 0.02, "preemptions_count": 0.0, "slots_full_ratio": 0.08, "chunked_prefill": None,
    "step_token_budget_tokens": 512.0, "long_prompt_ratio": 0.0, "input_tokens_p50": 2000.0, "input_tokens_p95": 2000.0,
    "waiting_max": 20.0, "requests_count": 300.0, "prefix_caching": True, "replicas_count": 1.0, "decode_batch_mean": 6.0,
}  # fmt: skip
SHORT_BUDGET_SHARES = {
    "queue.budget": 0.667, "prefill.compute": 0.054, "interference": 0.215, "decode.weights": 0.032, "decode.kv": 0.032,
}  # fmt: skip


def make_situation(
    cause: str | None,
    signals: Mapping[str, Value] | None = None,
    shares: Mapping[str, float] | None = None,
    primary: str | None = None,
    engine: str | None = "vllm",
    version: str | None = "0.32.0",
    settings: Mapping[str, Setting] | None = None,
) -> Situation:
    return Situation(
        primary=primary or CLASS_OF_CAUSE[cause or "unexplained"],
        cause=cause,
        shares=shares or {},
        signals=signals or {},
        engine=engine,
        engine_version=version,
        settings=settings or {},
    )


def offered(matched: Matched) -> list[object]:
    return [item["technique"] for item in matched.recommend]


def refused(matched: Matched) -> dict[object, dict[str, object]]:
    return {item["technique"]: item for item in matched.will_not_help}
