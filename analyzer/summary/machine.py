"""What the hardware and the model allow: bytes of a decode step, bandwidth, peak, and the floors that follow.

Formulas: docs of the roofline (weights are read once a step and shared by the batch; KV is read per sequence).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phasewise.analyzer.summary.points import Point, Summary, first
from phasewise.rules.counting import (
    Precision,
    active_linear_weights,
    head_weights,
    kv_bytes_per_token,
    linear_weight_bytes_read,
)
from phasewise.rules.load import Rulebook
from phasewise.rules.schema import Gpu, Model

# Bits of one weight by the words people use for it; the first match counts. Four-bit formats carry scales: about 4.5.
_DTYPE_BITS: tuple[tuple[str, float], ...] = (
    (r"fp32|f32|float32", 32.0),
    (r"bf16|fp16|\bf16|float16|half|w16a16", 16.0),
    (r"nvfp4|mxfp4|fp4|int4|w4a|awq|gptq|nf4|\bq4|4[- ]?bit", 4.5),
    (r"\bq5", 5.5),
    (r"\bq6", 6.6),
    (r"\bq3", 3.5),
    (r"\bq2", 2.6),
    (r"bfp8|fp8|int8|w8a|e4m3|e5m2|\bq8|8[- ]?bit", 8.0),
)
_BITS_PER_WEIGHT = re.compile(r"(\d+(?:\.\d+)?)\s*bpw")
_PARAMS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*b(?![a-z0-9])")
_ACTIVE = re.compile(r"(?<![a-z0-9])a(\d+(?:\.\d+)?)b(?![a-z0-9])")
# No accelerator of the last ten years that serves language models reads its memory slower than this (bytes per second).
SLOWEST_ACCELERATOR_BYTES_PER_S = 100e9
# Weights between these bounds (bits) cover every format in use: what is true at both ends is true without knowing it.
# Activations, graphs and communicators of one device (AIConfigurator reserves as much).
_ENGINE_RESERVE_BYTES = 3.5e9
# Models above this many parameters are mixtures of experts but for a handful; what one token reads is then unknown.
_SURELY_DENSE_BELOW = 100e9
_FEWEST_ACTIVE = 0.02
FEWEST_BITS, MOST_BITS = 4.0, 16.0


def dtype_bits(text: str | None) -> float | None:
    """Bits of one value of a data type by any of its names (`bf16`, `W4A16`, `4.5bpw`); None when not recognised."""
    if text is None:
        return None
    lowered = text.lower()
    if match := _BITS_PER_WEIGHT.search(lowered):
        return float(match[1])
    return next((bits for pattern, bits in _DTYPE_BITS if re.search(pattern, lowered)), None)


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and model of one summary. Bytes, bytes per second, FLOP per second; None is unknown.

    bandwidth is that of all devices that work on one token together (tensor parallel), peak likewise.
    read_low and read_high bound the weight bytes of one decode step of a single sequence, where the format is unknown.
    rates_measured: bandwidth and peak were reached on a machine, and no data sheet says that nothing is faster.
    """

    kind: str | None
    gpu: Gpu | None
    bandwidth_bytes_per_s: float | None
    peak_flops: float | None
    params: float | None
    active_params: float | None
    weight_bits: float | None
    weight_bytes: float | None
    read_low_bytes: float | None
    read_high_bytes: float | None
    kv_bytes_per_token: float | None
    kv_bits: float | None
    layers: float | None
    model: Model | None
    memory_bytes: float | None  # of one device
    ranks: float
    devices_known: bool  # how many devices read the weights of one token together
    stated_reads: bool  # the sender says what one token reads, or the rulebook knows the model
    rates_measured: bool

    def step_bytes(self, batch: float, context_tokens: float | None) -> tuple[float, float] | None:
        """(weight bytes, KV bytes) that one decode step reads for `batch` sequences; None without weights.

        Of a mixture of experts a batch reads more experts than one sequence: as many as expected of a model the rulebook
        knows, else the lower bound, which is that of one sequence.
        """
        if self.read_low_bytes is None:
            return None
        weights = self.read_low_bytes
        if self.model is not None and self.model.moe is not None and self.weight_bits is not None and batch > 1:
            precision = Precision(weight_bits=self.weight_bits)
            weights = linear_weight_bytes_read(self.model, precision, int(min(batch, 1e6)))
            weights += head_weights(self.model) * precision.head_weight_bits / 8
        return weights, batch * (context_tokens or 0.0) * (self.kv_bytes_per_token or 0.0)

    def floor_s(self, batch: float = 1.0, context_tokens: float | None = None) -> float | None:
        """Least seconds of one decode step: bytes / bandwidth. None where one of the two is unknown."""
        read = self.step_bytes(batch, context_tokens)
        if read is None or not self.bandwidth_bytes_per_s:
            return None
        return sum(read) / self.bandwidth_bytes_per_s

    def pool_estimate_tokens(self, utilization_ratio: float | None) -> float | None:
        """Own estimate of the KV pool: what the weights leave of the device memory the engine may use, less 3.5 GB a device.

        Within some 10 % of what engines report for dense models; a pool the engine states goes before it.
        """
        if self.memory_bytes is None or self.weight_bytes is None or self.kv_bytes_per_token is None:
            return None
        free = (
            self.memory_bytes * self.ranks * (utilization_ratio or 0.9)
            - self.weight_bytes
            - _ENGINE_RESERVE_BYTES * self.ranks
        )
        return max(free, 0.0) / self.kv_bytes_per_token

    def prefill_floor_s(self, tokens: float) -> float | None:
        """Least seconds to compute a prompt: 2 FLOP per parameter used and token / peak; attention not counted."""
        if self.active_params is None or not self.peak_flops:
            return None
        return 2 * self.active_params * tokens / self.peak_flops


