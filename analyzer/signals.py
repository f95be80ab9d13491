"""Signals of a window of telemetry: the numbers rules may ask for (``rules/vocabulary.py`` says what each means)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from phasewise.analyzer.attribution import read_samples
from phasewise.analyzer.machine import Machine, machine, typical_model
from phasewise.analyzer.outside import outside_s
from phasewise.analyzer.queueing import slot_limit
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.rooflines import judge_phases
from phasewise.analyzer.scene import Scene
from phasewise.analyzer.statistics import floats, percentile
from phasewise.analyzer.sums import Sums
from phasewise.collector.context import Setting
from phasewise.rules.counting import kv_bytes_per_token
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import CONTENTION, SIGNALS, cause_column

Value = float | str | bool | None
LONG_PROMPT_FACTOR = 4
_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


def truth(setting: Setting | None) -> bool | None:
    """A setting as yes or no; None when it is not said or says neither."""
    if setting is None:
        return None
    if isinstance(setting.value, bool):
        return setting.value
    word = str(setting.value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def merged_settings(replicas: Sequence[Replica]) -> dict[str, Setting]:
    """Settings all replicas agree on; where they differ the value is not known for the fleet."""
    found: dict[str, Setting] = {}
    differ: set[str] = set()
    for replica in replicas:
        for name, setting in replica.settings.items():
            if name in found and found[name].value != setting.value:
                differ.add(name)
            found.setdefault(name, setting)
    return {name: setting for name, setting in found.items() if name not in differ}


def window_signals(scene: Scene, affected: pl.DataFrame, sums: Sums, rulebook: Rulebook) -> dict[str, Value]:
    """Every signal that this window's telemetry tells; the others are None. sums: of all affected requests, also where `affected` are
    drawn."""
    found: dict[str, Value] = dict.fromkeys(SIGNALS)
    settings = merged_settings(scene.replicas)
    found |= _load(scene)
    found |= _slots(scene)
    found |= _memory(scene, settings)
    found |= _prefix(scene, settings)
    found |= _lengths(scene.requests)
    found |= _phases(scene.requests, affected, sums)
    found |= _settings(scene, settings)
    built = machine(settings, typical_model(scene.requests), rulebook)
    found |= _device(built, settings)
    for phase, judged in judge_phases(scene.requests, built, rulebook).items():
        found[f"{phase}_bound"] = judged.bound
        if phase == "decode":
            moved = judged.weight_bytes + judged.kv_bytes
            found["decode_weight_io_ratio"], found["decode_kv_io_ratio"] = (
                judged.weight_bytes / moved,
                judged.kv_bytes / moved,
            )
    return found


def _load(scene: Scene) -> dict[str, Value]:
    count = scene.sums.count
    found: dict[str, Value] = {"requests_count": float(count), "replicas_count": float(len(scene.replicas)) or None}
    if count < 2:
        return found
    found |= scene.traffic.load
    if scene.sampling.is_partial:  # rates of all requests; how their arrivals cluster, a sample does not tell
        found["concurrency_mean"] = _weighted_concurrency(scene) if scene.sampling.is_fair else None
        ratio = scene.sampling.ratio
        rate = found["arrival_rate_per_s"]
        found["arrival_rate_per_s"] = rate / ratio if isinstance(rate, float) and ratio else None
        found["arrival_cv2"] = None
    return found


def _weighted_concurrency(scene: Scene) -> float | None:
    """Requests in the engines at once, where each row stands for several."""
    rows = scene.requests
    arrival, end = rows["arrival_unix_ns"], rows["finished_unix_ns"]
    span = float((end.to_numpy() / 1e9).max() - (arrival.to_numpy() / 1e9).min())
    lasting = (end - arrival).to_numpy() / 1e9
    drawn = scene.sums.count / len(rows)
    return float((lasting * scene.sampling.weights(rows)).sum()) * drawn / span if span else None


def _all_samples(scene: Scene, columns: Sequence[str]) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """What the samples of all replicas say of each column while they were busy."""
    inside = [
        replica.samples.filter(pl.col("unix_ns").is_between(*busy_span(scene, replica))) for replica in scene.replicas
    ]
    joined = [np.concatenate([np.empty(0), *(floats(one, column) for one in inside)]) for column in columns]
    return [values[np.isfinite(values)] for values in joined]


def busy_span(scene: Scene, replica: Replica) -> tuple[int, int]:
    """First arrival to last end of the replica's requests in the window; without requests the window itself."""
    span = scene.traffic.span_unix_ns(replica)
    if span is not None:
        first, last = span
        return first, max(last, replica_end(replica, last))
    return scene.window.from_unix_ns, min(scene.window.to_unix_ns, 2**62)


def replica_end(replica: Replica, last: int) -> int:
    """Samples with requests in flight after the last finished one still belong to the busy time."""
    busy = replica.samples.filter((pl.col("running").fill_null(0) + pl.col("waiting").fill_null(0)) > 0)
    newest = busy["unix_ns"].max()
    return newest if isinstance(newest, int) else last


