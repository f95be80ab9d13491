"""Exact FLOPs and bytes of one engine step of a decoder, from the shape of the model and the composition of the step.

Symbols: L layers, h hidden, H query heads, K KV heads, d head size, i MLP width, V vocabulary, T tokens in the step, B
sequences that decode, s context (tokens attended, the one being produced included), S new prompt tokens, P prompt tokens
already cached. A multiply-add is 2 FLOP; GB is 10^9; attention in prefill is causal; the LM head runs for the last
position of a prompt only; the input embedding is a gather and costs no FLOP. Formulas: design/roofline.md section 2,
derived from the layer shapes; MLA: DeepSeek-V2 (arXiv 2405.04434).

FLOPs are integers, so that chunking a prompt cannot change their sum. The bytes are the least that must move: activations
and repeated reads inside a kernel are kept beside them, labelled, never mixed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from phasewise.rules.schema import Model

Core = Literal["expanded", "absorbed"]
Attention = Literal["flash", "naive"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits of one stored value, scales of a quantization included (W4 with a scale per 128 values is about 4.25).

    head_bits: embeddings and LM head usually stay at 16 bits when the layers are quantized.
    """

    weight_bits: float = 16
    kv_bits: float = 16
    activation_bits: float = 16
    head_bits: float | None = None

    @property
    def head_weight_bits(self) -> float:
        return max(16.0, self.weight_bits) if self.head_bits is None else self.head_bits


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of one operator group, or a sum of groups.

    weight, kv_read, kv_write and score bytes must move between memory and chip; activation and reread bytes are upper bounds
    of what may move besides (caches and fusion spare most of it).
    """

    flops: int = 0
    weight_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0
    score_bytes: float = 0.0  # score matrix written and read again: attention without flash kernels only
    activation_bytes: float = 0.0
    reread_bytes: float = 0.0  # K and V read once more by each block of queries, mostly from on-chip cache

    @property
    def kv_bytes(self) -> float:
        return self.kv_read_bytes + self.kv_write_bytes

    @property
    def bytes(self) -> float:
        """Least bytes that must move."""
        return self.weight_bytes + self.kv_bytes + self.score_bytes

    @property
    def intensity_flop_per_byte(self) -> float | None:
        """Arithmetic intensity; None where nothing moves."""
        return self.flops / self.bytes if self.bytes else None

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_read_bytes=self.kv_read_bytes + other.kv_read_bytes,
            kv_write_bytes=self.kv_write_bytes + other.kv_write_bytes,
            score_bytes=self.score_bytes + other.score_bytes,
            activation_bytes=self.activation_bytes + other.activation_bytes,
            reread_bytes=self.reread_bytes + other.reread_bytes,
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step by operator group: the intensities differ so much that one pooled value would say nothing."""

    linear: Work
    attention: Work
    head: Work

    @property
    def total(self) -> Work:
        return self.linear + self.attention + self.head


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt prefilled in one step. past_tokens: prompt tokens in the cache already; last: the prompt ends here."""

    new_tokens: int
    past_tokens: int = 0
    last: bool = True


# --- weight elements -------------------------------------------------------------------------------------------------


def attention_weights(model: Model) -> int:
    """Elements of q, k, v and o of one layer: h*H*d + 2*h*K*d + H*d*h; with MLA the five low-rank projections."""
    if (mla := model.mla) is None:
        return 2 * model.hidden * model.heads * model.head_dim + 2 * model.hidden * model.kv_heads * model.head_dim
    query_width = model.heads * (mla.nope_dim + mla.rope_dim)
    if mla.query_rank:
        query = model.hidden * mla.query_rank + mla.query_rank * query_width
    else:
        query = model.hidden * query_width
    latent = model.hidden * (mla.kv_rank + mla.rope_dim)
    expansion = mla.kv_rank * model.heads * (mla.nope_dim + mla.value_dim)
    return query + latent + expansion + model.heads * mla.value_dim * model.hidden


def _matrices(model: Model) -> int:
    return 3 if model.gated else 2


def expert_weights(model: Model) -> int:
    """Elements of one routed (or shared) expert: 3*h*m; 0 for a dense model."""
    return _matrices(model) * model.hidden * model.moe.expert_ffn if model.moe else 0


def fixed_linear_weights(model: Model) -> int:
    """Elements of the layers that every step reads whatever the routing: all but the routed experts, without the LM head."""
    moe_layers = model.moe.layers if model.moe else 0
    dense = (model.layers - moe_layers) * _matrices(model) * model.hidden * model.ffn
    total = model.layers * attention_weights(model) + dense
    if model.moe:
        total += moe_layers * (model.hidden * model.moe.experts + model.moe.shared_experts * expert_weights(model))
    return total


def active_linear_weights(model: Model) -> int:
    """Elements one token multiplies with, without the LM head (all of them for a dense model)."""
    if not model.moe:
        return fixed_linear_weights(model)
    return fixed_linear_weights(model) + model.moe.layers * model.moe.experts_per_token * expert_weights(model)


def stored_linear_weights(model: Model) -> int:
    """Elements of all layers as they lie in memory, without embedding, norms and LM head."""
    if not model.moe:
        return fixed_linear_weights(model)
    return fixed_linear_weights(model) + model.moe.layers * model.moe.experts * expert_weights(model)


def head_weights(model: Model) -> int:
    """Elements of the LM head, h*V; read every step even where it is tied to the embedding."""
    return model.hidden * model.vocab


def weight_bytes_stored(model: Model, precision: Precision) -> float:
    """Bytes the weights take in memory: layers, LM head and, where it is a matrix of its own, the embedding."""
    tables = 1 if model.tied else 2
    return (
        stored_linear_weights(model) * precision.weight_bits + tables * head_weights(model) * precision.head_weight_bits
    ) / 8


def expected_distinct_experts(experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts a layer reads in a step of `tokens` tokens: E * (1 - (1 - k/E)^T).

    Independent, near-uniform routing; skew lowers it, so a router's own count goes before it.
    """
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def linear_weight_bytes_read(model: Model, precision: Precision, tokens: int) -> float:
    """Weight bytes of the layers one step reads, once for all its tokens; without the LM head."""
    elements = float(fixed_linear_weights(model))
    if model.moe:
        distinct = expected_distinct_experts(model.moe.experts, model.moe.experts_per_token, tokens)
        elements += model.moe.layers * distinct * expert_weights(model)
    return elements * precision.weight_bits / 8 if tokens else 0.0


