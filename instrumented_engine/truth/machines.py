"""Deployments to draw from: five accelerators, four models, as many devices and bits as fit together."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import lru_cache

import numpy as np

from phasewise.instrumented_engine.executors.time_law import Deployment, kv_blocks_for
from phasewise.rules.counting import Precision
from phasewise.rules.errors import InputError
from phasewise.rules.load import Rulebook, load_rulebook

ACCELERATORS = ("l40s", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "mi300x")
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b")
BLOCK_TOKENS = 16
_PRECISIONS = (
    # weights, KV, activations, data type of the matrix products, how often drawn
    (16.0, 16.0, 16.0, "bf16", 0.55),
    (8.0, 16.0, 8.0, "fp8", 0.15),
    (8.0, 8.0, 8.0, "fp8", 0.15),
    (4.25, 16.0, 16.0, "bf16", 0.15),
)


@lru_cache(maxsize=1)
def rulebook() -> Rulebook:
    return load_rulebook()


def deployment(
    rng: np.random.Generator,
    *,
    models: Items[str] = MODELS,
    accelerators: Items[str] = ACCELERATORS,
    devices: Items[int] = (1, 2, 4, 8),
    least_pool_tokens: int = 60_000,
    precision: bool = True,
    weight_bits: float | None = None,
    **settings: float | bool,
) -> Deployment:
    """Draws an accelerator, a model and a precision; takes the fewest of `devices` whose KV pool holds `least_pool_tokens`.

    precision: quantized variants are drawn too; weight_bits: only those with these. settings: fields of Deployment.
    """
    rules = rulebook()
    rows = [row for row in _PRECISIONS if weight_bits in (None, row[0])] if precision else [_PRECISIONS[0]]
    often = np.array([row[4] for row in rows]) / sum(row[4] for row in rows)
    while True:
        gpu = rules.gpus[str(rng.choice(list(accelerators)))]
        model = rules.models[str(rng.choice(list(models)))]
        weight, kv, activation, dtype, _ = rows[int(rng.choice(len(rows), p=often))]
        if dtype not in gpu.peak_flops:
            weight, kv, activation, dtype, _ = _PRECISIONS[0]
        for count in devices:
            try:
                found = Deployment(
                    gpu=gpu,
                    model=model,
                    precision=Precision(weight_bits=weight, kv_bits=kv, activation_bits=activation),
                    tensor_parallel_count=count,
                    compute_dtype=dtype,
                    **settings,  # type: ignore[arg-type]
                )
                if kv_blocks_for(found, BLOCK_TOKENS) * BLOCK_TOKENS >= least_pool_tokens:
                    return found
            except InputError:
                continue  # too small for the model: more devices, or another draw


def machine_notes(one: Deployment) -> dict[str, str]:
    """What was drawn, in words."""
    bits = one.precision
    return {
        "accelerator": f"{one.tensor_parallel_count} x {one.gpu.name}",
        "model": one.model.name,
        "precision": f"weights {bits.weight_bits:g} bits, KV {bits.kv_bits:g} bits, {one.compute_dtype} products",
    }