def read_machine(summary: Summary, rulebook: Rulebook) -> Machine:
    """The numbers the sender states; what is not stated comes from the rulebook, by the name of accelerator and model."""
    kind = summary.text("hardware.kind")
    gpu = rulebook.find_gpu(summary.text("hardware.accelerator"))
    model = rulebook.find_model(summary.text("model.name"))
    devices = _devices_per_token(summary.observed, kind)
    stated_bandwidth = _giga(summary.count("hardware.memory_bandwidth_gb_per_s"))
    stated_peak = _tera(summary.count("hardware.peak_bf16_dense_tflops"))
    roof = (gpu.roof("bf16") or gpu.roof("fp16")) if gpu else None
    bandwidth = stated_bandwidth or (gpu.bandwidth_bytes_per_s if gpu else None)
    peak = stated_peak or (roof.flops if roof else None)
    name = (summary.text("model.name") or "").lower()
    params = _giga(summary.count("model.params_b")) or (model.params if model else None) or _named(_PARAMS, name)
    stated_active = _giga(summary.count("model.active_params_b")) or _named(_ACTIVE, name)
    shape_active = (
        float(active_linear_weights(model) + head_weights(model))
        if model is not None and model.moe is not None
        else None
    )
    active = stated_active or shape_active or params
    bits = first(
        dtype_bits(text)
        for text in (
            summary.text("model.weight_dtype"),
            summary.text("engine.quantization"),
            name,
            model and model.native_dtype,
        )
        if text
    )
    weights = _giga(summary.count("model.weight_gb")) or (params * bits / 8 if params and bits else None)
    known = (
        stated_active
        or shape_active
        or (params if model is not None or (params or 0.0) < _SURELY_DENSE_BELOW else None)
    )
    low, high = _read_bytes(summary, weights, known, params, bits)
    kv_bits = first(dtype_bits(t) for t in (summary.text("engine.kv_dtype"), summary.text("model.kv_dtype")) if t)
    shape = [summary.count(f"model.{key}") for key in ("layers", "kv_heads", "head_dim")]
    if model is not None and shape[0] is None:
        shape[0] = float(model.layers)
    kv_bytes = summary.count("model.kv_bytes_per_token")
    layers, kv_heads, head_dim = shape
    if kv_bytes is None and model is not None:
        kv_bytes = kv_bytes_per_token(model, kv_bits or 16.0)
    if kv_bytes is None and layers is not None and kv_heads is not None and head_dim is not None:
        kv_bytes = 2 * layers * kv_heads * head_dim * (kv_bits or 16.0) / 8
    return Machine(
        kind=kind,
        gpu=gpu,
        bandwidth_bytes_per_s=bandwidth * devices if bandwidth else None,
        peak_flops=peak * devices if peak else None,
        params=params,
        active_params=active,
        weight_bits=bits,
        weight_bytes=weights,
        read_low_bytes=low,
        read_high_bytes=high,
        kv_bytes_per_token=kv_bytes or None,
        kv_bits=kv_bits,
        layers=layers,
        model=model,
        memory_bytes=_giga(summary.count("hardware.memory_gb")) or (gpu.memory_bytes if gpu else None),
        ranks=summary.ranks,
        devices_known=kind == "cpu"
        or summary.count("engine.tensor_parallel") is not None
        or (summary.count("hardware.count") or 1.0) <= 1,
        stated_reads=model is not None
        or stated_active is not None
        or summary.count("model.weight_gb_read_per_token") is not None
        or summary.count("model.weight_gb") is not None,
        rates_measured=(stated_bandwidth is None and gpu is not None and gpu.memory_bandwidth_bytes_per_s is None)
        or (stated_peak is None and roof is not None and roof.measured),
    )


def _devices_per_token(point: Point, kind: str | None) -> float:
    """Devices that read the weights of one token at the same time: the tensor-parallel ranks; of a CPU its sockets.

    A layer split works one device after the other and adds none.
    """
    tensor = point.count("engine.tensor_parallel")
    if tensor:
        return tensor
    return max(1.0, point.count("hardware.count") or 1.0) if kind == "cpu" else 1.0


def _read_bytes(
    summary: Summary, weights: float | None, active: float | None, params: float | None, bits: float | None
) -> tuple[float | None, float | None]:
    """Bounds of the weight bytes one decode step of one sequence reads.

    active: parameters one token uses; None where the model may be a mixture of experts that says nothing about it.
    """
    stated = _giga(summary.count("model.weight_gb_read_per_token"))
    if stated is not None:
        return stated, stated
    if weights is not None and (active is None or active == params or params is None):
        dense = active is not None or params is None
        return (weights if dense else weights * _FEWEST_ACTIVE), weights
    if active is None or params is None:
        return None, None
    if bits is not None:
        return active * bits / 8, active * bits / 8
    return active * FEWEST_BITS / 8, active * MOST_BITS / 8


def _named(pattern: re.Pattern[str], name: str) -> float | None:
    found = pattern.search(name.replace("-", " ").replace("_", " "))
    return float(found[1]) * 1e9 if found else None


def _giga(value: float | None) -> float | None:
    return value * 1e9 if value else None


def _tera(value: float | None) -> float | None:
    return value * 1e12 if value else None