# --- attention -------------------------------------------------------------------------------------------------------


def kv_elements_per_token(model: Model) -> int:
    """Cached elements of one token in one layer: 2*K*d; with MLA the latent and the rope part, once for all heads."""
    if model.mla is not None:
        return model.mla.kv_rank + model.mla.rope_dim
    return 2 * model.kv_heads * model.head_dim


def kv_copies(model: Model, devices: int) -> float:
    """How often each KV byte lies on the devices of one replica: those beyond the number of KV heads keep copies (MLA: all do)."""
    heads = 1 if model.mla is not None else model.kv_heads
    return max(1.0, devices / heads)


def kv_bytes_per_token(model: Model, kv_bits: float = 16) -> float:
    """KV bytes of one token over all layers: 2*L*K*d*bits/8, or L*(c + r)*bits/8 with MLA."""
    return model.layers * kv_elements_per_token(model) * kv_bits / 8


def causal_pairs(new_tokens: int, past_tokens: int, window_tokens: int | None = None) -> int:
    """(query, key) pairs of `new_tokens` queries that follow `past_tokens` cached tokens: S*P + S*(S+1)/2.

    With a window each query sees at most its last `window_tokens` tokens, itself included.
    """
    if window_tokens is None:
        return new_tokens * past_tokens + new_tokens * (new_tokens + 1) // 2
    rising = max(0, min(new_tokens, window_tokens - past_tokens))  # queries that do not fill their window
    return rising * past_tokens + rising * (rising + 1) // 2 + (new_tokens - rising) * window_tokens


def attention_flops_per_pair(model: Model, core: Core = "expanded") -> int:
    """FLOPs of one (query, key) pair in one layer, all heads: 4*H*d.

    MLA: 2*n*(d_n + r + d_v) with K and V expanded (prefill), 2*n*((c + r) + c) absorbed into the latent (decode).
    """
    if (mla := model.mla) is None:
        return 4 * model.heads * model.head_dim
    if core == "expanded":
        return 2 * model.heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    return 2 * model.heads * (2 * mla.kv_rank + mla.rope_dim)


def _layers_by_window(model: Model) -> tuple[tuple[int, int | None], ...]:
    """(number of layers, window) of the full and of the sliding layers."""
    if model.sliding_window is None:
        return ((model.layers, None),)
    sliding = model.sliding_window
    return ((model.layers - sliding.layers, None), (sliding.layers, sliding.window_tokens))


