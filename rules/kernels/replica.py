"""A model's kernels on one device of a replica, by operator group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phasewise.rules.counting import attention_flops_per_pair, kv_copies, kv_elements_per_token
from phasewise.rules.efficiency_file import generic_efficiency
from phasewise.rules.kernels.collectives import AllReduce
from phasewise.rules.kernels.operators import (
    Amount,
    DecodeAttention,
    Elementwise,
    ExpertGemm,
    Gemm,
    Kept,
    Kernel,
    PrefillAttention,
)
from phasewise.rules.kernels.placement import Placement
from phasewise.rules.schema import Efficiency, Model, OperatorEfficiency

SAMPLING_PASSES = 4  # over the logits in fp32: copy, temperature, softmax, choice
ELEMENTWISE_CALLS = 4  # a layer: two norms with residual, rotary embedding with cache write, activation function
ATTENTION_CALLS = 2  # a layer without graphs: the kernel, and the combination of its parts


@dataclass(frozen=True, slots=True)
class Replica:
    """Operator groups on one device. kernels: launched in a step that no CUDA graph covers."""

    products: tuple[Gemm, ...]
    expert_products: tuple[ExpertGemm, ...]
    head: Gemm
    prefill: tuple[PrefillAttention, ...]
    decode: tuple[DecodeAttention, ...]
    elementwise: Elementwise
    sampling: Elementwise
    all_reduces: AllReduce | None
    logits_gather: AllReduce | None
    kernels: int

    def token_seconds(self, tokens: Amount, kept: Kept) -> Amount:
        """What depends on the tokens of the step alone: linear layers, elementwise kernels, all-reduces."""
        total = self.elementwise.seconds(tokens, kept)
        for product in self.products:
            total = total + product.seconds(tokens, kept)
        for expert in self.expert_products:
            total = total + expert.seconds(tokens, kept)
        if self.all_reduces is not None:
            total = total + self.all_reduces.seconds(tokens, kept)
        return total

    def logit_seconds(self, logits: Amount, kept: Kept) -> Amount:
        """What depends on the sequences that get a token: LM head, sampling, gathering the logits."""
        total = self.head.seconds(logits, kept) + self.sampling.seconds(logits, kept)
        if self.logits_gather is not None:
            total = total + self.logits_gather.seconds(logits, kept)
        return total

    def prefill_seconds(self, tokens: Amount, pairs: Amount, past: Amount, chunks: Amount, kept: Kept) -> Amount:
        """Attention of the chunks."""
        total = self.prefill[0].seconds(tokens, pairs, past, chunks, kept)
        for group in self.prefill[1:]:
            total = total + group.seconds(tokens, pairs, past, chunks, kept)
        return total

    def decode_seconds(self, sequences: Amount, context: Amount, kept: Kept) -> Amount:
        """Attention of the sequences that decode."""
        total = self.decode[0].seconds(sequences, context, kept)
        for group in self.decode[1:]:
            total = total + group.seconds(sequences, context, kept)
        return total


def replica_of(placement: Placement) -> Replica:
    return _Builder(placement).build()


class _Builder:
    def __init__(self, placement: Placement) -> None:
        self.at = placement
        self.model: Model = placement.model
        self.devices = placement.tensor_parallel_count
        self.efficiency: Efficiency = placement.gpu.efficiency or generic_efficiency()
        self.activation_bytes = placement.precision.activation_bits / 8

    def build(self) -> Replica:
        model, at = self.model, self.at
        products = self._products()
        experts = self._expert_products()
        per_layer = (
            sum(p.layers for p in products)
            + sum(e.layers for e in experts)
            + model.layers * (ELEMENTWISE_CALLS + ATTENTION_CALLS)
        )
        reduces = 2 * model.layers + 1  # after attention, after the MLP, and the embedding
        return Replica(
            products=products,
            expert_products=experts,
            head=self._product(
                1, -(-model.vocab // self.devices), model.hidden, at.precision.head_weight_bits, head=True
            ),
            prefill=tuple(self._prefill(layers, window) for layers, window in _layers_by_window(model)),
            decode=tuple(self._decode(layers, window) for layers, window in _layers_by_window(model)),
            elementwise=self._elementwise(),
            sampling=Elementwise(
                self._kernel(self.efficiency.elementwise, "fp32"),
                SAMPLING_PASSES,
                4.0 * SAMPLING_PASSES * model.vocab,
            ),
            all_reduces=self._all_reduce(reduces, model.hidden * 2.0) if self.devices > 1 else None,
            # A gather moves each value once where an all-reduce moves it twice: half the bytes.
            logits_gather=self._all_reduce(1, model.vocab * 2.0 / 2) if self.devices > 1 else None,
            kernels=per_layer + SAMPLING_PASSES + 1 + (reduces + 1 if self.devices > 1 else 0),
        )

    def _kernel(self, curve: OperatorEfficiency, dtype: str) -> Kernel:
        gpu, at = self.at.gpu, self.at
        peak = gpu.peak_flops.get(dtype) or max(gpu.peak_flops.values())
        return Kernel(curve, peak / at.compute_slow_ratio, gpu.nominal_bandwidth_bytes_per_s / at.memory_slow_ratio)

    def _attention_dtype(self) -> str:
        """Attention computes in 16 bits whatever the weights' type."""
        return "bf16" if "bf16" in self.at.gpu.peak_flops else self.at.compute_dtype

    # --- matrix products ---

    def _product(self, layers: int, n: int, k: int, bits: float, head: bool = False) -> Gemm:
        dtype = self._attention_dtype() if head else self.at.compute_dtype
        return Gemm(
            kernel=self._kernel(_by_dtype(self.efficiency.gemm, dtype), dtype),
            layers=layers,
            n=n,
            k=k,
            weight_bytes=n * k * bits / 8,
            activation_bytes_per_row=(n + k) * self.activation_bytes,
        )

    def _products(self) -> tuple[Gemm, ...]:
        """Families of the layers, as sharded: first products by column, second ones by row."""
        model, devices, bits = self.model, self.devices, self.at.precision.weight_bits
        heads = model.heads // devices
        found: list[tuple[int, int, int]] = []  # layers, n, k
        if (mla := model.mla) is None:
            kv_heads = -(-model.kv_heads // devices)
            found += [(model.layers, (heads + 2 * kv_heads) * model.head_dim, model.hidden)]
            found += [(model.layers, model.hidden, heads * model.head_dim)]
        else:
            query_width = heads * (mla.nope_dim + mla.rope_dim)
            latent = mla.kv_rank + mla.rope_dim
            if mla.query_rank:
                found += [(model.layers, mla.query_rank + latent, model.hidden)]
                found += [(model.layers, query_width, mla.query_rank)]
            else:
                found += [(model.layers, query_width + latent, model.hidden)]
            found += [(model.layers, heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)]
            found += [(model.layers, model.hidden, heads * mla.value_dim)]
        moe = model.moe
        dense_layers = model.layers - (moe.layers if moe else 0)
        ups = 2 if model.gated else 1
        if dense_layers:
            width = -(-model.ffn // devices)
            found += [(dense_layers, ups * width, model.hidden), (dense_layers, model.hidden, width)]
        if moe:
            found += [(moe.layers, moe.experts, model.hidden)]
            if moe.shared_experts:
                width = -(-moe.shared_experts * moe.expert_ffn // devices)
                found += [(moe.layers, ups * width, model.hidden), (moe.layers, model.hidden, width)]
        return tuple(self._product(layers, n, k, bits) for layers, n, k in found)

    def _expert_products(self) -> tuple[ExpertGemm, ...]:
        moe = self.model.moe
        if moe is None:
            return ()
        width = -(-moe.expert_ffn // self.devices)
        ups = 2 if self.model.gated else 1
        kernel = self._kernel(_by_dtype(self.efficiency.expert_gemm, self.at.compute_dtype), self.at.compute_dtype)
        return tuple(
            ExpertGemm(
                kernel=kernel,
                layers=moe.layers,
                n=n,
                k=k,
                experts=moe.experts,
                per_token=moe.experts_per_token,
                expert_bytes=n * k * self.at.precision.weight_bits / 8,
                activation_bytes_per_row=(n + k) * self.activation_bytes,
            )
            for n, k in ((ups * width, self.model.hidden), (self.model.hidden, width))
        )

    # --- attention ---

    def _kv_token_bytes(self) -> float:
        """KV of a token in one layer on one device, copies included."""
        elements = kv_elements_per_token(self.model) * kv_copies(self.model, self.devices) / self.devices
        return elements * self.at.precision.kv_bits / 8

    def _kv_dtype(self) -> str:
        return "fp8" if self.at.precision.kv_bits <= 9 else "bf16"

    def _prefill(self, layers: int, window: int | None) -> PrefillAttention:
        model = self.model
        curve = _by_dtype(self.efficiency.prefill_attention, self._kv_dtype())
        width = model.head_dim if model.mla is None else model.mla.nope_dim + model.mla.rope_dim
        return PrefillAttention(
            kernel=self._kernel(curve, self._attention_dtype()),
            layers=layers,
            heads=model.heads // self.devices,
            flops_per_pair=attention_flops_per_pair(model, "expanded") / self.devices,
            kv_token_bytes=self._kv_token_bytes(),
            activation_bytes_per_token=2.0 * width * model.heads / self.devices * self.activation_bytes,
            window_tokens=window,
        )

    def _decode(self, layers: int, window: int | None) -> DecodeAttention:
        model = self.model
        curve = _by_dtype(self.efficiency.decode_attention, self._kv_dtype())
        width = model.head_dim if model.mla is None else model.mla.kv_rank + model.mla.rope_dim
        return DecodeAttention(
            kernel=self._kernel(curve, self._attention_dtype()),
            layers=layers,
            kv_heads=1 if model.mla is not None else max(1, model.kv_heads // self.devices),
            flops_per_pair=attention_flops_per_pair(model, "absorbed") / self.devices,
            kv_token_bytes=self._kv_token_bytes(),
            activation_bytes_per_sequence=2.0 * width * model.heads / self.devices * self.activation_bytes,
            window_tokens=window,
        )

    # --- the rest ---

    def _elementwise(self) -> Elementwise:
        """Two norms with residual (4h each), rotary embedding (twice the heads), activation (3i): read and written once."""
        model = self.model
        width = model.ffn
        if model.moe:
            width = (model.moe.experts_per_token + model.moe.shared_experts) * model.moe.expert_ffn
        row = 8.0 * model.hidden + (2.0 * (model.heads + model.kv_heads) * model.head_dim + 3.0 * width) / self.devices
        return Elementwise(
            self._kernel(self.efficiency.elementwise, self._attention_dtype()),
            ELEMENTWISE_CALLS * model.layers,
            row * model.layers * self.activation_bytes,
        )

    def _all_reduce(self, calls: int, bytes_per_row: float) -> AllReduce:
        link = self.at.gpu.link_bandwidth_bytes_per_s
        assert link is not None  # nobody asks for several devices without it
        return AllReduce(
            curve=self.efficiency.all_reduce,
            devices=self.devices,
            link_bytes_per_s=link,
            calls=calls,
            bytes_per_row=bytes_per_row,
            slow_ratio=self.at.communication_slow_ratio,
        )


def _by_dtype(curves: Mapping[str, OperatorEfficiency], dtype: str) -> OperatorEfficiency:
    """The curve of a data type, else that of the nearest one measured: fp8 for 8-bit types, bf16 for all others."""
    near = "fp8" if dtype == "int8" else "bf16"
    return curves.get(dtype) or curves.get(near) or curves["bf16"]


def _layers_by_window(model: Model) -> tuple[tuple[int, int | None], ...]:
    """(number of layers, window) of the full and of the sliding layers, where there are any."""
    if model.sliding_window is None:
        return ((model.layers, None),)
    sliding = model.sliding_window
    groups = ((model.layers - sliding.layers, None), (sliding.layers, sliding.window_tokens))
    return tuple(group for group in groups if group[0])
