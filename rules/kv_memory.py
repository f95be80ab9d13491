"""KV memory: bytes a request takes, blocks a pool holds, requests that are resident at once (design/roofline.md 2.5)."""

from __future__ import annotations

import math

from phasewise.rules.counting import Precision, kv_bytes_per_token, weight_bytes_stored
from phasewise.rules.schema import Model


def kv_bytes(model: Model, tokens: int, batch: int = 1, kv_bits: float = 16) -> float:
    """M = L * K * d * tokens * batch * (bits/8) * 2: KV bytes of `batch` sequences of `tokens` tokens each."""
    return kv_bytes_per_token(model, kv_bits) * tokens * batch


def kv_pool_bytes(
    memory_bytes: float,
    utilization_ratio: float,
    weight_bytes: float,
    activation_peak_bytes: float = 0.0,
    graphs_bytes: float = 0.0,
    communication_bytes: float = 0.0,
) -> float:
    """What is left for KV on one device; 0 where nothing is.

    "Weights plus KV below memory" is the error of most calculators: activation peak, graphs and communicator buffers take
    their part first. The pool an engine states goes before this.
    """
    used = weight_bytes + activation_peak_bytes + graphs_bytes + communication_bytes
    return max(0.0, memory_bytes * utilization_ratio - used)


def model_kv_pool_bytes(
    model: Model,
    precision: Precision,
    memory_bytes: float,
    utilization_ratio: float,
    tensor_parallel_count: int = 1,
    reserve_bytes: float = 0.0,
) -> float:
    """KV pool of a replica over all its devices, weights split evenly; reserve_bytes: per device, all but the weights."""
    per_device = kv_pool_bytes(
        memory_bytes,
        utilization_ratio,
        weight_bytes_stored(model, precision) / tensor_parallel_count,
        activation_peak_bytes=reserve_bytes,
    )
    return per_device * tensor_parallel_count


def pool_blocks(pool_bytes: float, block_tokens: int, bytes_per_token: float) -> int:
    """Whole blocks of `block_tokens` tokens that fit into the pool."""
    return math.floor(pool_bytes / (block_tokens * bytes_per_token))


def blocks_needed(tokens: int, block_tokens: int) -> int:
    """Blocks of a sequence of `tokens` tokens; the last one may be partly empty."""
    return -(-tokens // block_tokens)


def resident_requests(
    total_blocks: int, tokens_each: int, block_tokens: int, shared_prefix_tokens: int = 0
) -> int | None:
    """Requests of `tokens_each` tokens whose blocks fit at once; a shared prefix counts once, in whole blocks.

    None: all their tokens are shared, so memory sets no limit. A declared concurrency above this is bound by KV capacity.
    """
    shared_blocks = min(shared_prefix_tokens, tokens_each) // block_tokens
    own_blocks = blocks_needed(tokens_each, block_tokens) - shared_blocks
    if own_blocks == 0:
        return None
    return max(0, total_blocks - shared_blocks) // own_blocks
