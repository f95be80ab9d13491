"""Deployments and steps whose time is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phasewise.instrumented_engine.executors.deployment import Deployment
from phasewise.instrumented_engine.executors.time_law import TimeLaw
from phasewise.instrumented_engine.recording import Ints, StepComposition
from phasewise.rules.counting import Chunk, Precision, step_work
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
FP8 = Precision(weight_bits=8, kv_bits=8)


def deployment(gpu: str = "h100-sxm", model: str = "llama-3.1-8b", devices: int = 1, **others: object) -> Deployment:
    return Deployment(
        gpu=RULES.gpus[gpu],
        model=RULES.models[model],
        tensor_parallel_count=devices,
        **others,  # type: ignore[arg-type]
    )


def composed(
    chunks: Sequence[tuple[int, int, bool]] = (), contexts: Sequence[int] = (), number: int = 100
) -> StepComposition:
    """chunks: (new tokens, cached tokens, last)."""
    return StepComposition(
        number=number,
        prefill_tokens=sum(new for new, _, _ in chunks),
        prefill_pairs=sum(new * past + new * (new + 1) // 2 for new, past, _ in chunks),
        prefill_past_tokens=sum(past for _, past, _ in chunks),
        chunks=len(chunks),
        last_chunks=sum(last for _, _, last in chunks),
        decode_sequences=len(contexts),
        context_tokens=sum(contexts),
    )


def columns(steps: Sequence[StepComposition]) -> dict[str, Ints]:
    names = StepComposition.__slots__
    return {name: np.array([getattr(step, name) for step in steps], dtype=np.int64) for name in names}


def without(law: TimeLaw, step: StepComposition, resource: str | None) -> float:
    return float(law.seconds_of(columns([step]), resource)[0])


def bound_s(at: Deployment, chunks: Sequence[tuple[int, int, bool]], contexts: Sequence[int]) -> float:
    """Roofline by operator group, everything divided evenly over the devices."""
    work = step_work(at.model, at.precision, [Chunk(*chunk) for chunk in chunks], contexts)
    peak = at.gpu.peak_flops[at.compute_dtype] * at.tensor_parallel_count
    bandwidth = at.gpu.nominal_bandwidth_bytes_per_s * at.tensor_parallel_count
    groups = (work.linear, work.attention, work.head)
    return sum(max(group.flops / peak, group.bytes / bandwidth) for group in groups)
