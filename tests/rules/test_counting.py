"""FLOPs and bytes against published worked numbers, and the identities that need no source."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.rules.counting import (
    Chunk,
    Precision,
    active_linear_weights,
    attention_flops_per_pair,
    causal_pairs,
    chunked_prefill,
    decode_step,
    expected_distinct_experts,
    fixed_linear_weights,
    head_weights,
    kv_bytes_per_token,
    kv_elements_per_token,
    linear_weight_bytes_read,
    prefill_step,
    step_work,
    stored_linear_weights,
    weight_bytes_stored,
)
from phasewise.rules.load import load_rulebook
from phasewise.rules.schema import Model, SlidingWindow, Source

RULES = load_rulebook()
LLAMA_2_7B = RULES.models["llama-2-7b"]
LLAMA_31_8B = RULES.models["llama-3.1-8b"]
DEEPSEEK_V3 = RULES.models["deepseek-v3"]
P16 = Precision()


def make_model(**shape: int | bool) -> Model:
    filled = {
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 256,
        "gated": True, "tied": False,
    } | shape  # fmt: skip
    return Model(
        id="toy",
        name="toy",
        params=1.0,
        native_dtype="bf16",
        sources=(Source("made here", "2026-11-29"),),
        **filled,  # type: ignore[arg-type]
    )


def old_llama(layers: int, hidden: int, heads: int, ffn: int) -> Model:
    return make_model(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, ffn=ffn, vocab=32000)


models = st.builds(
    lambda heads, group, head_dim, layers, ffn, gated: make_model(
        heads=heads * group, kv_heads=heads, head_dim=head_dim, layers=layers, ffn=ffn, gated=gated
    ),
    st.integers(1, 8), st.integers(1, 8), st.sampled_from([16, 64, 128]), st.integers(1, 6), st.integers(1, 512), st.booleans(),
)  # fmt: skip


# --- R1: LLM-Viewer, Llama-2-7B on an RTX A6000, batch 1, sequence 2048, 16 bits ------------------------------------------


def test_r1_decode_totals() -> None:
    total = decode_step(LLAMA_2_7B, P16, 1, 2048).total
    assert total.flops == pytest.approx(14.288e9, rel=1e-3)
    assert total.flops == pytest.approx(14.170e9, rel=0.015)
    assert total.bytes == pytest.approx(14.313e9, rel=0.005)
    assert total.bytes / 768e9 == pytest.approx(18.637e-3, rel=0.005)


def test_r1_decode_flops_with_the_half_counted_head_emulated() -> None:
    step = decode_step(LLAMA_2_7B, P16, 1, 2048)
    norms_and_softmax = 0.013e9
    assert step.total.flops - step.head.flops / 2 + norms_and_softmax == pytest.approx(14.170e9, rel=2e-3)


def test_r1_prefill_causal_and_not() -> None:
    step = prefill_step(LLAMA_2_7B, P16, 2048)
    assert step.total.flops == pytest.approx(27.626e12, rel=1e-3)
    square = step.linear.flops + step.head.flops + 32 * attention_flops_per_pair(LLAMA_2_7B) * 2048**2
    assert square == pytest.approx(28.725e12, rel=1e-3)
    assert square == pytest.approx(28.751e12, rel=0.015)


def test_r1_prefill_score_traffic_without_flash() -> None:
    step = step_work(LLAMA_2_7B, P16, chunks=[Chunk(2048)], kernel="naive")
    one_matmul = 32 * 2048**2 * 2 + 2 * 2048 * 4096 * 2  # score matrix, and the two operands of the product
    assert one_matmul == pytest.approx(302.0e6, rel=2e-3)
    assert step.attention.score_bytes == 32 * 2 * 32 * 2048**2 * 2
    assert prefill_step(LLAMA_2_7B, P16, 2048).attention.score_bytes == 0


# --- R3: llm-analysis printed examples, A100 SXM 80 GB, context 512, batch 1 ----------------------------------------------


@pytest.mark.parametrize(
    ("model", "devices", "prefill_ms", "decode_ms", "rel"),
    [
        (old_llama(32, 4096, 32, 11008), 1, 22.41, 6.73, 0.02),
        (old_llama(40, 5120, 40, 13824), 1, 43.10, 12.94, 0.02),
        (old_llama(60, 6656, 52, 17920), 1, 107.74, 32.36, 0.02),
        (old_llama(80, 8192, 64, 22016), 2, 113.33, 33.85, 0.06),
    ],
    ids=["7B", "13B", "33B", "65B on two, collectives included there"],
)
def test_r3_times(model: Model, devices: int, prefill_ms: float, decode_ms: float, rel: float) -> None:
    """The tool charges S x S attention and the head at every position, and norms and the embedding besides."""
    square = model.layers * attention_flops_per_pair(model) * 512**2
    flops = 2 * 512 * (active_linear_weights(model) + head_weights(model)) + square
    prefill, decode = flops / 312e12 / devices, decode_step(model, P16, 1, 512).total.bytes / 2039e9 / devices
    assert 1e3 * prefill == pytest.approx(prefill_ms, rel=rel)
    assert 1e3 * decode == pytest.approx(decode_ms, rel=rel)
    assert 1e3 * prefill <= prefill_ms
    assert 1e3 * decode <= decode_ms


def test_r3_prefill_flops_of_7b_and_what_weight_quantization_leaves_alone() -> None:
    flops = prefill_step(LLAMA_2_7B, P16, 512).total.flops
    square = 2 * 512 * (active_linear_weights(LLAMA_2_7B) + head_weights(LLAMA_2_7B)) + 32 * 4 * 32 * 128 * 512**2
    assert square == pytest.approx(6.90e12, rel=2e-3)
    assert prefill_step(LLAMA_2_7B, Precision(weight_bits=4.25), 512).total.flops == flops


# --- R4: KV bytes a token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680), ("qwen2.5-72b", 327_680), ("llama-3.1-405b", 516_096),
        ("deepseek-v3", 70_272), ("llama-2-7b", 524_288), ("llama-2-13b", 819_200), ("qwen3-30b-a3b", 98_304),
    ],
)  # fmt: skip
def test_r4_kv_bytes_per_token(name: str, expected: int) -> None:
    assert kv_bytes_per_token(RULES.models[name]) == expected


def test_r4_latent_kv_in_fp8() -> None:
    assert kv_bytes_per_token(DEEPSEEK_V3, 8) == 35_136


# --- the table of roofline.md 2.6: the winning lever flips ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "context", "kv_gb", "ms", "w4_ms", "fp8_ms"),
    [
        (1, 2048, 0.27, 4.56, 1.44, 4.52), (16, 2048, 4.29, 5.76, 2.64, 5.12), (64, 2048, 17.18, 9.61, 6.48, 7.04),
        (128, 2048, 34.36, 14.74, 11.61, 9.61), (64, 8192, 68.72, 24.99, 21.87, 14.74),
    ],
)  # fmt: skip
def test_decode_on_h100(batch: int, context: int, kv_gb: float, ms: float, w4_ms: float, fp8_ms: float) -> None:
    def step_ms(precision: Precision) -> float:
        return 1e3 * decode_step(LLAMA_31_8B, precision, batch, context).total.bytes / 3350e9

    work = decode_step(LLAMA_31_8B, P16, batch, context).total
    assert work.weight_bytes / 1e9 == pytest.approx(15.01, abs=0.01)
    assert work.kv_bytes / 1e9 == pytest.approx(kv_gb, abs=0.01)
    assert step_ms(P16) == pytest.approx(ms, abs=0.01)
    assert step_ms(Precision(weight_bits=4)) == pytest.approx(w4_ms, abs=0.01)
    assert step_ms(Precision(kv_bits=8)) == pytest.approx(fp8_ms, abs=0.01)


# --- mixture of experts, latent attention -------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "expected"), [(1, 8.0), (8, 57.4), (32, 163.3), (128, 251.6)])
def test_distinct_experts(tokens: int, expected: float) -> None:
    assert expected_distinct_experts(256, 8, tokens) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("tokens", "intensity"), [(1, 2.0), (32, 5.4), (128, 14.2), (256, 28.0)])
def test_deepseek_linear_intensity_in_fp8(tokens: int, intensity: float) -> None:
    linear = decode_step(DEEPSEEK_V3, Precision(weight_bits=8), tokens, 1).linear
    found = linear.intensity_flop_per_byte
    assert found is not None
    assert found == pytest.approx(intensity, rel=0.03)


def test_latent_attention_cores() -> None:
    assert attention_flops_per_pair(DEEPSEEK_V3, "expanded") == 128 * 2 * 320
    assert attention_flops_per_pair(DEEPSEEK_V3, "absorbed") == 128 * 2 * 1088
    absorbed = attention_flops_per_pair(DEEPSEEK_V3, "absorbed") / (kv_elements_per_token(DEEPSEEK_V3) * 2)
    assert absorbed == pytest.approx(241.8, abs=0.1)


def test_stored_parameters_are_those_published() -> None:
    for model in RULES.models.values():
        tables = 1 if model.tied else 2
        assert stored_linear_weights(model) + tables * head_weights(model) == pytest.approx(model.params, rel=5e-4), (
            model.id
        )


def test_quantized_layers_leave_the_tables_at_16_bits() -> None:
    layers, tables = stored_linear_weights(LLAMA_31_8B), 2 * head_weights(LLAMA_31_8B)
    assert weight_bytes_stored(LLAMA_31_8B, Precision(weight_bits=4)) == layers / 2 + tables * 2


# --- R8: properties -----------------------------------------------------------------------------------------------------


@given(models, st.integers(1, 300), st.integers(1, 64), st.integers(0, 100))
def test_flops_do_not_depend_on_the_chunk(model: Model, prompt: int, chunk: int, cached: int) -> None:
    whole = prefill_step(model, P16, prompt, cached).total
    parts = chunked_prefill(model, P16, cached + prompt, chunk, cached)
    assert sum(part.total.flops for part in parts) == whole.flops
    assert sum(part.total.bytes for part in parts) >= whole.bytes


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 150))
def test_windowed_pairs_are_the_sum_over_queries(new: int, past: int, window: int) -> None:
    assert causal_pairs(new, past, window) == sum(min(past + i + 1, window) for i in range(new))
    assert causal_pairs(new, past) == sum(past + i + 1 for i in range(new))


@given(models, st.integers(1, 64), st.integers(1, 4096))
def test_kv_is_linear_in_tokens(model: Model, batch: int, context: int) -> None:
    assert decode_step(model, P16, batch, context).total.kv_bytes == kv_bytes_per_token(model) * batch * context


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 512))
def test_grouped_queries_with_as_many_kv_heads_are_plain_attention(heads: int, batch: int, context: int) -> None:
    plain = make_model(heads=heads, kv_heads=heads)
    attention = decode_step(plain, P16, batch, context).attention
    assert attention.flops == plain.layers * 4 * heads * 16 * batch * context
    assert attention.bytes == plain.layers * 2 * heads * 16 * 2 * batch * context


@given(st.integers(1, 64), st.integers(1, 8))
def test_distinct_experts_grow_from_k_to_all(experts: int, per_token: int) -> None:
    per_token = min(per_token, experts)
    values = [expected_distinct_experts(experts, per_token, tokens) for tokens in range(1, 40)]
    assert values[0] == pytest.approx(per_token)
    assert all(a <= b + 1e-9 for a, b in pairwise(values))
    assert expected_distinct_experts(experts, per_token, 100_000) == pytest.approx(experts)


@given(models, st.integers(1, 64), st.integers(1, 4096), st.sampled_from([8.0, 16.0]))
def test_decode_attention_intensity_is_group_size_over_bytes(
    model: Model, batch: int, context: int, kv_bits: float
) -> None:
    found = decode_step(model, Precision(kv_bits=kv_bits), batch, context).attention.intensity_flop_per_byte
    assert found == pytest.approx(model.heads / model.kv_heads * 2 / (kv_bits / 8))


@given(
    models, st.lists(st.integers(1, 64), min_size=1, max_size=5), st.lists(st.integers(1, 512), min_size=1, max_size=5)
)
def test_a_mixed_step_reads_the_weights_once(model: Model, prompts: list[int], contexts: list[int]) -> None:
    chunks = [Chunk(tokens) for tokens in prompts]
    mixed = step_work(model, P16, chunks, contexts).total
    apart = [step_work(model, P16, chunks=chunks).total, step_work(model, P16, contexts=contexts).total]
    assert mixed.flops == sum(part.flops for part in apart)
    assert mixed.weight_bytes == apart[0].weight_bytes == apart[1].weight_bytes
    assert mixed.kv_bytes == pytest.approx(sum(part.kv_bytes for part in apart))


@given(models, st.lists(st.integers(1, 200_000), max_size=20))
def test_sequences_may_be_counted_by_their_context(model: Model, contexts: list[int]) -> None:
    assert step_work(model, P16, contexts=Counter(contexts)) == step_work(model, P16, contexts=contexts)


def test_the_head_runs_for_the_last_chunk_only() -> None:
    assert prefill_step(LLAMA_31_8B, P16, 512, last=False).head.flops == 0
    assert prefill_step(LLAMA_31_8B, P16, 512).head.flops == 2 * head_weights(LLAMA_31_8B)


def test_an_empty_step_costs_nothing() -> None:
    assert step_work(LLAMA_31_8B, P16).total.bytes == 0


def test_a_window_bounds_reads_and_flops() -> None:
    model = make_model()
    windowed = replace(model, sliding_window=SlidingWindow(window_tokens=100, layers=model.layers))
    assert decode_step(windowed, P16, 3, 5000).attention == decode_step(model, P16, 3, 100).attention
    half = replace(model, sliding_window=SlidingWindow(window_tokens=100, layers=1))
    full, short = decode_step(model, P16, 3, 5000).attention, decode_step(windowed, P16, 3, 5000).attention
    assert decode_step(half, P16, 3, 5000).attention.flops == (full.flops + short.flops) // 2


def test_routed_weights_are_read_once_a_step() -> None:
    mixtral = RULES.models["mixtral-8x7b"]
    one, many = (linear_weight_bytes_read(mixtral, P16, tokens) for tokens in (1, 10_000))
    assert one == pytest.approx(2 * active_linear_weights(mixtral))
    assert many == pytest.approx(2 * stored_linear_weights(mixtral))
    assert fixed_linear_weights(mixtral) < active_linear_weights(mixtral)