def _slots(scene: Scene) -> dict[str, Value]:
    running, waiting = _all_samples(scene, ("running", "waiting"))
    found: dict[str, Value] = {}
    for name, values in (("running", running), ("waiting", waiting)):
        if len(values):
            found[f"{name}_mean"], found[f"{name}_max"] = float(values.mean()), float(values.max())
    limits, full, used = [], [], []
    for replica in scene.replicas:
        origin = scene.window.from_unix_ns
        samples = read_samples(replica.samples, origin)
        busy, waits = scene.traffic.running(replica, origin), scene.traffic.waiting(replica, origin)
        limit = slot_limit(replica.settings, samples, busy, waits)
        if limit.value is not None:
            limits.append(limit.value)
            # Idle time before and after the load would hide how full the slots were under it.
            busy_samples = np.nan_to_num(samples.running) + np.nan_to_num(samples.waiting) > 0
            seen = samples.running[np.isfinite(samples.running) & busy_samples]
            used += list(seen / limit.value)
        if limit.full_ratio is not None:
            full.append(limit.full_ratio)
    found["slots_limit_count"] = max(limits) if limits else None
    found["slots_full_ratio"] = max(full) if full else None
    found["utilization_ratio"] = min(1.0, float(np.mean(used))) if used else None
    return found


def _memory(scene: Scene, settings: Mapping[str, Setting]) -> dict[str, Value]:
    (usage,) = _all_samples(scene, ("kv_usage_ratio",))
    found: dict[str, Value] = {}
    if len(usage):
        found["kv_usage_p95_ratio"], found["kv_usage_max_ratio"] = float(np.quantile(usage, 0.95)), float(usage.max())
    preempted = [counter_increase(replica.samples, "preemptions") for replica in scene.replicas]
    told = [value for value in preempted if value is not None]
    if not told and scene.sums.preemptions is not None:
        # SGLang counts no retractions that a scrape could add up; its spans carry one event each.
        told = [float(scene.sums.preemptions)]
    if told:
        found["preemptions_count"] = sum(told)
        found["preemptions_per_request"] = sum(told) / scene.sums.count if scene.sums.count else None
    pool = settings.get("kv_pool_tokens")
    if pool is not None and isinstance(pool.value, int | float):
        found["kv_pool_tokens"] = float(pool.value)
    if scene.sums.count and isinstance(found.get("kv_pool_tokens"), float):
        found["kv_need_tokens"] = scene.traffic.need_tokens
    found["kv_offload"] = truth(settings.get("kv_offload"))
    return found


def counter_increase(samples: pl.DataFrame, column: str) -> float | None:
    """How far a counter rose over the samples, resets bridged; None where the engine never sent it."""
    values = samples.sort("unix_ns")[column].drop_nulls()
    if len(values) < 2:
        return None
    steps = values.diff().drop_nulls()
    return float(steps.filter(steps > 0).sum())


def _prefix(scene: Scene, settings: Mapping[str, Setting]) -> dict[str, Value]:
    found: dict[str, Value] = {"prefix_caching": truth(settings.get("prefix_caching"))}
    pairs = [
        (counter_increase(r.counters, "prefix_hits_tokens"), counter_increase(r.counters, "prefix_queries_tokens"))
        for r in scene.replicas
    ]
    asked = sum(q for _, q in pairs if q)
    if asked > 0:
        found["prefix_hit_ratio"] = sum(h for h, _ in pairs if h) / asked
        found["prefix_caching"] = True if found["prefix_caching"] is None else found["prefix_caching"]
    elif scene.sums.cached_tokens is not None:
        total = scene.sums.prompts_with_cache_tokens
        found["prefix_hit_ratio"] = float(scene.sums.cached_tokens) / float(total) if total else None
    return found


def _lengths(rows: pl.DataFrame) -> dict[str, Value]:
    given, made = floats(rows, "input_tokens"), floats(rows, "output_tokens")
    given, made = given[np.isfinite(given)], made[np.isfinite(made)]
    found: dict[str, Value] = {}
    if len(given):
        median = float(np.median(given))
        found["input_tokens_p50"], found["input_tokens_p95"] = median, float(np.quantile(given, 0.95))
        total = float(given.sum())
        found["long_prompt_ratio"] = float(given[given >= LONG_PROMPT_FACTOR * median].sum()) / total if total else None
    if len(made):
        found["output_tokens_p50"] = float(np.median(made))
        if len(given):
            found["prefill_token_ratio"] = float(given.sum() / max(given.sum() + made.sum(), 1.0))
    return found


