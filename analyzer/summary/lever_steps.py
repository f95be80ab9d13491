"""Settings that decide how fast a step is: kernels, graphs, scheduling ahead, the CPU, devices on a token, and what nobody knows."""

from __future__ import annotations

from collections.abc import Mapping

from phasewise.analyzer.summary.change import Change, Choose, Lever, switch
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Summary


def _kernel(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    here = str(change.here or "").lower()
    quantized = here not in ("", "none", "auto") and change.path != "engine.attention_backend"
    kernel = summary.text("engine.quant_kernel")
    if quantized or kernel:
        decode = "ttft" not in change.gains
        return Lever(
            "decode.weights" if decode else "prefill.compute", "slow_kernel", ("use_optimized_quant_kernel", "collect_missing_signals"),
            "The same weights run faster by another kernel.", strength=0.5, symptoms=frozenset({"host"}),
        )  # fmt: skip
    if here in ("none", "auto") and str(change.there or "").lower() not in ("", "none", "auto"):
        return Lever(
            "decode.weights",
            "weight_bytes",
            ("weight_only_quantization",),
            "With smaller weights decode is faster: it waits for their bytes.",
            ("tpot", "throughput"),
        )
    return None


def _wider(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """More devices on each token help: that is no fault, but says that the work of one token decides."""
    if not change.raised:
        return None
    decode = change.best(("tpot", "itl"))
    return Lever(
        "decode.weights" if decode else "prefill.compute",
        "one_device_is_slow",
        ("tensor_parallel",),
        "More devices on each token are faster: the work itself holds the time.",
        strength=0.4,
    )


def _cpu(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    graphs = ("cuda_graphs",) if summary.text("engine.cuda_graphs") in ("off", None) else ()
    return Lever(
        "host",
        "slow_cpu",
        (*graphs, "async_scheduling", "limit_cpu_threads"),
        "The same device is faster with another CPU.",
        symptoms=frozenset({"bandwidth"}),
    )


def _sampling(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    return Lever(
        "host",
        "sampling",
        ("async_scheduling", "limit_cpu_threads"),
        "Without these sampling options the same tokens come faster.",
        ("tpot", "itl", "e2e", "throughput"),
        0.6,
        frozenset({"bandwidth"}),
    )


def unknown(summary: Summary, machine: Machine, change: Change) -> Lever | None:
    """A version or a kernel library: something got slower, and only a profile says what."""
    return Lever(
        "unexplained",
        "regression",
        ("collect_missing_signals", "check_device_health"),
        f"{change.path} changed and it got slower; the numbers do not say where.",
        strength=0.45,
    )


_EAGER = switch(
    "host",
    "eager_launches",
    ("cuda_graphs",),
    "With graphs the same steps are faster: their kernels were launched one by one.",
    ("tpot", "itl", "e2e", "throughput"),
    frozenset({"bandwidth"}),
)


_ASYNC = switch(
    "host.scheduler",
    "step_gap",
    ("async_scheduling",),
    "With the next step scheduled ahead the device idles less.",
    ("tpot", "itl", "e2e", "throughput"),
)


STEPS: Mapping[str, Choose] = {
    "engine.cuda_graphs": _EAGER,
    "engine.async_scheduling": _ASYNC,
    "engine.quantization": _kernel,
    "engine.quant_kernel": _kernel,
    "engine.tensor_parallel": _wider,
    "engine.attention_backend": unknown,
    "engine.version": unknown,
    "hardware.cpu_cores_count": _cpu,
    "hardware.cpu_arch": _cpu,
    "workload.sampling": _sampling,
}  # fmt: skip
