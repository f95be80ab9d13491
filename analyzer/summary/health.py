"""What speaks for saying nothing: devices that are broken, numbers far from every limit, too few requests."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.analyzer.summary.decode import batch_of, step_s
from phasewise.analyzer.summary.hypothesis import (
    Evidence,
    Hypothesis,
    Tempting,
    computed,
    either,
    given,
    memory_is_free,
    nothing_waits,
    supported,
)
from phasewise.analyzer.summary.machine import SLOWEST_ACCELERATOR_BYTES_PER_S, Machine
from phasewise.analyzer.summary.points import Summary, at_least, at_most, first, ratio

# Decode this many times above its floor is not limited by memory, whatever the kernel.
_FAR = 5.0
# Prefill slower than this on any accelerator is not arithmetic (prompt tokens per second and 10^9 parameters, inverted).
_SLOWEST_PREFILL_FLOPS = 1e12
_ADVICE = (
    Tempting("weight_only_quantization", "saves bytes of a step that is far from the memory's limit"),
    Tempting("speculative_decoding", "saves steps of a device that does not run as it should"),
    Tempting("kv_cache_quantization", "saves bytes of a step that is far from the memory's limit"),
    Tempting("prefix_caching", "acts on prefill; it does not explain this"),
)


def device_errors(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The driver logged errors: nothing measured on this device says anything about the workload."""
    if at_least(summary.peak("gpu_health_errors_count"), 1):
        yield Hypothesis(
            cause="unexplained",
            mechanism="device_errors",
            strength=0.9,
            sentence="The device reports errors; repair it before anything is concluded.",
            evidence=given(summary, "gpu_health_errors_count", "errors were logged by the driver", 0),
            techniques=("check_device_health", "collect_missing_signals"),
            tempting=_ADVICE,
            symptoms=frozenset({"host", "bandwidth", "compute"}),
        )


def far_from_limits(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Decode, or decode and prefill, many times slower than any limit of the hardware explains, with nothing waiting."""
    pace, batch = step_s(summary), batch_of(summary) or 1.0
    if pace is None and batch <= 4:
        pace = ratio(batch, summary.number("output_throughput_tok_per_s"))
    bandwidth = machine.bandwidth_bytes_per_s or (
        SLOWEST_ACCELERATOR_BYTES_PER_S if machine.kind in ("gpu", "npu") else None
    )
    evidence: list[Evidence] = []
    strength = 0.0
    if pace and batch <= 4 and bandwidth and machine.read_high_bytes:
        floor = machine.read_high_bytes / bandwidth
        if pace >= _FAR * floor:
            strength = 0.55
            evidence.append(
                computed(
                    "decode_floor_ratio",
                    pace / floor,
                    1.0,
                    "ratio",
                    "tpot x bandwidth / weight bytes",
                    "times slower than reading the weights takes",
                )
            )
    rate, params = summary.number("prefill_rate_tok_per_s"), machine.active_params
    alone = at_most(summary.in_flight, 1) or at_most(summary.peak("requests_running"), 1)
    if rate and params and alone and 2 * params * rate < _SLOWEST_PREFILL_FLOPS and machine.kind in ("gpu", "npu"):
        strength = either(strength, 0.5)
        evidence.append(
            computed(
                "prefill_flops",
                2 * params * rate,
                _SLOWEST_PREFILL_FLOPS,
                "FLOP/s",
                "2 x parameters x prefill_rate",
                "far below what any accelerator computes",
            )
        )
    power = _idle_power(summary, machine)
    if power is not None:
        strength = either(strength, 0.25)
        evidence.append(power)
    if not evidence or strength < 0.3:
        return
    strength = supported(strength, evidence, 0.15, nothing_waits(summary))
    strength = supported(strength, evidence, 0.1, memory_is_free(summary, 0.5, text="memory is free"))
    yield Hypothesis(
        cause="unexplained",
        mechanism="far_from_limits",
        strength=min(strength, 0.9),
        sentence="The device is far from every limit, and nothing measured says what holds it.",
        evidence=tuple(evidence),
        techniques=("check_device_health", "collect_missing_signals"),
        tempting=_ADVICE,
        symptoms=frozenset({"bandwidth"}),
    )


def _idle_power(summary: Summary, machine: Machine) -> Evidence | None:
    drawn, rated = summary.number("gpu_power_w"), machine.gpu.tdp_w if machine.gpu else None
    busy = summary.number("gpu_utilization_ratio")
    if drawn is None or rated is None or drawn > 0.3 * rated or not at_least(busy, 0.9):
        return None
    return computed(
        "gpu_power_w",
        drawn,
        rated,
        "W",
        "gpu_power_w",
        "a kernel always runs, yet the device draws little power: it waits inside",
    )


def slowed_clock(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """The core clock fell although nobody set it: heat, power or a fault."""
    now = summary.number("sm_clock_mhz")
    for point in summary.comparators:
        before = point.number("sm_clock_mhz")
        if now and before and now < 0.8 * before and "hardware.sm_clock_mhz" not in (point.differs or {}):
            yield Hypothesis(
                cause="unexplained",
                mechanism="slowed_clock",
                strength=0.65,
                sentence="The device runs at a lower clock than before.",
                evidence=(
                    computed(
                        "sm_clock_mhz", now, before, "MHz", point.place, "was the clock of the run it is compared with"
                    ),
                ),
                techniques=("check_device_health", "collect_missing_signals"),
                tempting=_ADVICE,
                symptoms=frozenset({"compute", "bandwidth", "host"}),
            )
            return


def unexplained_stalls(summary: Summary, machine: Machine) -> Iterator[Hypothesis]:
    """Most gaps are short and some are long: stalls, not slow decode. Which, the numbers do not tell."""
    middle = summary.seconds("itl_p50")
    mean, tail = first((summary.seconds("tpot_mean"), summary.seconds("tpot_p50"))), summary.tail_s("itl")
    stalled = mean is not None and middle is not None and middle > 0 and mean >= 3 * middle
    long_tail = tail is not None and middle is not None and middle > 0 and tail >= 8 * middle
    if not stalled and not long_tail:
        return
    yield Hypothesis(
        cause="unexplained",
        mechanism="stalls",
        strength=0.5 if stalled and long_tail else 0.4,
        sentence="Decode stalls now and then; whether for prefill, transfers or preemption was not measured.",
        evidence=(
            computed(
                "itl_tail_s", tail or mean, middle, "s", "itl and tpot", "single gaps are many times the usual one"
            ),
        ),
        techniques=("collect_missing_signals",),
        tempting=_ADVICE[:3],
        symptoms=frozenset({"bandwidth"}),
    )
