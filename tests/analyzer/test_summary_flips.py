"""One number changed, another answer: what each detector listens to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache

import pytest
from summary_documents import make_summary

from phasewise.analyzer.summary import explain_summary
from phasewise.rules.load import Rulebook, load_rulebook


@cache
def rules() -> Rulebook:
    return load_rulebook()


def changed(document: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """A copy with some paths set; a path into a list has its index as a part."""
    made = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: object = made
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]  # type: ignore[index]
        assert isinstance(node, dict)
        node[last] = value
    return made


def answer(document: Mapping[str, object]) -> tuple[str, str | None, list[str]]:
    verdict = explain_summary(document, rules())
    recommend = verdict["recommend"]
    assert isinstance(recommend, list)
    mechanism = verdict["mechanism"]
    return (
        str(verdict["primary"]),
        None if mechanism is None else str(mechanism),
        [str(r["technique"]) for r in recommend],
    )


SLOTS = make_summary(
    engine={"name": "vllm", "max_num_seqs": 24},
    workload={"concurrency": 200},
    observed={"requests_running": 24, "requests_waiting": 176, "kv_cache_usage_ratio": 0.3, "ttft_p50_ms": 21000, "preemptions_count": 0},
)  # fmt: skip
BUFFER = make_summary(
    engine={"gateway": "edge proxy", "gateway_buffer_bytes": 4096},
    workload={"streaming": True},
    client={"chunk_bytes": 200, "chunks_per_burst_count": 20, "burst_interval_p50_ms": 620, "ttft_p50_ms": 700},
    server={"itl_p50_ms": 31, "ttft_p50_ms": 80},
)
TIMER = make_summary(
    engine={"stream_interval_ms": 200},
    workload={"concurrency": 1},
    observed={"e2e_overhead_ratio": 0.02},
    client={"ttft_p50_ms": 260},
    server={"ttft_p50_ms": 70},
)
TRANSFER = make_summary(
    model={"kv_bytes_per_token": 160000},
    engine={"prefill_decode_disaggregation": True},
    workload={"input_tokens": 10000, "output_tokens": 100},
    observed={"kv_transfer_ms": 4000, "ttft_p50_ms": 5200, "prefill_p50_ms": 1000, "requests_waiting": 0},
)
ROOF = make_summary(
    hardware={"kind": "gpu", "memory_bandwidth_gb_per_s": 2000, "count": 1},
    model={"params_b": 13, "weight_dtype": "fp16"},
    workload={"concurrency": 1, "input_tokens": 300, "output_tokens": 500},
    observed={"tpot_p50_ms": 20},
)
BESIDE = make_summary(
    engine={"name": "vllm", "max_num_batched_tokens": 8192},
    workload={"groups": [{"name": "chat", "output_tokens": 300}, {"name": "files", "input_tokens": 40000}]},
    observed={"group": "chat", "tpot_p50_ms": 400, "requests_waiting": 0, "preemptions_count": 0},
    baseline={"differs": {"workload.groups": ["chat"]}, "group": "chat", "tpot_p50_ms": 25},
)
PREFIX = make_summary(
    engine={"prefix_caching": True},
    workload={"input_tokens": 9000, "shared_prefix_tokens": 8600, "concurrency": 2},
    observed={"prefix_cache_hit_ratio": 0.0, "ttft_p50_ms": 2400, "requests_waiting": 0},
)
COLD = make_summary(
    engine={"name": "vllm"},
    workload={"concurrency": 1, "input_tokens": 500},
    observed={"ttft_p50_ms": 150},
    requests=[{"ttft_p50_ms": 24000}, {"ttft_p50_ms": 150}, {"ttft_p50_ms": 140}],
)
ADAPTERS = make_summary(
    engine={"adapter_slots": 6},
    workload={"adapters_count": 40},
    observed={"ttft_p50_ms": 1700, "adapter_loads_count": 300},
)
DRAFTS = make_summary(
    engine={"speculation": {"method": "draft model", "draft_tokens": 4}},
    workload={"concurrency": 24},
    observed={"output_throughput_tok_per_s": 1500},
    baseline={"differs": {"engine.speculation.method": "none"}, "output_throughput_tok_per_s": 2100},
)
SERIAL = make_summary(
    hardware={"kind": "gpu", "peak_bf16_dense_tflops": 300},
    model={"params_b": 3, "weight_dtype": "bf16"},
    engine={"max_prefills_per_step": 1},
    workload={"concurrency": 20, "arrival": "burst", "input_tokens": 800},
    observed={"prefill_p50_ms": 900, "ttft_max_ms": 18500},
)
FRONT = make_summary(
    engine={"name": "vllm"},
    workload={"concurrency": 20},
    observed={"frontend_p50_ms": 1800, "ttft_p50_ms": 2600, "requests_waiting": 0},
)
GATEWAY = make_summary(
    engine={"gateway": "model router"},
    workload={"concurrency": 200, "num_requests": 2000, "output_tokens": 100},
    observed={"ttft_p50_ms": 6000, "output_throughput_tok_per_s": 900},
    baseline={"differs": {"engine.gateway": "none"}, "ttft_p50_ms": 500, "output_throughput_tok_per_s": 3100},
)
POOL = make_summary(
    engine={"kv_pool_tokens": 30000, "max_num_seqs": 128},
    workload={"input_tokens": 2500, "output_tokens": 500, "concurrency": 60},
    observed={"requests_running": 10, "requests_waiting": 50, "kv_cache_usage_ratio": 0.99},
)


@pytest.mark.parametrize(
    ("document", "expected", "changes", "instead"),
    [
        (SLOTS, "slot_limit", {"observed.kv_cache_usage_ratio": 0.99, "observed.preemptions_count": 60}, "pool_full"),
        (SLOTS, "slot_limit", {"observed.requests_running": 9, "observed.requests_waiting": 0}, "not slot_limit"),
        (BUFFER, "proxy_buffering", {"client.chunks_per_burst_count": 1, "client.burst_interval_p50_ms": 31, "client.ttft_p50_ms": 82}, None),
        (TIMER, "flush_timer", {"client.ttft_p50_ms": 72}, None),
        (TRANSFER, "kv_transfer", {"observed.kv_transfer_ms": 40, "observed.ttft_p50_ms": 1080}, "own_prompt"),
        (ROOF, "memory_roof", {"observed.tpot_p50_ms": 190}, None),
        (ROOF, "memory_roof", {"workload.input_tokens": 20000, "observed.ttft_p50_ms": 60000, "observed.e2e_p50_ms": 70000}, None),
        (BESIDE, "prefill_interference", {"observed.tpot_p50_ms": 27}, None),
        (PREFIX, "missed_prefix", {"observed.prefix_cache_hit_ratio": 0.93}, None),
        (COLD, "cold_start", {"requests.0.ttft_p50_ms": 170}, None),
        (COLD, "cold_start", {"engine.prefix_caching": True, "workload.prefix_pattern": "identical_repeat"}, None),
        (ADAPTERS, "adapter_loading", {"engine.adapter_slots": 64, "observed.adapter_loads_count": 0}, None),
        (DRAFTS, "costly_drafts", {"baseline.output_throughput_tok_per_s": 700}, None),
        (SERIAL, "serial_prefill", {"observed.prefill_p50_ms": 18, "observed.ttft_max_ms": 30}, "not serial_prefill"),
        (FRONT, "before_admission", {"observed.frontend_p50_ms": 40}, None),
        (GATEWAY, "gateway_limit", {"baseline.ttft_p50_ms": 5900, "baseline.output_throughput_tok_per_s": 905}, None),
        (POOL, "pool_too_small", {"engine.kv_pool_tokens": 900000, "observed.kv_cache_usage_ratio": 0.05, "observed.requests_running": 60, "observed.requests_waiting": 0}, None),
    ],
)  # fmt: skip
def test_the_deciding_number_decides(
    document: Mapping[str, object], expected: str, changes: Mapping[str, object], instead: str | None
) -> None:
    assert answer(document)[1] == expected
    after = answer(changed(document, changes))[1]
    if instead is not None and instead.startswith("not "):
        assert after != instead.removeprefix("not ")
    else:
        assert after == instead


def test_a_healthy_run_with_the_same_pool_usage_speaks_against_memory() -> None:
    full = {"kv_cache_usage_ratio": 0.98, "requests_waiting": 20, "ttft_p50_ms": 9000}
    alone = make_summary(observed=full)
    assert answer(alone)[0] == "kv"
    beside = make_summary(
        observed=full, baseline={"differs": {"engine.version": "1.0"}, "kv_cache_usage_ratio": 0.98, "ttft_p50_ms": 600}
    )
    assert answer(beside)[0] != "kv"


def test_what_is_in_force_already_is_not_offered() -> None:
    gap = {"step_device_ms": 20, "step_gap_ms": 9}
    assert "async_scheduling" in answer(make_summary(engine={"async_scheduling": False}, observed=gap))[2]
    primary, _, changes = answer(make_summary(engine={"async_scheduling": True}, observed=gap))
    assert primary == "host" and "async_scheduling" not in changes


def test_weights_that_are_small_already_are_not_quantized_again() -> None:
    assert "weight_only_quantization" in answer(ROOF)[2]
    small = changed(ROOF, {"model.weight_dtype": "int4", "observed.tpot_p50_ms": 6})
    primary, _, changes = answer(small)
    assert primary == "bandwidth" and "weight_only_quantization" not in changes


def test_kv_bytes_that_outweigh_the_weights_change_the_advice() -> None:
    many = changed(
        ROOF,
        {
            "model.kv_bytes_per_token": 800000, "workload.concurrency": 32, "workload.input_tokens": 4000,
            "observed.tpot_p50_ms": 95, "observed.requests_running": 32,
        },
    )  # fmt: skip
    verdict = explain_summary(many, rules())
    assert verdict["cause"] == "decode.kv"
    assert "kv_cache_quantization" in answer(many)[2]


def test_spare_device_memory_is_used_before_anything_is_bought() -> None:
    full = {"kv_cache_usage_ratio": 1.0, "preemptions_count": 9}
    assert (
        answer(make_summary(engine={"gpu_memory_utilization": 0.55}, observed=full))[2][0]
        == "raise_gpu_memory_utilization"
    )
    assert (
        "raise_gpu_memory_utilization"
        not in answer(make_summary(engine={"gpu_memory_utilization": 0.95}, observed=full))[2]
    )


def test_routing_is_blamed_only_with_several_replicas() -> None:
    several = changed(PREFIX, {"engine.replicas": 6, "engine.routing_policy": "random"})
    assert answer(several)[1:] == ("scattered_prefix", ["cache_aware_routing", "kv_offload_tier"])
    assert answer(changed(several, {"engine.routing_policy": "prefix hash"}))[1] == "missed_prefix"


def test_a_leap_of_ttft_at_an_even_pace_is_admission() -> None:
    document = make_summary(
        workload={"concurrency": 64, "input_tokens": 2000, "output_tokens": 300},
        observed={"ttft_p50_ms": 14000, "tpot_p50_ms": 31},
        sweep=[
            {"differs": {"workload.concurrency": 16}, "ttft_p50_ms": 240, "tpot_p50_ms": 26},
            {"differs": {"workload.concurrency": 32}, "ttft_p50_ms": 400, "tpot_p50_ms": 29},
        ],
    )
    assert answer(document)[:2] == ("queueing", "admission_jump")
    machine = {"kind": "gpu", "memory_gb": 24}
    model = {"params_b": 7, "weight_dtype": "bf16", "kv_bytes_per_token": 500000}
    small = changed(document, {"hardware": machine, "model": model})
    assert answer(small)[0] == "kv", "by estimate the pool holds some ten such sequences"


def test_a_clock_that_fell_by_itself_asks_for_the_device() -> None:
    document = make_summary(
        observed={"sm_clock_mhz": 900, "tpot_p50_ms": 80},
        baseline={"differs": {}, "sm_clock_mhz": 1900, "tpot_p50_ms": 40},
    )
    primary, _, changes = answer(document)
    assert (primary, changes[0]) == ("inconclusive", "check_device_health")


def test_swapping_alone_is_too_little() -> None:
    assert answer(make_summary(observed={"swap_out_mb_per_s": 90}))[0] == "inconclusive"


def test_one_request_an_arm_decides_nothing() -> None:
    document = make_summary(
        engine={"gateway": "proxy"},
        workload={"concurrency": 1, "streaming": False},
        observed={"e2e_p50_ms": 40000, "samples_count": 1},
        baseline={"differs": {"engine.gateway": "none"}, "e2e_p50_ms": 11000, "samples_count": 1},
    )
    assert answer(document)[0] == "inconclusive"
