"""Names of engine settings (those of the engine section of `phasewise-summary/1`) and how a user reads what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SETTINGS: tuple[str, ...] = (
    "max_num_seqs", "effective_max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "max_prefills_per_step",
    "prefill_bucket_tokens", "max_model_len", "gpu_memory_utilization", "kv_pool_tokens", "kv_pool_gb",
    "state_cache_slots", "kv_offload", "weight_offload", "prefix_caching", "chunked_prefill", "cuda_graphs",
    "async_scheduling", "scheduler_policy", "tensor_parallel", "pipeline_parallel", "data_parallel", "replicas",
    "routing_policy", "prefill_decode_disaggregation", "kv_transfer_backend", "quantization", "quant_kernel", "kv_dtype",
    "attention_backend", "speculation", "structured_output_backend", "adapter_slots", "api_server_workers",
    "preprocess_workers", "preprocess_threads", "preprocess_cache_gb", "stream_interval_ms", "gateway",
    "block_size_tokens", "kv_blocks_total",
)  # fmt: skip

# Settings that an engine may tell in the resource of its spans.
SPAN_SETTINGS: tuple[str, ...] = (*SETTINGS, "accelerator", "weight_bits", "kv_bits")

# What an engine's own answers, arguments and start-up log may tell (rules/engine_facts.py).
FACTS: tuple[str, ...] = (*SETTINGS, "engine_version", "model", "served_model", "weight_dtype", "role")

# Data-parallel ranks that the metrics of one process show: its pool is theirs together, its slots each rank's.
RANKS = "data_parallel_local"

# Who is believed where sources differ, the first before the others: what the operator states, then what the running process says
# of itself, then what it was asked to be. A source that is not named here comes last.
PRECEDENCE: tuple[str, ...] = ("user", "server_info", "scrape", "resource", "startup_log", "pod_arguments")

# What decides where a roofline is refused: the accelerator's name, or its own figures.
MEASURE_IT = "measure it on its own machine: phasewise calibrate"
NAME_IT = f"name the accelerator in phasewise.toml ([hardware] accelerator; phasewise rules list gpus), or {MEASURE_IT}"

# What a card tells a user who wants to know a value that nobody sent. Signals without an entry: the text of the signal.
HOW_TO_READ: Mapping[str, str] = MappingProxyType(
    {
        "slots_limit_count": "start-up log or arguments: --max-num-seqs (vLLM), --max-running-requests (SGLang)",
        "slots_full_ratio": "scrape /metrics: running and waiting requests over time",
        "throughput_flat": "repeat the load with a higher slot limit and compare output tokens per second",
        "utilization_ratio": "scrape /metrics: running requests against the slot limit",
        "waiting_max": "scrape /metrics: vllm:num_requests_waiting, sglang:num_queue_reqs",
        "kv_usage_max_ratio": "scrape /metrics: vllm:kv_cache_usage_perc, sglang:token_usage",
        "kv_usage_p95_ratio": "scrape /metrics: vllm:kv_cache_usage_perc, sglang:token_usage",
        "kv_need_tokens": "prompt and output lengths of the requests in flight (request spans)",
        "kv_pool_tokens": "start-up log: GPU KV cache size (vLLM), max_total_num_tokens (SGLang)",
        "kv_dtype_bits": "vllm:cache_config_info label cache_dtype, or SGLang /get_server_info kv_cache_dtype",
        "preemptions_count": "scrape /metrics: vllm:num_preemptions_total; SGLang counts retractions in its log",
        "prefix_caching": "vllm:cache_config_info label enable_prefix_caching, or SGLang /get_server_info disable_radix_cache",
        "prefix_hit_ratio": "scrape /metrics: vllm:prefix_cache_hits over vllm:prefix_cache_queries; sglang:cache_hit_rate",
        "prefix_reusable_ratio": "share of prompt tokens that an earlier prompt had: from request logs with hashed prefixes",
        "spec_acceptance_ratio": "scrape /metrics: accepted over drafted tokens (vllm:spec_decode_*), sglang:spec_accept_length",
        "decode_batch_mean": "request spans of all requests, or running requests in /metrics",
        "decode_bound": NAME_IT,
        "prefill_bound": NAME_IT,
        "decode_kv_io_ratio": "name the model: bytes follow from its shape, batch and context lengths",
        "decode_weight_io_ratio": "name the model: bytes follow from its shape, batch and context lengths",
        "device_has_fp8": NAME_IT,
        "device_has_faster_dtype": NAME_IT,
        "device_has_int8": NAME_IT,
        "device_kind": NAME_IT,
        "devices_count": "arguments of the engine, or nvidia-smi -L",
        "weight_bits": "dtype and quantization in the engine's start-up log",
        "tensor_parallel_count": "arguments: --tensor-parallel-size (vLLM), --tp-size (SGLang)",
        "chunked_prefill": "start-up log or arguments of the engine; vLLM V1 chunks unless told otherwise",
        "step_token_budget_tokens": "start-up log or arguments: --max-num-batched-tokens (vLLM), --chunked-prefill-size (SGLang)",
        "cuda_graphs": "arguments: --enforce-eager (vLLM), --disable-cuda-graph (SGLang)",
        "kv_offload": "arguments: --kv-offloading-size (vLLM), --enable-hierarchical-cache (SGLang)",
        "memory_utilization_ratio": "vllm:cache_config_info label gpu_memory_utilization, or mem_fraction_static in SGLang's server info",
        "priority_scheduling": "arguments: --scheduling-policy (vLLM), --enable-priority-scheduling (SGLang)",
        "disaggregated": "arguments: --kv-transfer-config (vLLM), --disaggregation-mode (SGLang)",
        "speculation": "arguments: --speculative-config (vLLM), --speculative-algorithm (SGLang)",
    }
)
