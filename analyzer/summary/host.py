"""CPU work in or beside the serving process: gaps between steps, launches, quotas, compiles, adapters."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.summary.decode import batch_of, step_s
from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    configured,
    either,
    given,
    nothing_waits,
    objection,
    reading,
    supported,
)
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, near, ratio

# Launching one layer's kernels one by one: some 25 launches of 5 to 120 microseconds, on a slow CPU core 5 ms at most.
_LAUNCH_S_PER_LAYER = 0.005
_MANY_LAYERS = 80.0
# A step that takes this long for few sequences, with no graphs, is launches unless the weights are huge.
_SLOW_STEP_S = 0.03
HOST_ADVICE = (
    Tempting("weight_only_quantization", "saves bytes; the device waits for the host, not for memory"),
    Tempting("kv_cache_quantization", "saves bytes; the device waits for the host, not for memory"),
    Tempting("speculative_decoding", "adds host work to each step"),
    Tempting("prefix_caching", "acts on prefill; the time is lost on the CPU"),
)


def step_gap(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The device idles between two steps while the host prepares the next one."""
    step, device, gap = (summary.seconds(name) for name in ("step", "step_device", "step_gap"))
    if gap is None and step is not None and device is not None:
        gap = max(0.0, step - device)
    whole = step or (gap + device if gap is not None and device is not None else summary.typical_s("tpot"))
    share = ratio(gap, whole)
    if gap is None or share is None or share < 0.08:
        return
    strength = 0.6 if share < 0.12 else 0.7 if share < 0.3 else 0.8
    evidence: list[Evidence] = [
        computed("step_gap_share", share, 0.0, "ratio", "step_gap_ms / step", "of each step the device waits for the host")
    ]  # fmt: skip
    if near(summary.typical_s("tpot"), whole, 0.1):
        strength = either(strength, 0.2)
        evidence.append(
            computed(
                "tpot_s",
                summary.typical_s("tpot"),
                whole,
                "s",
                "tpot",
                "device time and gap add up to the time per token",
            )
        )
    overlapping = summary.truth("engine.async_scheduling")
    if overlapping is False:
        strength = either(strength, 0.4)
        evidence.extend(
            configured(
                summary.observed, "engine.async_scheduling", "the next step is scheduled only after the last one ended"
            )
        )
    techniques = [] if overlapping else ["async_scheduling"]
    if summary.text("engine.cuda_graphs") in ("off", None):
        techniques.append("cuda_graphs")
    yield Hypothesis(
        cause="host.scheduler",
        mechanism="step_gap",
        strength=min(strength, 0.95),
        sentence=f"The device idles {gap * 1000:.3g} ms between steps while the host schedules the next one.",
        evidence=tuple(evidence),
        techniques=(*techniques, "limit_cpu_threads"),
        tempting=HOST_ADVICE,
        symptoms=frozenset({"bandwidth"}),
        share=share,
        phase="tpot",
    )


