"""From logits to the next token: greedy, or drawn by temperature and top_p with a seed.

A draw depends on (seed, position in the output) only: neither the batch, nor chunks, nor a preemption change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items

from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.torch_import import torch

_LEAST_TOP_P = 1e-9  # keeps the likeliest token whatever top_p


def choose(logits: torch.Tensor, sequences: Items[Sequence], engine_seed: int) -> list[int]:
    """One token id for each row of logits, float32 [R, V]. engine_seed: for requests that bring none of their own."""
    tokens = logits.argmax(-1)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.spec.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        asked = [sequences[row] for row in drawn]
        settings = torch.tensor(
            [(s.spec.temperature, max(s.spec.top_p, _LEAST_TOP_P), uniform(s, engine_seed)) for s in asked],
            dtype=torch.float64, device=logits.device,
        )  # fmt: skip
        tokens[rows] = draw(logits[rows].double(), *settings.unbind(1))
    return [int(token) for token in tokens.tolist()]


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform_0_1: torch.Tensor
) -> torch.Tensor:
    """Inverse of the cumulative distribution of the smallest set of likeliest tokens that holds top_p: [R] from [R, V].

    float64 throughout: a float32 sum over 100,000 tokens loses the tail.
    """
    shares, order = (logits / temperature[:, None]).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = shares.cumsum(-1) - shares
    kept = torch.where(before < top_p[:, None], shares, 0.0).cumsum(-1)
    at = torch.searchsorted(kept, (uniform_0_1 * kept[:, -1])[:, None], right=True)
    last_kept = (before < top_p[:, None]).sum(-1, keepdim=True) - 1
    return order.gather(-1, at.minimum(last_kept))[:, 0]


def uniform(sequence: Sequence, engine_seed: int) -> float:
    """In [0, 1), 53 bits of a hash of the seed and the position of the token to come."""
    seed = sequence.spec.seed
    source = f"{engine_seed}/{sequence.spec.request_id}" if seed is None else str(seed)
    digest = hashlib.blake2b(f"{source}/{sequence.output_tokens}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