def _chunk_attention(model: Model, precision: Precision, chunk: Chunk, kernel: Attention, block_tokens: int) -> Work:
    layer_bytes = kv_elements_per_token(model) * precision.kv_bits / 8
    flops = 0
    read = written = reread = score = 0.0
    for layers, window in _layers_by_window(model):
        pairs = causal_pairs(chunk.new_tokens, chunk.past_tokens, window)
        flops += layers * attention_flops_per_pair(model, "expanded") * pairs
        prefix = chunk.past_tokens if window is None else min(chunk.past_tokens, window - 1)
        read += layers * layer_bytes * prefix
        written += layers * layer_bytes * chunk.new_tokens
        if kernel == "naive":  # q.k^T and p.v each move the whole S x (P + S) matrix of each head once
            context = chunk.past_tokens + chunk.new_tokens
            score += layers * 2 * model.heads * chunk.new_tokens * context * precision.activation_bits / 8
        else:
            blocks = -(-chunk.new_tokens // block_tokens)
            reread += layers * layer_bytes * (prefix + chunk.new_tokens) * max(0, blocks - 1)
    return Work(flops=flops, kv_read_bytes=read, kv_write_bytes=written, score_bytes=score, reread_bytes=reread)


def _decode_attention(model: Model, precision: Precision, contexts: Mapping[int, int]) -> Work:
    layer_bytes = kv_elements_per_token(model) * precision.kv_bits / 8
    per_pair = attention_flops_per_pair(model, "absorbed")
    flops = 0
    read = written = 0.0
    groups = _layers_by_window(model)
    for context, sequences in contexts.items():
        for layers, window in groups:
            attended = context if window is None else min(context, window)
            flops += sequences * layers * per_pair * attended
            read += sequences * layers * layer_bytes * (attended - 1)
            written += sequences * layers * layer_bytes
    return Work(flops=flops, kv_read_bytes=read, kv_write_bytes=written)


# --- steps -----------------------------------------------------------------------------------------------------------


def _activation_bytes(model: Model, precision: Precision, tokens: int) -> float:
    """Upper bound of unfused activation traffic: T*L*(4h + 2*H*d + 2*K*d + 3i), and the gathered embedding rows."""
    width = model.ffn
    if model.moe:
        width = (model.moe.experts_per_token + model.moe.shared_experts) * model.moe.expert_ffn
    row = 4 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * width
    return tokens * (model.layers * row + model.hidden) * precision.activation_bits / 8


def step_work(
    model: Model,
    precision: Precision,
    chunks: Iterable[Chunk] = (),
    contexts: Iterable[int] | Mapping[int, int] = (),
    kernel: Attention = "flash",
    block_tokens: int = 128,
) -> StepWork:
    """FLOPs and bytes of one engine step.

    chunks: the prompts' parts it prefills; contexts: s of each sequence it decodes one token for, or
    how many sequences there are of each s. Weights are counted once
    for all of them: adding up the times of two separate kernels over-predicts mixed steps 1.5 to 3 times.
    block_tokens: queries of one block of the flash kernel (64 or 128 in practice).
    """
    prefill = tuple(chunks)
    decode = contexts if isinstance(contexts, Mapping) else Counter(contexts)
    decoded = sum(decode.values())
    tokens = sum(chunk.new_tokens for chunk in prefill) + decoded
    logits = sum(1 for chunk in prefill if chunk.last) + decoded
    attention = _decode_attention(model, precision, decode)
    for chunk in prefill:
        attention += _chunk_attention(model, precision, chunk, kernel, block_tokens)
    linear = Work(
        flops=2 * tokens * active_linear_weights(model),
        weight_bytes=linear_weight_bytes_read(model, precision, tokens),
        activation_bytes=_activation_bytes(model, precision, tokens),
    )
    head = Work(
        flops=2 * logits * head_weights(model),
        weight_bytes=head_weights(model) * precision.head_weight_bits / 8 if logits else 0.0,
        activation_bytes=logits * (model.hidden + model.vocab) * precision.activation_bits / 8,
    )
    return StepWork(linear=linear, attention=attention, head=head)


def decode_step(model: Model, precision: Precision, batch: int, context_tokens: int) -> StepWork:
    """A step in which `batch` sequences of equal context s decode one token each."""
    return step_work(model, precision, contexts={context_tokens: batch})


def prefill_step(
    model: Model, precision: Precision, new_tokens: int, past_tokens: int = 0, last: bool = True
) -> StepWork:
    """A step that prefills one prompt, or one chunk of it, and nothing else."""
    return step_work(model, precision, chunks=[Chunk(new_tokens, past_tokens, last)])


def chunked_prefill(
    model: Model, precision: Precision, prompt_tokens: int, chunk_tokens: int, cached_tokens: int = 0
) -> tuple[StepWork, ...]:
    """The steps of one prompt, `chunk_tokens` at a time after a cached prefix.

    The FLOPs add up to those of one step exactly; the bytes do not, since each chunk reads the weights and the prefix again.
    """
    steps = []
    done = cached_tokens
    while done < prompt_tokens:
        new = min(chunk_tokens, prompt_tokens - done)
        steps.append(prefill_step(model, precision, new, done, last=done + new == prompt_tokens))
        done += new
    return tuple(steps)
