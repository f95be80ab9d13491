"""A Llama-family decoder: RMSNorm, rotary embedding, grouped queries, SwiGLU. Llama: arXiv 2302.13971, GQA: arXiv 2305.13245.

Tokens of all sequences of a step are packed into one axis T: the linear layers see them at once, and only attention, which the
caller brings, knows whose they are. Shapes: h hidden, H query heads, K KV heads, D head size, i MLP width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phasewise.instrumented_engine.attention import attend, causal_mask
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.torch_import import functional, torch

Tensor: TypeAlias = torch.Tensor
# (layer, q [T, H, D], k [T, K, D], v [T, K, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Matrices are [out, in]. qkv: [(H + 2K) * D, h], gate_up: [2i, h]: one product instead of three and two."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """Weights of one model on one device, and the forward pass over packed tokens."""

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, layers: Sequence[Layer], norm: Tensor, head: Tensor
    ) -> None:
        """head: [V, h], the embedding itself where they are tied."""
        self.config = config
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self._frequencies = rope_frequencies(config).to(embedding.device)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def matrices(self) -> list[Tensor]:
        """All that a step multiplies with or looks up, each once; without the norms."""
        tables = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        return tables + [
            matrix for layer in self.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]

    @property
    def nbytes(self) -> int:
        norms = [self.norm] + [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        return sum(tensor.nbytes for tensor in self.matrices + norms)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attend, rows: Tensor) -> Tensor:
        """tokens, positions: [T]; rows: [R], the tokens whose logits are wanted: float32 [R, V].

        The head runs for these rows only; with no row it does not run at all.
        """
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        x = functional.embedding(tokens, self.embedding)  # [T, h]
        cos, sin = rope_tables(self._frequencies, positions, self.dtype)
        for number, layer in enumerate(self.layers):
            qkv = functional.linear(self._normed(x, layer.attention_norm), layer.qkv).view(len(tokens), -1, size)
            turned = rotate(qkv[:, : heads + kv_heads], cos, sin)
            mixed = attention(number, turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :])
            x = x + functional.linear(mixed.reshape(len(tokens), heads * size), layer.output)
            gate, up = functional.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        if not len(rows):
            return torch.empty(0, config.vocab, device=self.device)
        return functional.linear(self._normed(x[rows], self.norm), self.head).float()

    def forward_full(self, tokens: Sequence[int]) -> Tensor:
        """Logits after each of `tokens`, float32 [T, V], from one pass without any cache: what every other way must equal."""
        count = len(tokens)
        allowed = causal_mask(count, count, self.device)

        def plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend("naive", q[None], k[None], v[None], allowed)[0]

        positions = torch.arange(count, device=self.device)
        with torch.inference_mode():
            return self.forward(torch.tensor(tokens, device=self.device), positions, plain, positions)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.config.hidden,), weight, self.config.rms_eps)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians a position for each pair of a head: float32 [D/2], theta^(-2i/D), then scaled (see RopeScaling)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain.float()
    if scaling.kind == "linear":
        return (plain / scaling.factor).float()
    if scaling.kind == "factors":
        return (plain / torch.tensor(scaling.factors, dtype=torch.float64)).float()
    turns = scaling.original_max_tokens * plain / (2 * math.pi)  # of each pair over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 1: short wavelength, as it was; 0: long, divided
    return (plain * (kept + (1 - kept) / scaling.factor)).float()


def rope_tables(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, D/2]; angles in float32 whatever the dtype, since bfloat16 cannot hold a position of 1,000."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D]; element i is paired with element i + D/2 (the order of Hugging Face weights)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
