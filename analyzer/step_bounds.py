"""What a step costs at least by the data sheet: seconds of weight bytes, KV bytes, FLOPs and collectives on one device.

A step of an engine is judged by operator group (roofline.md 2): linear layers by its tokens, attention by the context it attends
to. Nothing here is an efficiency: these are the bounds that a fit to measured steps is held against. Of a device that was only
measured they stand on what its data sheet would about state, so that the same efficiencies are shares of the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.machine import Machine
from phasewise.rules.counting import (
    active_linear_weights,
    attention_flops_per_pair,
    head_weights,
    kv_bytes_per_token,
    kv_copies,
    linear_weight_bytes_read,
)
from phasewise.rules.schema import Gpu, Model

# Nominal time of one all-reduce of a few kilobytes between devices of a node: 5-20 us by number of devices and library.
COLLECTIVE_S = 10e-6
PCIE_BYTES_PER_S = 32e9  # where the data sheet names no link


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds at data-sheet speed on one of `devices`.

    token_s: FLOPs of the linear layers, a token; pair_s, pair_bytes_s: FLOPs of prefill attention a (query, key) pair, reading
    the KV of one earlier token for a chunk; context_s: KV bytes of one attended token, context_flops_s: its FLOPs in decode;
    row_s: activations of a token; collective_s, link_token_s: all-reduces of a step, and their bytes a token (0 on one device).
    """

    machine: Machine
    token_s: float
    pair_s: float
    context_s: float
    context_flops_s: float
    row_s: float
    collective_s: float
    link_token_s: float

    @property
    def knee_tokens(self) -> float:
        """Tokens from which on the FLOPs of the linear layers outweigh their bytes."""
        return float(self.weights_s(np.array([1e6]))[0] / self.token_s)

    @property
    def routed(self) -> bool:
        """The weights a step reads depend on its tokens."""
        return self.machine.model is not None and self.machine.model.moe is not None

    def weights_s(self, tokens: Floats) -> Floats:
        """Reading the weights once, a step of so many tokens."""
        model, gpu = self.machine.model, self.machine.gpu
        assert model is not None and gpu is not None
        return weight_bytes(self.machine, model, tokens) / self.machine.devices / gpu.nominal_bandwidth_bytes_per_s


def weight_bytes(built: Machine, model: Model, tokens: Floats) -> Floats:
    """Weight bytes a step of so many tokens reads, LM head included; over all devices."""
    head = head_weights(model) * built.precision.head_weight_bits / 8
    if model.moe is None:
        return np.full(len(tokens), linear_weight_bytes_read(model, built.precision, 1) + head)
    different, which = np.unique(np.maximum(np.rint(tokens), 1).astype(np.int64), return_inverse=True)
    read = np.array([linear_weight_bytes_read(model, built.precision, int(count)) for count in different])
    return np.asarray(read[which.reshape(-1)] + head, dtype=np.float64)


def kv_token_bytes(built: Machine, model: Model) -> float:
    """KV bytes of one attended token over all devices, copies beyond the KV heads included; layers with a sliding window, which
    stop growing with the context, left out."""
    full = (model.layers - (model.sliding_window.layers if model.sliding_window else 0)) / model.layers
    return kv_bytes_per_token(model, built.precision.kv_bits) * kv_copies(model, built.devices) * full


def bounds_of(built: Machine) -> Bounds | None:
    """None where model or accelerator are unknown, or no peak is known for the data type."""
    model, gpu = built.model, built.gpu
    if model is None or gpu is None:
        return None
    peak = gpu.nominal_flops(built.dtype)
    if peak is None:
        return None
    attention_peak = _sixteen_bit(gpu) or peak
    devices, bandwidth = built.devices, gpu.nominal_bandwidth_bytes_per_s
    collective_s = link_token_s = 0.0
    if devices > 1:
        calls = 2 * model.layers + 1
        sent = 2 * (devices - 1) / devices * model.hidden * built.precision.activation_bits / 8
        collective_s = calls * COLLECTIVE_S
        link_token_s = calls * sent / (gpu.link_bandwidth_bytes_per_s or PCIE_BYTES_PER_S)
    width = model.ffn
    if model.moe:
        width = (model.moe.experts_per_token + model.moe.shared_experts) * model.moe.expert_ffn
    row = 8 * model.hidden + (2 * (model.heads + model.kv_heads) * model.head_dim + 3 * width) / devices
    return Bounds(
        machine=built,
        token_s=2 * active_linear_weights(model) / devices / peak,
        pair_s=model.layers * attention_flops_per_pair(model, "expanded") / devices / attention_peak,
        context_s=kv_token_bytes(built, model) / devices / bandwidth,
        context_flops_s=model.layers * attention_flops_per_pair(model, "absorbed") / devices / attention_peak,
        row_s=model.layers * row * built.precision.activation_bits / 8 / bandwidth,
        collective_s=collective_s,
        link_token_s=link_token_s,
    )


def _sixteen_bit(gpu: Gpu) -> float | None:
    return gpu.nominal_flops("bf16") or gpu.nominal_flops("fp16")
