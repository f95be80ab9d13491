"""Steady decoding, what is left of decode without others' prefill and preemption: weight bytes, KV bytes, compute, links, host.

Where the accelerator's kernels were measured, the step that ran beside a request is timed by their curves and divided by what each
resource would save of it; else by its bytes and FLOPs at a usual share of the peaks. What is above that is the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phasewise.analyzer.context_rows import Rows
from phasewise.analyzer.decoding import BANDWIDTH_EFFICIENCY
from phasewise.analyzer.intervals import Floats, or_zero
from phasewise.analyzer.kept_figures import Ints, KeptFigures
from phasewise.analyzer.kernel_times import Parts, kernel_times
from phasewise.analyzer.links import Links
from phasewise.analyzer.machine import Machine
from phasewise.analyzer.roofline import known_ridges
from phasewise.collector.context import Context
from phasewise.rules.counting import Precision, decode_step
from phasewise.rules.load import Rulebook
from phasewise.rules.schema import Model

COMPUTE_EFFICIENCY = 0.75  # best matrix products reach 73-87 % of the data sheet, roofline.md 4.1
CONTEXT_GRAIN_TOKENS = 64  # contexts are counted in these steps: the error is far below that of the efficiencies
CAUSES = ("decode.weights", "decode.kv", "decode.compute", "communication.node", "host", "unexplained")


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """For each request: shares of bandwidth bytes, and the least step time by memory and by compute (NaN: no accelerator).

    weight_share: weight bytes over all bytes of its steps; intensity: FLOP per byte of the linear layers; lowest, highest:
    ridges of the accelerators known, between which an unknown one is not judged. kernels: a step by resource, where
    measured curves tell; then nothing else is asked.
    """

    weight_share: Floats
    intensity: Floats
    memory_s: Floats
    compute_s: Floats
    lowest_ridge: float
    highest_ridge: float
    kernels: Parts | None = None

    def part(self, rows: Rows) -> DecodeSplit:
        """That of the targets."""
        kernels = self.kernels
        if kernels is not None:
            own = (kernels.weights, kernels.kv, kernels.compute, kernels.links, kernels.floors)
            kernels = Parts(*(rows.chosen(one) for one in own))
        return DecodeSplit(
            weight_share=rows.chosen(self.weight_share),
            intensity=rows.chosen(self.intensity),
            memory_s=rows.chosen(self.memory_s),
            compute_s=rows.chosen(self.compute_s),
            lowest_ridge=self.lowest_ridge,
            highest_ridge=self.highest_ridge,
            kernels=kernels,
        )

    def shares(self, steady_s: Floats, gaps: Floats) -> Mapping[str, Floats]:
        """Seconds of steady decode of each request by cause; they add up to steady_s."""
        if self.kernels is not None:
            return _by_kernels(self.kernels, steady_s, np.maximum(gaps, 1.0))
        share, memory, compute = self.weight_share, self.memory_s, self.compute_s
        known = np.isfinite(memory)
        steps = np.maximum(gaps, 1.0)
        bound = np.where(known, np.minimum(np.fmax(memory, compute) * steps, steady_s), steady_s)
        below = np.where(known, memory >= compute, self.intensity < self.lowest_ridge)
        above = np.where(known, memory < compute, self.intensity > self.highest_ridge)
        reading = np.where(below, bound, 0.0)
        return {
            "decode.weights": reading * share,
            "decode.kv": reading * (1.0 - share),
            "decode.compute": np.where(above, bound, 0.0),
            "host": np.where(known, steady_s - bound, 0.0),
            "unexplained": np.where(~below & ~above, steady_s, 0.0),
        }


def _by_kernels(parts: Parts, steady_s: Floats, steps: Floats) -> Mapping[str, Floats]:
    """Steps that take longer than their kernels wait for the host; kernels that should take longer are faster all alike."""
    expected = parts.total * steps
    scale = steps * np.divide(np.minimum(expected, steady_s), expected, out=np.zeros_like(expected), where=expected > 0)
    found = {
        "decode.weights": parts.weights * scale,
        "decode.kv": parts.kv * scale,
        "decode.compute": parts.compute * scale,
        "communication.node": parts.links * scale,
    }
    # The rest to the last bit, floors of the calls among it.
    return found | {"host": np.maximum(steady_s - sum(found.values(), start=np.zeros_like(steady_s)), 0.0)}


def ridges(rulebook: Rulebook, dtype: str) -> tuple[float, float]:
    """Lowest and highest ridge (FLOP per byte) of the accelerators in the rulebook for a dtype."""
    return known_ridges(rulebook.gpus.values(), dtype) or (0.0, float("inf"))


def decode_split(
    context: Context,
    built: Machine,
    batch: Floats,
    input_tokens: Floats,
    output_tokens: Floats,
    rulebook: Rulebook,
    links: Links | None = None,
) -> DecodeSplit:
    """Counts bytes and FLOPs of the steps of some requests from the batch that ran beside each (NaN: unknown) and its mean context.
    built: the machine they ran on; links: what its prompts tell of its links, where it has several devices.

    An unknown model counts as dense at 16 bit: the intensity of its linear layers is then the batch, whatever its size, and
    all its bytes are taken as weights.
    """
    batch = np.fmax(batch, 1.0)
    tokens = or_zero(input_tokens) + or_zero(output_tokens) / 2
    lowest, highest = ridges(rulebook, built.dtype)
    if not context.instance:
        # Calls that only a client saw: what ran them, beside what, is not known.
        lowest, highest = 0.0, float("inf")
    return _count(built, batch, tokens, lowest, highest, links)


def _count(
    built: Machine, batch: Floats, tokens: Floats, lowest: float, highest: float, links: Links | None
) -> DecodeSplit:
    n = len(batch)
    share, intensity = np.ones(n), batch * 16 / built.precision.weight_bits
    memory, compute = np.full(n, np.nan), np.full(n, np.nan)
    if built.model is None:
        return DecodeSplit(share, intensity, memory, compute, lowest, highest)
    if (kernels := kernel_times(built)) is not None:
        parts = kernels.decoding(batch, batch * np.maximum(tokens, 1.0))
        parts = parts if links is None else links.slowed(parts)
        return DecodeSplit(share, intensity, memory, compute, lowest, highest, parts)
    sizes = np.rint(batch).astype(np.int64)
    lengths = np.maximum(np.rint(tokens / CONTEXT_GRAIN_TOKENS), 1).astype(np.int64)
    # Layers and head count by the batch alone, attention by the context of one sequence: no pair of both is counted by itself.
    counts = _counts(built.model, built.precision)
    weights, intensity, flops = counts.layers.of(sizes)
    kv_bytes, kv_flops = counts.attention.of(lengths)
    moved = weights + sizes * kv_bytes
    share = weights / moved
    if built.gpu is not None:
        peak = built.gpu.nominal_flops(built.dtype)
        memory = moved / built.devices / (built.gpu.nominal_bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY)
        done = flops + sizes * kv_flops
        compute = done / built.devices / (peak * COMPUTE_EFFICIENCY) if peak else np.zeros(n)
    return DecodeSplit(share, intensity, memory, compute, lowest, highest)


class _Counts:
    """Bytes and FLOPs of decode steps of one model. layers, by the batch: weight bytes, FLOP per byte of the linear layers, and FLOPs of a
    step, attention apart; attention, by the context in CONTEXT_GRAIN_TOKENS: KV bytes and FLOPs of one sequence in a step."""

    def __init__(self, model: Model, precision: Precision) -> None:
        self._model, self._precision = model, precision
        self.layers = KeptFigures(self._layers, 3)
        self.attention = KeptFigures(self._attention, 2)

    def _layers(self, batches: Ints) -> Floats:
        steps = [decode_step(self._model, self._precision, batch, 1) for batch in batches.tolist()]
        weights = [step.linear.weight_bytes + step.head.weight_bytes for step in steps]
        intensity = [step.linear.intensity_flop_per_byte or 0.0 for step in steps]
        return np.array([weights, intensity, [float(step.linear.flops + step.head.flops) for step in steps]])

    def _attention(self, grains: Ints) -> Floats:
        lengths = [count * CONTEXT_GRAIN_TOKENS for count in grains.tolist()]
        works = [decode_step(self._model, self._precision, 1, tokens).attention for tokens in lengths]
        return np.array([[work.kv_bytes for work in works], [float(work.flops) for work in works]])


# By model and precision: to find what was counted costs more than a look-up where these are hashed for every single count.
_counts = lru_cache(maxsize=64)(_Counts)
