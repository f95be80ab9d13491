"""Time of a call of each kind of kernel: compute and memory joined by a smooth maximum, with efficiencies that grow with the
shape.

Everything here works on numbers and on numpy arrays alike, so that a step asked alone and a column of steps get one answer.
A resource taken away takes the inefficiency of its use along: without the weights' bytes nothing is left of reading them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from phasewise.rules.schema import OperatorEfficiency

Amount: TypeAlias = Any  # a float, or an array of floats: no type covers the operators of both


@dataclass(frozen=True, slots=True)
class Kept:
    """1: the resource costs what it costs; 0: it is taken away."""

    compute: float = 1.0
    weight_bytes: float = 1.0
    kv_bytes: float = 1.0
    host: float = 1.0
    communication: float = 1.0
    cold_start: float = 1.0


EVERYTHING = Kept()


def smooth_maximum(first_s: Amount, second_s: Amount, sharpness: float) -> Amount:
    """(a^p + b^p)^(1/p): the sum at p = 1, the larger at infinity; never below the larger."""
    return (first_s**sharpness + second_s**sharpness) ** (1.0 / sharpness)


def least(first: Amount, second: Amount) -> Amount:
    """The smaller of two."""
    if isinstance(first, np.ndarray):
        return np.minimum(first, second)
    return min(first, second)


def one_where_any(amount: Amount) -> Amount:
    """1.0 where there is something to do, else 0.0."""
    return (amount > 0) * 1.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kind of kernel on one device: a fitted curve and the peaks it is a share of."""

    curve: OperatorEfficiency
    flops_per_s: float
    bytes_per_s: float

    def seconds(self, padded_flops: Amount, padded_bytes: Amount) -> Amount:
        """Of a call, without the floor. FLOPs and bytes come inflated by what the shape wastes: half the rate at x = half is
        x + half of them at the full rate."""
        return smooth_maximum(
            padded_flops / (self.flops_per_s * self.curve.compute_ratio),
            padded_bytes / (self.bytes_per_s * self.curve.memory_ratio),
            self.curve.sharpness,
        )


@dataclass(frozen=True, slots=True)
class Gemm:
    """The matrix products of one family, (rows x k)(k x n), one a layer. weight_bytes: of one product."""

    kernel: Kernel
    layers: int
    n: int
    k: int
    weight_bytes: float
    activation_bytes_per_row: float

    def seconds(self, rows: Amount, kept: Kept = EVERYTHING) -> Amount:
        """All layers of the family; 0 for no rows."""
        curve, works = self.kernel.curve, one_where_any(rows)
        shape = 2.0 * (self.n + curve.half_columns) * (self.k + curve.half_depth)
        flops = shape * (rows + curve.half_rows) * (works * kept.compute)
        weights = self.weight_bytes * kept.weight_bytes
        call_s = self.kernel.seconds(flops, (weights + self.activation_bytes_per_row * rows) * works)
        return (call_s + curve.floor_s * kept.host * works) * self.layers


@dataclass(frozen=True, slots=True)
class ExpertGemm:
    """The routed experts' products of one family: one grouped kernel a layer over the distinct experts the step meets."""

    kernel: Kernel
    layers: int
    n: int
    k: int
    experts: int
    per_token: int
    expert_bytes: float
    activation_bytes_per_row: float

    def seconds(self, tokens: Amount, kept: Kept = EVERYTHING) -> Amount:
        """All layers; distinct experts as `counting.expected_distinct_experts`: E * (1 - (1 - k/E)^T)."""
        distinct = self.experts * (1.0 - (1.0 - self.per_token / self.experts) ** tokens)
        return self.seconds_over(tokens, distinct, kept)

    def seconds_over(self, tokens: Amount, distinct: Amount, kept: Kept = EVERYTHING) -> Amount:
        """All layers, where the number of distinct experts is known."""
        curve, works = self.kernel.curve, one_where_any(tokens)
        rows = tokens * self.per_token
        padded_rows = rows + curve.half_rows * distinct  # each expert pads its own rows
        flops = 2.0 * (self.n + curve.half_columns) * (self.k + curve.half_depth) * padded_rows * kept.compute
        weights = self.expert_bytes * distinct * kept.weight_bytes
        call_s = self.kernel.seconds(flops * works, (weights + self.activation_bytes_per_row * rows) * works)
        return (call_s + curve.floor_s * kept.host * works) * self.layers


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Causal attention of all chunks of a step in one call a layer.

    heads, flops_per_pair, kv_token_bytes: of one layer on one device.
    """

    kernel: Kernel
    layers: int
    heads: int
    flops_per_pair: float
    kv_token_bytes: float
    activation_bytes_per_token: float
    window_tokens: int | None = None

    def seconds(self, tokens: Amount, pairs: Amount, past: Amount, chunks: Amount, kept: Kept = EVERYTHING) -> Amount:
        """tokens: new ones of all chunks. With a window, pairs are at most window x tokens and the cached tokens read at most
        window x chunks: exact far from the window, else more than is really done."""
        curve, works = self.kernel.curve, one_where_any(tokens)
        if self.window_tokens is not None:
            pairs = least(pairs, tokens * self.window_tokens)
            past = least(past, chunks * self.window_tokens)
        # Half the rate at half_rows attended tokens a query, and at half_work = heads x sqrt(pairs): a short chunk after a long
        # prefix keeps the device busier than a short prompt does.
        padded = pairs + curve.half_rows * tokens + curve.half_work / self.heads * pairs**0.5
        flops = self.flops_per_pair * padded * (works * kept.compute)
        kv = self.kv_token_bytes * (past + tokens) * kept.kv_bytes
        call_s = self.kernel.seconds(flops, (kv + self.activation_bytes_per_token * tokens) * works)
        return (call_s + curve.floor_s * kept.host * works) * self.layers


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Attention of one new token a sequence over its context, all sequences in one call a layer.

    kv_heads: lists a sequence's KV is read in; kv_token_bytes: over all of them; both of one layer on one device.
    """

    kernel: Kernel
    layers: int
    kv_heads: int
    flops_per_pair: float
    kv_token_bytes: float
    activation_bytes_per_sequence: float
    window_tokens: int | None = None

    def seconds(self, sequences: Amount, context: Amount, kept: Kept = EVERYTHING) -> Amount:
        """context: summed over the sequences. With a window it is at most window x sequences, which is more than is done where
        some contexts are below the window and others above."""
        curve, works = self.kernel.curve, one_where_any(sequences)
        if self.window_tokens is not None:
            context = least(context, sequences * self.window_tokens)
        flops = self.flops_per_pair * context * (works * kept.compute)
        ramp = curve.half_head_bytes * self.kv_heads * sequences
        kv = (self.kv_token_bytes * context + ramp) * kept.kv_bytes
        call_s = self.kernel.seconds(flops, (kv + self.activation_bytes_per_sequence * sequences) * works)
        return (call_s + curve.floor_s * kept.host * works) * self.layers


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Norms, rotary embedding, activation functions, sampling: bytes only. calls: kernels a step; bytes_per_row: of all."""

    kernel: Kernel
    calls: int
    bytes_per_row: float

    def seconds(self, rows: Amount, kept: Kept = EVERYTHING) -> Amount:
        curve, works = self.kernel.curve, one_where_any(rows)
        moved_s = self.bytes_per_row * rows / (self.kernel.bytes_per_s * curve.memory_ratio)
        return moved_s + self.calls * curve.floor_s * kept.host * works
