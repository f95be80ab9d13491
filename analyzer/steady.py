"""Steady decoding, what is left of decode without others' prefill and preemption: weight bytes, KV bytes, compute, host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phasewise.analyzer.decoding import BANDWIDTH_EFFICIENCY
from phasewise.analyzer.intervals import Bools, Floats, Steps, valid
from phasewise.analyzer.machine import Machine, machine, typical_model
from phasewise.collector.context import Context
from phasewise.rules.counting import Precision, decode_step
from phasewise.rules.load import Rulebook
from phasewise.rules.schema import Model

COMPUTE_EFFICIENCY = 0.75  # best matrix products reach 73-87 % of the data sheet, roofline.md 4.1
CONTEXT_GRAIN_TOKENS = 64  # contexts are counted in these steps: the error is far below that of the efficiencies
CAUSES = ("decode.weights", "decode.kv", "decode.compute", "host", "unexplained")


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """For each request: shares of bandwidth bytes, and the least step time by memory and by compute (NaN: no accelerator).

    weight_share: weight bytes over all bytes of its steps; intensity: FLOP per byte of the linear layers; lowest, highest:
    ridges of the accelerators known, between which an unknown one is not judged.
    """

    weight_share: Floats
    intensity: Floats
    memory_s: Floats
    compute_s: Floats
    lowest_ridge: float
    highest_ridge: float

    def shares(self, rows: Bools, steady_s: Floats, gaps: Floats) -> Mapping[str, Floats]:
        """Seconds of steady decode of the chosen rows by cause; they add up to steady_s."""
        share, memory, compute = self.weight_share[rows], self.memory_s[rows], self.compute_s[rows]
        known = np.isfinite(memory)
        steps = np.maximum(gaps, 1.0)
        bound = np.where(known, np.minimum(np.fmax(memory, compute) * steps, steady_s), steady_s)
        below = np.where(known, memory >= compute, self.intensity[rows] < self.lowest_ridge)
        above = np.where(known, memory < compute, self.intensity[rows] > self.highest_ridge)
        reading = np.where(below, bound, 0.0)
        return {
            "decode.weights": reading * share,
            "decode.kv": reading * (1.0 - share),
            "decode.compute": np.where(above, bound, 0.0),
            "host": np.where(known, steady_s - bound, 0.0),
            "unexplained": np.where(~below & ~above, steady_s, 0.0),
        }


def ridges(rulebook: Rulebook, dtype: str) -> tuple[float, float]:
    """Lowest and highest ridge (FLOP per byte) of the accelerators in the rulebook for a dtype."""
    found = [r for gpu in rulebook.gpus.values() if (r := gpu.ridge_flop_per_byte(dtype)) is not None]
    return (min(found), max(found)) if found else (0.0, float("inf"))


def decode_split(context: Context, number: Mapping[str, Floats], running: Steps, rulebook: Rulebook) -> DecodeSplit:
    """Counts bytes and FLOPs of each request's steps from the batch that ran beside it and its mean context.

    An unknown model counts as dense at 16 bit: the intensity of its linear layers is then the batch, whatever its size, and
    all its bytes are taken as weights.
    """
    built = machine(context.settings, typical_model(context.requests), rulebook)
    start, end = number["first_token_unix_ns"], number["finished_unix_ns"]
    batch = np.divide(running.integral(start, end), end - start, out=np.ones(len(end)), where=valid(start, end))
    batch = np.maximum(np.nan_to_num(batch, nan=1.0), 1.0)
    tokens = np.nan_to_num(number["input_tokens"]) + np.nan_to_num(number["output_tokens"]) / 2
    lowest, highest = ridges(rulebook, built.dtype)
    if not context.instance:
        # Calls that only a client saw: what ran them, beside what, is not known.
        lowest, highest = 0.0, float("inf")
    return _count(built, batch, tokens, lowest, highest)


def _count(built: Machine, batch: Floats, tokens: Floats, lowest: float, highest: float) -> DecodeSplit:
    n = len(batch)
    share, intensity = np.ones(n), batch * 16 / built.precision.weight_bits
    memory, compute = np.full(n, np.nan), np.full(n, np.nan)
    if built.model is None:
        return DecodeSplit(share, intensity, memory, compute, lowest, highest)
    sizes = np.rint(batch).astype(int)
    lengths = (np.maximum(np.rint(tokens / CONTEXT_GRAIN_TOKENS), 1) * CONTEXT_GRAIN_TOKENS).astype(int)
    # Layers and head count by the batch alone, attention by the context of one sequence: no pair of both is counted by itself.
    batches, by_batch = np.unique(sizes, return_inverse=True)
    contexts, by_context = np.unique(lengths, return_inverse=True)
    layers = np.array([_layers(built.model, built.precision, int(b)) for b in batches]).reshape(-1, 3)[by_batch]
    attention = np.array([_attention(built.model, built.precision, int(s)) for s in contexts]).reshape(-1, 2)[
        by_context
    ]
    weights, intensity = layers[:, 0], layers[:, 1]
    moved = weights + sizes * attention[:, 0]
    share = weights / moved
    if built.gpu is not None:
        peak = built.gpu.peak_flops.get(built.dtype)
        memory = moved / built.devices / (built.gpu.memory_bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY)
        flops = layers[:, 2] + sizes * attention[:, 1]
        compute = flops / built.devices / (peak * COMPUTE_EFFICIENCY) if peak else np.zeros(n)
    return DecodeSplit(share, intensity, memory, compute, lowest, highest)


@lru_cache(maxsize=16_384)
def _layers(model: Model, precision: Precision, batch: int) -> tuple[float, float, float]:
    """Weight bytes, FLOP per byte of the linear layers, and FLOPs of a step of `batch` sequences, attention apart."""
    step = decode_step(model, precision, batch, 1)
    weights = step.linear.weight_bytes + step.head.weight_bytes
    return weights, step.linear.intensity_flop_per_byte or 0.0, float(step.linear.flops + step.head.flops)


@lru_cache(maxsize=16_384)
def _attention(model: Model, precision: Precision, context_tokens: int) -> tuple[float, float]:
    """KV bytes and FLOPs of the attention of one sequence in a step."""
    work = decode_step(model, precision, 1, context_tokens).attention
    return work.kv_bytes, float(work.flops)
