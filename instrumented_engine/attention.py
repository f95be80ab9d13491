"""Attention of one packed step over a paged KV cache, with a full score matrix or fused.

Shapes: T tokens of the step, B sequences that decode, S new tokens of a chunk, C tokens attended (context), H query heads, K KV
heads, G = H/K, D head size, P tokens of a block, M blocks of the longest context of a group. Query heads of one KV head are
folded into the query axis, so that K and V are never repeated.

K and V are gathered from their blocks into a dense copy before the product: correct for any placement and portable, at the
price of reading and writing them once more than a kernel that follows the block table itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, TypeAlias

from phasewise.instrumented_engine.torch_import import functional, torch

Kernel = Literal["naive", "fused"]
Tensor: TypeAlias = torch.Tensor


class PagedKv:
    """The cache: [layers, 2, blocks, P, K, D]. Filled with zeros, since a masked position is still multiplied (0 times NaN is NaN)."""

    def __init__(
        self, layers: int, blocks: int, block_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        self.block_tokens = block_tokens
        self.values = torch.zeros(layers, 2, blocks, block_tokens, kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [T, K, D]; slots: [T], block * P + offset."""
        for half, new in ((0, k), (1, v)):
            self.values[layer, half].flatten(0, 1).index_copy_(0, slots, new)

    def gather(self, layer: int, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` positions of the sequences whose blocks are in table [..., M]: K and V, each [..., tokens, K, D]."""
        both = [self.values[layer, half][table].flatten(-4, -3)[..., :tokens, :, :] for half in (0, 1)]
        return both[0], both[1]


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, lower_right: bool = False
) -> Tensor:
    """q: [B, S, H, D]; k, v: [B, C, K, D]; allowed: bool, broadcast to [B, 1, S, C], None where S = C is causal: [B, S, H, D].

    lower_right: `allowed` is the causal mask of the last S of C tokens, which a CUDA kernel knows without reading it.
    """
    if kernel == "naive":
        return _naive(q, k, v, _causal(q.shape[1], q.device) if allowed is None else allowed)
    batch, new, heads, size = q.shape
    if new == 1:  # the G queries of a KV head become the rows of one small product
        kv_heads = k.shape[2]
        folded = q.view(batch, kv_heads, heads // kv_heads, size)
        out = functional.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=allowed)
        return out.reshape(batch, 1, heads, size)
    known = lower_right and allowed is not None and q.is_cuda and q.dtype.itemsize == 2  # float32 has no such kernel
    mask = _lower_right(new, k.shape[1]) if known else allowed
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2)


def _naive(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the whole [S, C] matrix of every head in memory, masked pairs computed too."""
    batch, new, heads, size = q.shape
    context, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    rows = q.view(batch, new, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * new, size)
    scores = (rows @ k.permute(0, 2, 3, 1)).float() / math.sqrt(size)  # [B, K, G*S, C]
    scores = scores.view(batch, kv_heads, group, new, context).masked_fill(~allowed.unsqueeze(-3), -math.inf)
    shares = scores.softmax(-1).to(v.dtype).view(batch, kv_heads, group * new, context)
    out = shares @ v.permute(0, 2, 1, 3)  # [B, K, G*S, D]
    return out.view(batch, kv_heads, group, new, size).permute(0, 3, 1, 2, 4).reshape(batch, new, heads, size)


def causal_mask(new: int, context: int, device: torch.device) -> Tensor:
    """[1, 1, new, context]: query i, the (context - new + i)-th token, sees itself and all before it."""
    return torch.ones(new, context, dtype=torch.bool, device=device).tril(context - new)[None, None]


def _causal(new: int, device: torch.device) -> Tensor:
    return causal_mask(new, new, device)


def _lower_right(new: int, context: int) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(new, context)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar context that decode together. rows: [B], where their tokens lie in the step; table: [B, M];
    allowed: [B, 1, 1, C], None where all have the same context C."""

    rows: Tensor
    table: Tensor
    context: int
    allowed: Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk: tokens start to start + new of the step, which follow `context - new` cached ones. allowed: None without these."""

    start: int
    new: int
    context: int
    table: Tensor
    allowed: Tensor | None


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What a layer calls in one step: writes the new K and V to their slots, then attends, decodes by groups and chunk by chunk."""

    kv: PagedKv
    kernel: Kernel
    slots: Tensor
    decodes: Items[DecodeGroup]
    chunks: Items[ChunkSpan]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, H, D]; k, v: [T, K, D]; gives [T, H, D]."""
        self.kv.write(layer, self.slots, k, v)
        out = torch.empty_like(q)
        for group in self.decodes:
            past_k, past_v = self.kv.gather(layer, group.table, group.context)
            out[group.rows] = self._decode(q[group.rows], past_k, past_v, group.allowed)
        for chunk in self.chunks:
            rows = slice(chunk.start, chunk.start + chunk.new)
            if chunk.context == chunk.new:  # nothing cached: what was just computed is all there is
                all_k, all_v = k[rows], v[rows]
            else:
                all_k, all_v = self.kv.gather(layer, chunk.table, chunk.context)
            seen = attend(self.kernel, q[None, rows], all_k[None], all_v[None], chunk.allowed, lower_right=True)
            out[rows] = seen[0]
        return out

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        """q: [B, H, D]; k, v: [B, C, K, D]."""
        if allowed is None and self.kernel == "naive":
            allowed = torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool, device=k.device)
        return attend(self.kernel, q[:, None], k, v, allowed)[:, 0]
