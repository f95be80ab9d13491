"""What scrapes of vLLM 0.32's /metrics would have shown of the same run: its names, labels and bucket edges, read every few
seconds.

vLLM updates its statistics when a step has ended, so a scrape shows the state after the last step before it. Prompt tokens
count when the prompt is done, request histograms when a request ends, the time to first token when it comes. Families that no
step of ours moves are left out, as are the reasons of waiting, which vLLM's own counter does not tell apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.instrumented_engine import vllm_view
from phasewise.instrumented_engine.metrics import (
    GAP_BOUNDS_S,
    ITERATION_BOUNDS_TOKENS,
    PHASE_BOUNDS_S,
    SERVED,
    TTFT_BOUNDS_S,
    Labels,
    braces,
)
from phasewise.instrumented_engine.recording import Floats, Ints, Recording
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.telemetry import DECODE, RECOMPUTE
from phasewise.instrumented_engine.vllm_view import VllmTimes

INTERVAL_S = 5.0
JITTER_S = 0.1  # scrapers are never on time


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """What the page says of the server itself. kv_blocks: pool; cache_dtype: as --kv-cache-dtype was given."""

    model: str
    started_ns: int
    kv_blocks: int
    block_tokens: int
    prefix_caching: bool
    cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.92


@dataclass(frozen=True, slots=True)
class _Observations:
    """Values of one histogram: the step after which each counts, and how many there are of it."""

    step: Ints
    value: Floats
    weight: Ints


@dataclass(frozen=True, slots=True)
class _History:
    """Series by step (`moved`: increments, `level`: state after it) and histograms by observation."""

    end_ns: Ints
    level: Mapping[str, Floats]
    moved: Mapping[str, Ints]
    observed: Mapping[str, tuple[tuple[float, ...], _Observations]]


def moments_ns(recording: Recording, *, interval_s: float = INTERVAL_S, seed: int = 0) -> list[int]:
    """When a scraper that knows nothing of the steps reads the page: from before the first step until after the last."""
    if not recording.steps:
        return []
    steps = recording.step_columns()
    chance = random.Random(seed)
    first = int(steps["start_ns"][0]) - round(chance.random() * interval_s * 1e9)
    last = int(steps["start_ns"][-1] + steps["duration_ns"][-1]) + round(interval_s * 1e9)
    regular = range(first, last + 1, round(interval_s * 1e9))
    return [at + round(chance.uniform(-JITTER_S, JITTER_S) * min(interval_s, 1.0) * 1e9) for at in regular]


def pages(recording: Recording, server: VllmServer, at_ns: list[int]) -> Iterator[tuple[int, str]]:
    """The answer of /metrics at each of these moments, which are in order."""
    history = _history(recording, server)
    last = np.searchsorted(history.end_ns, np.array(at_ns, dtype=np.int64), side="right") - 1
    level = {name: _at(values, last) for name, values in history.level.items()}
    total = {name: _at(np.cumsum(values).astype(np.float64), last) for name, values in history.moved.items()}
    histograms = {name: _cumulative(edges, seen, last) for name, (edges, seen) in history.observed.items()}
    fixed = _fixed_lines(server)
    own = {"engine": "0", "model_name": server.model}
    labels = braces(own)
    named = {name: _counter_name(name, own) for name in total}
    buckets = {
        name: [f"vllm:{name}_bucket{braces(own | {'le': str(edge)})}" for edge in (*edges, "+Inf")]
        for name, (edges, _, _) in histograms.items()
    }
    for row, moment in enumerate(at_ns):
        lines = list(fixed)
        lines += [f"vllm:{name}{labels} {values[row]!r}" for name, values in level.items()]
        lines += [f"{named[name]} {float(values[row])}" for name, values in total.items()]
        for name, (_, counts, sums) in histograms.items():
            for bucket, count in zip(buckets[name], counts[row].tolist(), strict=True):
                lines.append(f"{bucket} {float(count)}")
            lines.append(f"vllm:{name}_count{labels} {float(counts[row][-1])}")
            lines.append(f"vllm:{name}_sum{labels} {float(sums[row])!r}")
        yield moment, "\n".join(lines) + "\n"


def _fixed_lines(server: VllmServer) -> list[str]:
    facts = {
        "block_size": server.block_tokens,
        "cache_dtype": server.cache_dtype,
        "enable_prefix_caching": server.prefix_caching,
        "engine": 0,
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "kv_cache_size_tokens": server.kv_blocks * server.block_tokens,
        "kv_offloading_size": None,
        "num_gpu_blocks": server.kv_blocks,
    }
    told = braces({name: str(value) for name, value in facts.items()})
    return [f"process_start_time_seconds {server.started_ns / 1e9!r}", f"vllm:cache_config_info{told} 1.0"]


def _counter_name(name: str, own: Labels) -> str:
    """With its labels; `request_success:stop` is a counter with one label more."""
    family, _, reason = name.partition(":")
    if reason:
        own = {**own, "finished_reason" if family == "request_success" else "reason": reason}
    return f"vllm:{family}_total{braces(own)}"


def _at(values: Floats, last: npt.NDArray[np.intp]) -> list[float]:
    """Value after the last step before each moment; 0 before the first step."""
    return np.where(last >= 0, values[np.maximum(last, 0)], 0.0).tolist() if len(values) else [0.0] * len(last)


def _cumulative(
    edges: tuple[float, ...], seen: _Observations, last: npt.NDArray[np.intp]
) -> tuple[tuple[float, ...], Ints, Floats]:
    """Of each moment: counts up to each edge (`+Inf` last), and the sum of values."""
    row = np.searchsorted(last, seen.step, side="left")  # the first moment that shows it
    known = row < len(last)
    counts = np.zeros((len(last), len(edges) + 1), dtype=np.int64)
    sums = np.zeros(len(last))
    bucket = np.searchsorted(np.array(edges), seen.value, side="left")
    np.add.at(counts, (row[known], bucket[known]), seen.weight[known])
    np.add.at(sums, row[known], (seen.value * seen.weight)[known])
    return edges, counts.cumsum(axis=0).cumsum(axis=1), sums.cumsum()


def _history(recording: Recording, server: VllmServer) -> _History:
    steps = recording.step_columns()
    end = steps["start_ns"] + steps["duration_ns"]
    served = vllm_view.times(recording)
    first = _step_of(end, [at.prefilled_ns for _, at in served])
    last = _step_of(end, [at.last_token_ns for _, at in served])
    scheduled = np.searchsorted(steps["start_ns"], [at.scheduled_ns for _, at in served], side="left")
    prompts = np.array([one.spec.prompt_tokens for one, _ in served], dtype=np.int64)
    cached = np.array([one.cached_tokens or 0 for one, _ in served], dtype=np.int64)
    n = len(end)
    prompt_tokens = _summed(first, prompts, n)
    generated = steps["decode_sequences"] + steps["last_chunks"]
    waiting = sum((steps[name] for name in steps if name.startswith("waiting_")), start=np.zeros(n, dtype=np.int64))
    busy = steps["running"] > 0
    queries = prompts if server.prefix_caching else np.zeros_like(prompts)
    moved = {
        "num_preemptions": steps["preemptions"],
        "prefix_cache_queries": _summed(scheduled, queries, n),
        "prefix_cache_hits": _summed(scheduled, np.minimum(cached, queries), n),
        "prompt_tokens": prompt_tokens,
        "generation_tokens": generated,
    }
    for reason in (*SERVED, "abort"):  # a client that goes away is not counted
        ended = np.array([one.finish_reason == reason for one, _ in served], dtype=np.int64)
        moved[f"request_success:{reason}"] = _summed(last, ended, n)
    turned_away = np.searchsorted(end, [spec.arrival_ns for spec, _ in recording.refused], side="left")
    moved["admission_rejections:max_num_queued_reqs"] = _summed(
        turned_away, np.ones(len(turned_away), dtype=np.int64), n
    )
    return _History(
        end_ns=end,
        level={
            "num_requests_running": steps["running"].astype(np.float64),
            "num_requests_waiting": waiting.astype(np.float64),
            "kv_cache_usage_perc": np.where(busy, steps["kv_blocks_used"], 0) / max(server.kv_blocks, 1),
        },
        moved=moved,
        observed=_observed(served, end, first, last, prompt_tokens + generated),
    )


def _observed(
    served: list[tuple[Sequence, VllmTimes]], end: Ints, first: Ints, last: Ints, step_tokens: Ints
) -> dict[str, tuple[tuple[float, ...], _Observations]]:
    def each(step: Ints, lengths_ns: list[int]) -> _Observations:
        return _Observations(
            step, np.array(lengths_ns, dtype=np.float64) / 1e9, np.ones(len(lengths_ns), dtype=np.int64)
        )

    times = [at for _, at in served]
    several = np.array([one.output_tokens > 1 for one, _ in served], dtype=bool)
    per_token = np.array(
        [(at.last_token_ns - at.first_token_ns) / 1e9 / max(one.output_tokens - 1, 1) for one, at in served]
    )
    counted = np.arange(len(end))
    return {
        "time_to_first_token_seconds": (
            TTFT_BOUNDS_S,
            each(first, [at.first_token_ns - at.arrival_ns for at in times]),
        ),
        "inter_token_latency_seconds": (GAP_BOUNDS_S, token_gaps([one.segments for one, _ in served], end)),
        "request_time_per_output_token_seconds": (
            GAP_BOUNDS_S,
            _Observations(last[several], per_token[several], np.ones(int(several.sum()), dtype=np.int64)),
        ),
        "e2e_request_latency_seconds": (PHASE_BOUNDS_S, each(last, [at.last_token_ns - at.arrival_ns for at in times])),
        "request_queue_time_seconds": (PHASE_BOUNDS_S, each(last, [at.scheduled_ns - at.queued_ns for at in times])),
        "request_inference_time_seconds": (
            PHASE_BOUNDS_S,
            each(last, [at.last_token_ns - at.scheduled_ns for at in times]),
        ),
        "request_prefill_time_seconds": (
            PHASE_BOUNDS_S,
            each(last, [at.prefilled_ns - at.scheduled_ns for at in times]),
        ),
        "request_decode_time_seconds": (
            PHASE_BOUNDS_S,
            each(last, [at.last_token_ns - at.first_token_ns for at in times]),
        ),
        "iteration_tokens_total": (
            ITERATION_BOUNDS_TOKENS,
            _Observations(counted, step_tokens.astype(np.float64), np.ones(len(counted), dtype=np.int64)),
        ),
    }


def token_gaps(segments: list[list[list[int]]], end_ns: Ints) -> _Observations:
    """Times between a request's tokens, out of the steps that gave it one: every step of a decode, and the last one of a
    prefill or of a recomputation. Gaps of neighbouring steps are counted together."""
    neighbours = np.zeros(
        len(end_ns) + 1, dtype=np.int64
    )  # differences: requests with a token in this step and the one before
    at: list[int] = []
    length_ns: list[int] = []
    for own in segments:
        before: int | None = None
        for index, (phase, first, last) in enumerate(own):
            cut_short = phase != DECODE and index + 1 < len(own) and own[index + 1][0] in (phase, RECOMPUTE)
            if cut_short:
                continue  # preempted again, or still in its prompt: no token came of it
            start = first if phase == DECODE else last
            if before is not None and start == before + 1:
                neighbours[start] += 1
                neighbours[start + 1] -= 1
            elif before is not None:
                at.append(start)
                length_ns.append(int(end_ns[start] - end_ns[before]))
            if last > start:
                neighbours[start + 1] += 1
                neighbours[last + 1] -= 1
            before = last
    together = np.cumsum(neighbours[:-1])
    steps = np.flatnonzero(together)
    return _Observations(
        np.concatenate((steps, np.array(at, dtype=np.int64))),
        np.concatenate((end_ns[steps] - end_ns[steps - 1], np.array(length_ns, dtype=np.int64))) / 1e9,
        np.concatenate((together[steps], np.ones(len(at), dtype=np.int64))),
    )


def _step_of(end_ns: Ints, moments: list[int]) -> Ints:
    """The step at whose end something happened."""
    return np.searchsorted(end_ns, np.array(moments, dtype=np.int64), side="left").astype(np.int64)


def _summed(step: npt.NDArray[np.integer], values: Ints, steps: int) -> Ints:
    """Sum of values by step; what came after the last step is never seen."""
    inside = step < steps
    return np.bincount(step[inside], weights=values[inside], minlength=steps).astype(np.int64)
