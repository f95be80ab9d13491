"""The closed vocabularies: causes and their classes, the signals a rule may ask for.

Causes and classes are those of architecture section 3. A signal is one number (or word, or truth value) about the window
under question; it is computed from telemetry in ``analyzer/signals.py`` or from a summary in ``analyzer/summary``, and a
rule file may name nothing else. ``None`` always means unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CLASS_OF_CAUSE: Mapping[str, str] = MappingProxyType(
    {
        "queue.slots": "queueing",
        "queue.capacity": "queueing",
        "queue.empty_slots": "queueing",
        "queue.budget": "queueing",
        "queue.window": "queueing",
        "queue.policy": "queueing",
        "queue.head_of_line": "queueing",
        "queue.upstream": "queueing",
        "kv.wait": "kv",
        "kv.preempt": "kv",
        "kv.evicted": "kv",
        "kv.load": "kv",
        "prefill.compute": "compute",
        "decode.compute": "compute",
        "interference": "compute",
        "decode.weights": "bandwidth",
        "decode.kv": "bandwidth",
        "prefill.attention_io": "bandwidth",
        "context": "context",
        "external": "external",
        "client": "external",
        "communication.network": "external",
        "communication.node": "external",
        "host": "host",
        "host.scheduler": "host",
        "cold_start": "host",
        "unexplained": "inconclusive",
    }
)
CAUSES: tuple[str, ...] = tuple(CLASS_OF_CAUSE)
CLASSES: tuple[str, ...] = (
    "queueing",
    "kv",
    "compute",
    "bandwidth",
    "context",
    "external",
    "host",
    "inconclusive",
)
# Waiting for others: what a healthy deployment has little of.
CONTENTION: frozenset[str] = frozenset(
    cause for cause in CAUSES if cause.startswith(("queue.", "kv.")) or cause in ("interference", "cold_start")
)


def cause_column(cause: str) -> str:
    """Name of the column of `requests` that holds the seconds booked to `cause`."""
    return f"cause_{cause.replace('.', '_')}_s"


CAUSE_COLUMNS: tuple[str, ...] = tuple(cause_column(cause) for cause in CAUSES)


@dataclass(frozen=True, slots=True)
class Signal:
    """unit: as in the names of fields; text: what is measured, over which rows."""

    unit: str
    text: str


def _signals(**entries: tuple[str, str]) -> Mapping[str, Signal]:
    return MappingProxyType({name: Signal(*entry) for name, entry in entries.items()})


SIGNALS: Mapping[str, Signal] = _signals(
    # what was found
    primary=("word", "class of the verdict"),
    cause=("word", "cause of the verdict"),
    contention_ratio=("ratio", "contention causes as a share of the affected requests' end-to-end seconds"),
    # load and slots
    requests_count=("count", "served requests in the window"),
    concurrency_mean=("count", "requests in the engine at once, mean over time"),
    running_mean=("count", "running requests, mean over samples"),
    running_max=("count", "running requests, maximum over samples"),
    waiting_mean=("count", "waiting requests, mean over samples"),
    waiting_max=("count", "waiting requests, maximum over samples"),
    slots_limit_count=(
        "count",
        "sequences the engine lets run at once: its setting, else the plateau of running while some wait",
    ),
    slots_full_ratio=("ratio", "share of samples with waiting requests in which running stands at the slot limit"),
    arrival_rate_per_s=("per second", "requests arriving"),
    arrival_cv2=("ratio", "squared coefficient of variation of inter-arrival times"),
    utilization_ratio=("ratio", "slots in use as a share of the slot limit, mean over time"),
    throughput_flat=("truth", "more running sequences did not raise tokens per second"),
    replicas_count=("count", "engine replicas that served the window"),
    replica_imbalance_ratio=("ratio", "largest replica's share of waiting over its share of requests"),
    tenants_count=("count", "tenants seen"),
    top_tenant_ratio=("ratio", "share of input tokens from the largest tenant"),
    classes_count=("count", "declared request classes or priorities seen"),
    offline_ratio=("ratio", "share of requests of class offline"),
    # KV memory
    kv_usage_p95_ratio=("ratio", "used share of the KV pool, 95th percentile over samples"),
    kv_usage_max_ratio=("ratio", "used share of the KV pool, maximum over samples"),
    kv_pool_tokens=("tokens", "capacity of the KV pool"),
    kv_need_tokens=("tokens", "KV tokens that the requests in flight would fill at their full length"),
    kv_bytes_per_token=("bytes", "KV bytes of one token, all layers"),
    preemptions_count=("count", "preemptions or retractions in the window"),
    preemptions_per_request=("ratio", "preemptions over served requests"),
    kv_offload=("truth", "a second KV tier is configured"),
    kv_dtype_bits=("count", "bits of one KV element"),
    paged_kv=("truth", "the engine pages its KV cache"),
    # prefix cache
    prefix_caching=("truth", "prefix caching is switched on"),
    prefix_hit_ratio=("ratio", "prompt tokens taken from the prefix cache over those looked up"),
    prefix_reusable_ratio=("ratio", "share of prompt tokens that some earlier request already had"),
    prefix_missed_ratio=("ratio", "share of prompt tokens that an earlier request had and that were computed again"),
    # lengths
    input_tokens_p50=("tokens", "prompt length, median"),
    input_tokens_p95=("tokens", "prompt length, 95th percentile"),
    output_tokens_p50=("tokens", "output length, median"),
    prefill_token_ratio=("ratio", "prompt tokens over all tokens"),
    long_prompt_ratio=("ratio", "share of prompt tokens in prompts at least four times the median length"),
    # phases
    ttft_p50_s=("seconds", "time to first token, median, engine boundary"),
    ttft_p95_s=("seconds", "time to first token, 95th percentile, engine boundary"),
    tpot_p50_s=("seconds", "time per output token, median"),
    queue_p95_s=("seconds", "engine queue time, 95th percentile"),
    prefill_rate_tok_per_s=("tokens per second", "uncached prompt tokens over prefill time, median"),
    queue_ratio=("ratio", "queue as a share of end-to-end seconds of affected requests"),
    prefill_ratio=("ratio", "prefill as a share of end-to-end seconds of affected requests"),
    decode_ratio=("ratio", "decode as a share of end-to-end seconds of affected requests"),
    interference_ratio=("ratio", "others' prefill as a share of end-to-end seconds of affected requests"),
    # roofline
    decode_batch_mean=("count", "sequences decoding together, mean"),
    decode_bound=(
        "word",
        "bandwidth, compute or overhead: what bounds the decode step; unknown on an unknown device between the ridges",
    ),
    prefill_bound=("word", "bandwidth, compute or overhead: what bounds prefill"),
    decode_weight_io_ratio=("ratio", "weight bytes over all bytes of a decode step"),
    decode_kv_io_ratio=("ratio", "KV bytes over all bytes of a decode step"),
    # the machine and the engine's settings
    device_kind=("word", "gpu, cpu, tpu or npu"),
    device_has_fp8=("truth", "the device multiplies FP8"),
    device_has_int8=("truth", "the device multiplies INT8"),
    devices_count=("count", "accelerators of one replica"),
    tensor_parallel_count=("count", "tensor-parallel degree"),
    weight_bits=("count", "bits of one weight as stored"),
    memory_utilization_ratio=("ratio", "share of device memory the engine may use"),
    step_token_budget_tokens=("tokens", "most tokens of one engine step"),
    prompts_over_budget_ratio=("ratio", "share of prompts longer than the step budget"),
    chunked_prefill=("truth", "prompts are prefilled in chunks beside decoding"),
    continuous_batching=("truth", "sequences join and leave the batch between steps"),
    flash_attention=("truth", "attention never writes the score matrix to memory"),
    speculation=("truth", "speculative decoding is on"),
    spec_acceptance_ratio=("ratio", "accepted over drafted tokens"),
    cuda_graphs=("truth", "decode runs from captured graphs"),
    disaggregated=("truth", "prefill and decode run on separate instances"),
    priority_scheduling=("truth", "the scheduler orders by priority or tenant"),
    async_scheduling=("truth", "the next step is scheduled while the device computes"),
    device_has_faster_dtype=("truth", "the device multiplies some smaller type faster than the one in use"),
    compute_bits=("count", "bits of the operands the matrix units multiply"),
    context_limit_tokens=("tokens", "longest context the engine admits"),
    weights_offloaded=("truth", "weights live outside device memory, or are unloaded between requests"),
    routing_policy=("word", "how the router picks a replica, by its own name"),
    status=("word", "healthy, slow or unknown, as the verdict says"),
    objective_metric=(
        "word",
        "ttft, tpot, itl, e2e or queue: the objective that is broken; unknown where none is set or broken",
    ),
    # near the roof or far from it
    decode_over_roof_ratio=("ratio", "measured decode step over its roofline bound"),
    prefill_over_roof_ratio=("ratio", "measured prefill over its roofline bound"),
    device_errors_count=("count", "device errors the driver logged in the window"),
    numa_nodes_count=("count", "memory domains (CPU sockets) the engine computes on"),
    quant_kernel_slow=("truth", "the quantized model is slower than the unquantized one, or runs on a fallback kernel"),
    parallel_slowdown=("truth", "a higher tensor-parallel degree made the same load slower"),
    prefill_requests_per_step_mean=("count", "prompts that share one prefill step, mean"),
    prefix_evicted_ratio=("ratio", "reusable prompt tokens that were dropped from the pool before reuse"),
    # the host
    step_gap_ratio=("ratio", "device idle between two steps as a share of the step, start to start"),
    cpu_busy_ratio=("ratio", "CPU cores used over the cores allowed"),
    cpu_throttled_ratio=("ratio", "share of scheduling periods in which the CPU quota throttled the engine"),
    compiles_count=("count", "kernel or graph compilations while requests were served"),
    first_request_ratio=("ratio", "time to first token of the first request over that of a later one of its kind"),
    adapters_count=("count", "different adapters in the traffic"),
    adapter_slots_count=("count", "adapters that fit in device memory together"),
    adapter_loads_count=("count", "adapter loads into device memory while requests were served"),
    structured_output=("truth", "output is constrained by a grammar or JSON schema"),
    grammar_first_use=("truth", "only the first use of a schema is slow: it is compiled then"),
    grammar_per_token=("truth", "constrained requests decode slower than free ones"),
    blocking_span=("truth", "a span that awaits I/O lasts clearly longer than the I/O below it"),
    serving_timer_s=("seconds", "interval at which the serving layer flushes streamed tokens"),
    api_servers_count=("count", "API server processes"),
    # before and around the engine
    frontend_ratio=("ratio", "time before the engine core admits a request as a share of its time to first token"),
    host_before_queue_ratio=(
        "ratio",
        "part of the host seconds of affected requests that passes before the engine's queue",
    ),
    preprocess_ratio=("ratio", "image or audio preparation as a share of end-to-end seconds"),
    preprocess_workers_count=("count", "worker processes that prepare images or audio"),
    images_per_request_mean=("count", "images of one request, mean"),
    context_calls_count=("count", "calls of one kind one request makes one after another, the most of any stage"),
    context_calls_ratio=("ratio", "those calls as a share of end-to-end seconds"),
    slow_call_ratio=("ratio", "the slowest single call to another service as a share of end-to-end seconds"),
    tool_ratio=("ratio", "tool calls as a share of end-to-end seconds"),
    agent_turns_count=("count", "model calls of one task"),
    proxy_buffering=("truth", "tokens reach the client in bursts that the engine did not make"),
    gateway_limit=("truth", "through the gateway the same load is slower than sent to the engine directly"),
    ttft_definition_conflict=("truth", "two numbers called TTFT cannot both be true under one definition"),
    load_generator_limit=("truth", "the load generator, not the server, sets the rate or adds the time"),
    kv_transfer_ratio=("ratio", "moving KV between instances as a share of end-to-end seconds"),
    rdma_transfer=("truth", "KV moves between instances by RDMA or a direct device link"),
)