def eager_launches(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Without graphs each kernel is launched by the CPU; small steps take as long as the launches."""
    if summary.text("engine.cuda_graphs") != "off":
        return
    pace, batch = step_s(summary), batch_of(summary) or 1.0
    strength = 0.3
    evidence = list(configured(summary.observed, "engine.cuda_graphs", "each kernel is launched by the CPU", "on"))
    bound = _LAUNCH_S_PER_LAYER * (machine.layers or _MANY_LAYERS)
    if pace is None:
        single = ratio(batch, summary.number("output_throughput_tok_per_s"))
        pace = single if single is not None else None
    if pace is not None and batch <= 4:
        floor = (
            machine.read_high_bytes / machine.bandwidth_bytes_per_s
            if machine.read_high_bytes and machine.bandwidth_bytes_per_s
            else None
        )
        if pace > bound:
            strength *= 0.3
            evidence.append(
                computed(
                    "step_s", pace, bound, "s", "tpot", "is longer than all launches of a step can take", against=True
                )
            )
        elif floor is not None and pace < 2 * floor:
            strength *= 0.3
            evidence.append(
                computed("step_s", pace, floor, "s", "tpot", "is close to what reading the weights takes", against=True)
            )
        elif pace >= _SLOW_STEP_S or (floor is not None and pace > 2.5 * floor):
            strength = either(strength, 0.5)
            evidence.append(
                computed("step_s", pace, floor, "s", "tpot", "is far longer than the memory needs for so few sequences")
            )
    busy = summary.number("engine_core_cpu_cores_used")
    if at_least(busy, 0.9):
        strength = either(strength, 0.4 if at_least(busy, 1.5) else 0.3)
        evidence.extend(given(summary, "engine_core_cpu_cores_used", "the engine process keeps its cores busy"))
    if at_most(summary.number("gpu_utilization_ratio"), 0.7):
        strength = either(strength, 0.35)
        evidence.extend(given(summary, "gpu_utilization_ratio", "the device is idle part of the time"))
    wanted = summary.count("workload.target_output_throughput_tok_per_s")
    reached = summary.number("output_throughput_max_tok_per_s") or summary.number("output_throughput_tok_per_s")
    if wanted and reached and reached < 0.5 * wanted:
        strength = either(strength, 0.1)
        evidence.append(
            computed(
                "output_throughput", reached, wanted, "tokens/s", "output_throughput", "far from what the owner expects"
            )
        )
    if strength > 0.5:
        strength = supported(strength, evidence, 0.15, nothing_waits(summary))
    yield Hypothesis(
        cause="host",
        mechanism="eager_launches",
        strength=min(strength, 0.93),
        sentence="Without graphs the steps take as long as the CPU needs to launch their kernels.",
        evidence=tuple(evidence),
        techniques=("cuda_graphs", "async_scheduling"),
        tempting=HOST_ADVICE,
        symptoms=frozenset({"bandwidth"}),
        phase="tpot",
    )


def cpu_quota(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The serving container stands at its CPU quota."""
    used, limit = summary.number("cpu_cores_used"), summary.number("cpu_cores_limit")
    throttled = summary.number("cpu_throttled_ratio")
    cores = limit or summary.count("hardware.cpu_cores_count")
    evidence: list[Evidence] = []
    strength = 0.0
    if used and cores and used >= 0.93 * cores:
        strength = 0.6 if limit else 0.5
        evidence.extend(given(summary, "cpu_cores_used", "the CPU is used up", cores))
    if at_least(throttled, 0.05):
        strength = either(strength, 0.6 if at_least(throttled, 0.2) else 0.45)
        evidence.extend(given(summary, "cpu_throttled_ratio", "the CPU quota stops the container", 0.0))
    wanted = (summary.count("engine.preprocess_workers") or 1.0) * (summary.count("engine.preprocess_threads") or 0.0)
    if wanted and cores and wanted > 1.5 * cores:
        strength = either(strength, 0.4)
        evidence.append(
            computed(
                "threads", wanted, cores, "count", "preprocess_workers x preprocess_threads", "more threads than cores"
            )
        )
    if not evidence:
        return
    for point in summary.comparators:
        less, idle = point.number("cpu_cores_used"), point.number("gpu_utilization_ratio")
        if less is not None and used is not None and less < 0.75 * used:
            strength = either(strength, 0.35)
            evidence.extend(reading(point, "cpu_cores_used", "the run it is compared with needs far less CPU", used))
            evidence.extend(
                reading(point, "gpu_utilization_ratio", "and keeps the device busy") if idle is not None else ()
            )
            break
    if at_most(summary.number("gpu_utilization_ratio"), 0.8):
        strength = either(strength, 0.3)
        evidence.extend(given(summary, "gpu_utilization_ratio", "the device waits meanwhile"))
    if at_least(summary.number("gpu_utilization_ratio"), 0.97):
        strength *= 0.6
        evidence.extend(
            objection(
                summary.place_of("gpu_utilization_ratio"),
                "gpu_utilization_ratio",
                "the device always has a kernel to run",
            )
        )
    yield Hypothesis(
        cause="host",
        mechanism="cpu_quota",
        strength=min(strength, 0.93),
        sentence="The serving process has used up its CPU.",
        evidence=tuple(evidence),
        techniques=("limit_cpu_threads", "async_scheduling", "scale_api_servers"),
        tempting=(*HOST_ADVICE, Tempting("tensor_parallel", "adds devices that wait for the same CPU")),
        symptoms=frozenset({"bandwidth", "context"}),
        phase="tpot",
    )


def idle_device(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The device idles although requests run: the process that feeds it is the limit."""
    busy, running = summary.number("gpu_utilization_ratio"), summary.peak("requests_running")
    core = summary.number("engine_core_cpu_cores_used")
    evidence: list[Evidence] = []
    strength = 0.0
    if at_most(busy, 0.6) and (at_least(running, 1) or at_least(summary.in_flight, 4)):
        strength = 0.35
        evidence.extend(given(summary, "gpu_utilization_ratio", "the device idles although requests run"))
    if core is not None and core >= 0.9 and evidence:
        strength = either(strength, 0.4)
        evidence.extend(given(summary, "engine_core_cpu_cores_used", "the engine process is at one core, its limit"))
    if evidence and strength > 0:
        yield Hypothesis(
            cause="host",
            mechanism="idle_device",
            strength=strength,
            sentence="The device waits for the process that feeds it.",
            evidence=tuple(evidence),
            techniques=("async_scheduling", "cuda_graphs", "limit_cpu_threads")
            if summary.text("engine.cuda_graphs") in ("off", None)
            else ("async_scheduling", "limit_cpu_threads"),
            tempting=HOST_ADVICE,
            phase="tpot",
        )


def swapping(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The host writes memory to swap while it serves."""
    if at_least(summary.number("swap_out_mb_per_s"), 20):
        yield Hypothesis(
            cause="host",
            mechanism="swapping",
            strength=0.35,
            sentence="The host is out of memory and swaps.",
            evidence=given(summary, "swap_out_mb_per_s", "memory is written to swap", 0.0),
            techniques=("keep_model_resident",),
            tempting=HOST_ADVICE,
            phase="e2e",
        )
