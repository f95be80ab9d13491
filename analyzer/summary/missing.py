"""Which numbers would decide, and how each is read off a running deployment."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.analyzer.summary.boundary import WORTH_A_NAME_RATIO, outside_share
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_most
from phasewise.rules.engine_settings import MEASURE_IT

_LIMIT = 6


@dataclass(frozen=True, slots=True)
class Needed:
    """signal: field of the summary; how: where to read it; why: what it would tell apart."""

    signal: str
    how: str
    why: str


def missing_numbers(summary: Summary, machine: Machine) -> list[dict[str, object]]:
    """What the summary lacks, the most telling first."""
    found: list[Needed] = []

    def need(absent: bool, signal: str, how: str, why: str) -> None:
        if absent:
            found.append(Needed(signal, how, why))

    lost = outside_share(summary)
    need(
        lost is not None and lost >= WORTH_A_NAME_RATIO, "the boundaries between client and server",
        "access log of each hop (request time and upstream time), HTTP arrival at the serving process, client's connection times",
        f"{lost or 0:.0%} of the client's wait is in no view of the engine: which hop holds it was not measured",
    )  # fmt: skip
    few = summary.number("samples_count")
    need(
        few is not None and few < 10, "observed.samples_count", "repeat the run with at least 30 requests of stated lengths",
        "a handful of requests decides nothing",
    )  # fmt: skip
    need(
        summary.waiting is None and summary.number("queue_p50_ms") is None, "observed.requests_waiting",
        "scrape /metrics: vllm:num_requests_waiting, sglang:num_queue_reqs; queue time from the request spans",
        "waiting and working look alike from outside",
    )  # fmt: skip
    need(
        summary.kv_usage is None and machine.kind not in ("hosted", "none"), "observed.kv_cache_usage_ratio",
        "scrape /metrics: vllm:kv_cache_usage_perc, sglang:token_usage, and the preemption counter",
        "a full pool and a full slot limit look alike",
    )  # fmt: skip
    need(
        summary.client is None or summary.server is None, "client and server",
        "measure TTFT and end to end at the client and read the engine's own histograms for the same run",
        "time lost between them is invisible from one side",
    )  # fmt: skip
    need(
        summary.typical_s("prefill") is None and summary.number("prefill_rate_tok_per_s") is None, "observed.prefill_p50_ms",
        "engine spans or histograms: prefill time (vllm:request_prefill_time_seconds)",
        "separates the request's own prompt from waiting",
    )  # fmt: skip
    need(
        summary.seconds("itl_p50") is None and summary.tail_s("tpot") is None, "observed.itl_p50_ms, itl_p99_ms",
        "gaps between streamed tokens at the client, or vllm:inter_token_latency_seconds",
        "tells steady slow decode from single stalls",
    )  # fmt: skip
    need(
        summary.seconds("step_device") is None and summary.number("gpu_utilization_ratio") is None, "observed.step_device_ms, step_gap_ms",
        "a profiler trace of a few steps (nsys, torch profiler), or DCGM's tensor and DRAM activity",
        "says whether the device computes, reads or idles",
    )  # fmt: skip
    need(
        machine.bandwidth_bytes_per_s is None and machine.kind not in ("hosted", "none"), "hardware.memory_bandwidth_gb_per_s",
        f"data sheet of the accelerator, or {MEASURE_IT}", "without it no roofline",
    )  # fmt: skip
    need(
        machine.read_low_bytes is None and machine.kind not in ("hosted", "none"), "model.params_b, model.weight_dtype",
        "model card, start-up log", "without it no roofline",
    )  # fmt: skip
    need(
        not summary.comparators, "baseline", "the same load with one setting changed, or one class of requests alone",
        "a controlled comparison decides what no single run can",
    )  # fmt: skip
    need(
        at_most(summary.in_flight, 1) is False and not summary.sweep, "sweep",
        "the same workload at a half and at twice the load", "waiting grows with load, work does not",
    )  # fmt: skip
    return [{"signal": n.signal, "how": n.how, "why": n.why} for n in found[:_LIMIT]]