def _phases(rows: pl.DataFrame, affected: pl.DataFrame, sums: Sums) -> dict[str, Value]:
    found: dict[str, Value] = {
        "ttft_p50_s": percentile(floats(rows, "ttft_s"), 0.5).value,
        "ttft_p95_s": percentile(floats(rows, "ttft_s"), 0.95).value,
        "tpot_p50_s": percentile(floats(rows, "tpot_s"), 0.5).value,
        "queue_p95_s": percentile(floats(rows, "queue_s"), 0.95).value,
    }
    uncached = floats(rows, "input_tokens") - np.nan_to_num(floats(rows, "cached_tokens"))
    prefill = floats(rows, "prefill_s")
    rate = np.divide(uncached, prefill, out=np.full(len(prefill), np.nan), where=prefill > 0)
    found["prefill_rate_tok_per_s"] = percentile(rate, 0.5).value
    total = sums.e2e_s
    if total > 0:
        for name in ("queue", "prefill", "decode"):
            seconds = sums.phases_s[name]
            found[f"{name}_ratio"] = None if seconds is None else seconds / total
        found |= _in_front(affected)
        found["interference_ratio"] = sums.seconds["interference"] / total
        batch = floats(rows, "decode_batch_mean")
        found["decode_batch_mean"] = float(np.nanmean(batch)) if np.isfinite(batch).any() else None
        found["contention_ratio"] = sum(sums.seconds[cause] for cause in sorted(CONTENTION)) / total
    return found


def _in_front(affected: pl.DataFrame) -> dict[str, Value]:
    """What passes before the engine queues these requests: in its own front, and in a server's span around it."""
    server = affected.select((pl.col("entry_side") == "server").fill_null(False)).to_series().to_numpy()
    around = np.where(server, np.nan_to_num(floats(affected, "entry_before_s")), 0.0)
    own = np.clip(floats(affected, "queued_unix_ns") - floats(affected, "arrival_unix_ns"), 0.0, None) / 1e9
    to_first = floats(affected, "ttft_s") + around
    told = np.isfinite(to_first) & (np.isfinite(own) | (around > 0))  # a share is of requests that tell both
    first = float(to_first[told].sum())
    before = float((np.nan_to_num(own) + around)[told].sum())
    host = float(np.nansum(floats(affected, cause_column("host")))) + outside_s(affected).get("host", 0.0)
    return {
        "frontend_ratio": before / first if first > 0 else None,
        "host_before_queue_ratio": min(1.0, float(around.sum()) / host) if around.any() and host > 0 else None,
    }


def _settings(scene: Scene, settings: Mapping[str, Setting]) -> dict[str, Value]:
    def number(name: str) -> float | None:
        value = settings[name].value if name in settings else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    budget = number("max_num_batched_tokens") or number("prefill_chunk_tokens")
    lengths = floats(scene.requests, "input_tokens")
    lengths = lengths[np.isfinite(lengths)]
    policy = settings["scheduler_policy"].value if "scheduler_policy" in settings else None
    engine = next((replica.engine for replica in scene.replicas if replica.engine), None)
    paged = engine in ("vllm_v1", "sglang", "trtllm")
    return {
        "step_token_budget_tokens": budget,
        "prompts_over_budget_ratio": float((lengths > budget).mean()) if budget and len(lengths) else None,
        "chunked_prefill": truth(settings.get("chunked_prefill")),
        "cuda_graphs": truth(settings.get("cuda_graphs")),
        "disaggregated": truth(settings.get("prefill_decode_disaggregation")),
        "memory_utilization_ratio": number("gpu_memory_utilization"),
        "priority_scheduling": None if policy is None else str(policy) not in ("fcfs", "lpm"),
        "speculation": _speculation(scene, settings),
        "spec_acceptance_ratio": _acceptance(scene),
        # These engines schedule every step anew and allocate KV in pages; there is no switch for it.
        "continuous_batching": True if paged else None,
        "paged_kv": True if paged else None,
    }


def _speculation(scene: Scene, settings: Mapping[str, Setting]) -> bool | None:
    stated = settings.get("speculation")
    if stated is not None:
        return str(stated.value).lower() not in ("none", "false", "off", "")
    drafted = [value for r in scene.replicas if (value := counter_increase(r.counters, "drafted_tokens")) is not None]
    return True if any(value > 0 for value in drafted) else None


def _acceptance(scene: Scene) -> float | None:
    drafted = sum(counter_increase(r.counters, "drafted_tokens") or 0.0 for r in scene.replicas)
    accepted = sum(counter_increase(r.counters, "accepted_tokens") or 0.0 for r in scene.replicas)
    return accepted / drafted if drafted > 0 else None


def _device(built: Machine, settings: Mapping[str, Setting]) -> dict[str, Value]:
    found: dict[str, Value] = {
        "tensor_parallel_count": float(built.devices) if "tensor_parallel" in settings else None,
        "devices_count": float(built.devices) if "tensor_parallel" in settings else None,
        "weight_bits": float(built.precision.weight_bits) if built.model or "quantization" in settings else None,
        "kv_dtype_bits": float(built.precision.kv_bits) if built.model or "kv_dtype" in settings else None,
    }
    if built.model is not None:
        found["kv_bytes_per_token"] = float(kv_bytes_per_token(built.model, built.precision.kv_bits))
    if built.gpu is not None:
        found["device_kind"] = built.gpu.kind
        found["device_has_fp8"] = built.gpu.multiplies("fp8")
        found["device_has_int8"] = built.gpu.multiplies("int8")
    return found
