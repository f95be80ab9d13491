"""The forward pass against one written another way, and against what must hold for any weights."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_runs import prompt, tiny

from phasewise.instrumented_engine.llama.llama_config import LlamaConfig, RopeScaling
from phasewise.instrumented_engine.llama.weights import random_llama
from phasewise.instrumented_engine.model import Layer, Llama, rope_frequencies, rope_tables, rotate
from phasewise.rules.errors import InputError, MachineError
from phasewise.rules.load import load_rulebook

LLAMA3 = RopeScaling(kind="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_tokens=64)
SHAPES = {
    "grouped": tiny(),
    "one KV head": tiny(kv_heads=1, layers=3),
    "a KV head each": tiny(kv_heads=4),
    "tied": tiny(tied=True),
    "wide heads": tiny(head_dim=32, heads=2, kv_heads=1),
    "llama3 scaling": tiny(rope_scaling=LLAMA3),
    "linear scaling": tiny(rope_scaling=RopeScaling(kind="linear", factor=4)),
    "factors": tiny(rope_scaling=RopeScaling(kind="factors", factors=(1, 1, 1, 2, 4, 8, 8, 8))),
}  # fmt: skip


def written_another_way(model: Llama, tokens: tuple[int, ...]) -> torch.Tensor:
    """float64, token by token and head by head: rotation as complex numbers, KV heads repeated, sums written out."""
    config, size = model.config, model.config.head_dim
    x = model.embedding.double()[list(tokens)]
    turn = torch.polar(
        torch.ones(len(tokens), size // 2, dtype=torch.float64),
        torch.outer(torch.arange(len(tokens), dtype=torch.float64), wavelengths(config)),
    )

    def normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values / (values.pow(2).mean(-1, keepdim=True) + config.rms_eps).sqrt() * weight.double()

    def turned(head: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(head[:, : size // 2], head[:, size // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    for layer in model.layers:
        qkv = (normed(x, layer.attention_norm) @ layer.qkv.double().T).split(size, dim=-1)
        q, k = qkv[: config.heads], qkv[config.heads : config.heads + config.kv_heads]
        v = qkv[config.heads + config.kv_heads :]
        heads = []
        for number in range(config.heads):
            mine = number // (config.heads // config.kv_heads)
            query, key = turned(q[number]), turned(k[mine])
            rows = []
            for at in range(len(tokens)):
                score = (key[: at + 1] @ query[at]) / math.sqrt(size)
                weight = (score - score.max()).exp()
                rows.append((weight / weight.sum()) @ v[mine][: at + 1])
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, -1) @ layer.output.double().T
        gate, up = (normed(x, layer.mlp_norm) @ layer.gate_up.double().T).split(config.ffn, dim=-1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer.down.double().T
    return normed(x, model.norm) @ model.head.double().T


def wavelengths(config: LlamaConfig) -> torch.Tensor:
    """Radians a position for each pair, by cases as the publication has them."""
    frequencies = []
    for pair in range(config.head_dim // 2):
        plain = config.rope_theta ** (-2 * pair / config.head_dim)
        scaling = config.rope_scaling
        if scaling is None:
            frequencies.append(plain)
        elif scaling.kind == "linear":
            frequencies.append(plain / scaling.factor)
        elif scaling.kind == "factors":
            frequencies.append(plain / scaling.factors[pair])
        else:
            wavelength = 2 * math.pi / plain
            if wavelength < scaling.original_max_tokens / scaling.high_freq_factor:
                frequencies.append(plain)
            elif wavelength > scaling.original_max_tokens / scaling.low_freq_factor:
                frequencies.append(plain / scaling.factor)
            else:
                smooth = (scaling.original_max_tokens / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequencies.append((1 - smooth) * plain / scaling.factor + smooth * plain)
    return torch.tensor(frequencies, dtype=torch.float64)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_equals_a_forward_written_another_way(config: LlamaConfig) -> None:
    model = random_llama(config, seed=2)
    tokens = prompt(random.Random(3), 23)
    torch.testing.assert_close(
        model.forward_full(tokens).double(), written_another_way(model, tokens), rtol=2e-4, atol=2e-4
    )


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    config = tiny(head_dim=128, rope_theta=500_000.0, rope_scaling=replace(LLAMA3, original_max_tokens=8192))
    ratio = rope_frequencies(replace(config, rope_scaling=None)) / rope_frequencies(config)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert bool((ratio.diff() >= -1e-6).all())
    assert 1 < ratio[40 - 8 : 40].mean() < 8


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 4000))
@settings(max_examples=50, deadline=None)
def test_a_rotated_score_depends_on_the_distance_only(first: int, second: int, shift: int) -> None:
    frequencies = rope_frequencies(tiny(head_dim=64))
    generator = torch.Generator().manual_seed(first)
    q, k = (torch.randn(1, 1, 64, generator=generator) for _ in range(2))

    def score(at: int, seen: int) -> float:
        turned = [
            rotate(x, *rope_tables(frequencies, torch.tensor([place]), torch.float32))
            for x, place in ((q, at), (k, seen))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(first + shift, second + shift) == pytest.approx(score(first, second), abs=2e-2)


def test_rotation_keeps_length_and_leaves_position_0_alone() -> None:
    frequencies = rope_frequencies(tiny())
    x = torch.randn(3, 2, 16)
    turned = rotate(x, *rope_tables(frequencies, torch.tensor([0, 7, 200]), torch.float32))
    torch.testing.assert_close(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned[1], x[1])


def test_grouped_queries_equal_full_attention_with_repeated_kv_heads() -> None:
    grouped = random_llama(tiny(), seed=4)
    config = tiny(kv_heads=4)
    layers = []
    for layer in grouped.layers:
        q, k, v = layer.qkv.view(8, 16, 48).split([4, 2, 2])
        repeated = torch.cat([q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)]).reshape(-1, 48)
        layers.append(Layer(layer.attention_norm, repeated, layer.output, layer.mlp_norm, layer.gate_up, layer.down))
    full = Llama(config, grouped.embedding, layers, grouped.norm, grouped.head)
    tokens = prompt(random.Random(5), 19)
    torch.testing.assert_close(full.forward_full(tokens), grouped.forward_full(tokens), rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one() -> None:
    model = random_llama(tiny(), seed=6)
    tokens = prompt(random.Random(7), 16)
    changed = (*tokens[:10], (tokens[10] + 1) % 300, *tokens[11:])
    before, after = model.forward_full(tokens), model.forward_full(changed)
    torch.testing.assert_close(before[:10], after[:10])
    assert bool(((before - after)[10:].abs().amax(-1) > 1e-3).all())


def test_the_same_seed_gives_the_same_weights() -> None:
    first, same, other = (random_llama(tiny(), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.matrices, same.matrices, strict=True))
    assert not torch.equal(first.matrices[0], other.matrices[0])


def test_logits_of_random_weights_are_as_wide_as_trained_ones() -> None:
    """Narrow logits would make every other token a near tie, and the comparison with the reference would say nothing."""
    for config in (tiny(layers=8), tiny(layers=8, tied=True)):
        logits = random_llama(config, seed=1).forward_full(prompt(random.Random(1), 64))
        assert 1.5 < float(logits.std()) < 6


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(MachineError, match="no CUDA device"):
        random_llama(tiny(), seed=1, device="cuda")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="int3"):
        random_llama(tiny(), seed=1, dtype="int3")


def test_shapes_of_the_rulebook() -> None:
    """Parameters of the shape and those published agree, norms (which the rulebook leaves out) apart."""
    rules = load_rulebook()
    for name in ("llama-3.1-8b", "smollm2-135m", "llama-3.2-1b"):
        model = rules.models[name]
        config = LlamaConfig.of(model)
        assert config.parameters == model.params
        assert config.as_model(name, "bf16").hidden == model.hidden
    with pytest.raises(InputError, match="experts"):
        LlamaConfig.of(rules.models["mixtral-8x7b"])
