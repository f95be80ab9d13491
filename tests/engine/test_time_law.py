"""The time law of the simulated executor: never below the data sheet, monotone, one answer for a step and for a column."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from time_law_steps import FP8, RULES, bound_s, columns, composed, deployment, without

from phasewise.instrumented_engine.executors.time_law import RESOURCES, TimeLaw
from phasewise.rules.counting import (
    Precision,
    active_linear_weights,
    fixed_linear_weights,
    head_weights,
    linear_weight_bytes_read,
)
from phasewise.rules.kernels.operators import Kept

DEPLOYMENTS = {
    "dense": deployment(),
    "dense fp8 tp4": deployment("h200-sxm", "llama-3.1-70b", 4, precision=FP8, compute_dtype="fp8"),
    "int4 weights": deployment("a100-sxm-80gb", "llama-2-13b", precision=Precision(weight_bits=4.25)),
    "no own curves": deployment("l4", "qwen2.5-0.5b", async_scheduling=False),
    "experts tp2": deployment("mi300x", "mixtral-8x7b", 2, cuda_graphs=False),
    "many experts": deployment("h100-sxm", "qwen3-30b-a3b"),
    "mla tp8": deployment("b200-sxm", "deepseek-v3", 8, precision=FP8, compute_dtype="fp8", cold_steps=5, cold_s=2.0),
    "window": deployment("l40s", "mistral-7b-v0.1"),
}
each_deployment = pytest.mark.parametrize("name", DEPLOYMENTS)


chunk_lists = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 20_000), st.booleans()), max_size=5)
context_lists = st.lists(st.integers(1, 40_000), max_size=80)


# --- counting and the data sheet -------------------------------------------------------------------------------------


@each_deployment
@given(chunks=chunk_lists, contexts=context_lists)
@settings(max_examples=60, deadline=None)
def test_no_step_beats_the_data_sheet(name: str, chunks: list[tuple[int, int, bool]], contexts: list[int]) -> None:
    at = DEPLOYMENTS[name]
    assert TimeLaw(at).seconds(composed(chunks, contexts)) >= bound_s(at, chunks, contexts) * (1 - 1e-9)


@pytest.mark.parametrize("model", sorted(RULES.models))
def test_the_products_are_those_that_are_counted(model: str) -> None:
    at = deployment("h100-sxm", model)
    replica = TimeLaw(at).replica
    fixed = sum(product.layers * product.n * product.k for product in replica.products)
    assert fixed == fixed_linear_weights(at.model)
    active = fixed + sum(expert.layers * expert.n * expert.k * expert.per_token for expert in replica.expert_products)
    assert active == active_linear_weights(at.model)
    assert replica.head.n * replica.head.k == head_weights(at.model)
    for tokens in (1, 7, 300):
        read = sum(product.layers * product.weight_bytes for product in replica.products)
        for expert in replica.expert_products:
            distinct = expert.experts * (1 - (1 - expert.per_token / expert.experts) ** tokens)
            read += expert.layers * expert.expert_bytes * distinct
        assert read == pytest.approx(linear_weight_bytes_read(at.model, at.precision, tokens), rel=1e-12)


@pytest.mark.parametrize(
    ("batch", "context", "table_ms", "int4_ms", "fp8_kv_ms"),
    [
        (1, 2048, 4.56, 1.44, 4.52),
        (16, 2048, 5.76, 2.64, 5.12),
        (64, 2048, 9.61, 6.48, 7.04),
        (128, 2048, 14.74, 11.61, 9.61),
        (64, 8192, 24.99, 21.87, 14.74),
    ],
)
def test_worked_examples_of_the_roofline_are_lower_bounds(
    batch: int, context: int, table_ms: float, int4_ms: float, fp8_kv_ms: float
) -> None:
    """Llama-3.1-8B in bf16 on an H100 (roofline.md 2.6, second finding), rounded to 0.01 ms there."""
    step = composed(contexts=[context] * batch)
    for precision, bound_ms, most in (
        (Precision(), table_ms, 1.5),
        (Precision(weight_bits=4, head_bits=16), int4_ms, 2.8),  # floors of the calls weigh more where little is read
        (Precision(kv_bits=8), fp8_kv_ms, 1.7),
    ):
        law_ms = TimeLaw(deployment(precision=precision)).seconds(step) * 1e3
        assert bound_ms - 0.01 <= law_ms <= most * bound_ms


# --- shape of the law ------------------------------------------------------------------------------------------------


@each_deployment
@given(chunks=chunk_lists, contexts=context_lists, more=st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_more_work_never_takes_less_time(
    name: str, chunks: list[tuple[int, int, bool]], contexts: list[int], more: int
) -> None:
    law = TimeLaw(DEPLOYMENTS[name])
    before = law.seconds(composed(chunks, contexts)) * (1 - 1e-9)
    assert law.seconds(composed([*chunks, (more, 0, True)], contexts)) >= before
    assert law.seconds(composed(chunks, [*contexts, more])) >= before
    if contexts:
        assert law.seconds(composed(chunks, [contexts[0] + more, *contexts[1:]])) >= before
    if chunks:
        (new, past, last), *others = chunks
        assert law.seconds(composed([(new + more, past, last), *others], contexts)) >= before
        assert law.seconds(composed([(new, past + more, last), *others], contexts)) >= before


def test_a_compute_bound_step_does_not_care_for_bandwidth() -> None:
    step = composed([(8192, 0, True)])
    at = deployment(model="llama-3.1-70b", devices=4)
    twice = replace(at.gpu, memory_bandwidth_bytes_per_s=2 * at.gpu.nominal_bandwidth_bytes_per_s)
    base, faster = TimeLaw(at).replica.products, TimeLaw(replace(at, gpu=twice)).replica.products
    base_s = sum(product.seconds(8192.0) for product in base)
    faster_s = sum(product.seconds(8192.0) for product in faster)
    assert faster_s == pytest.approx(base_s, rel=0.01)
    # Norms and the like are all bandwidth, a tenth of the step.
    assert TimeLaw(replace(at, gpu=twice)).seconds(step) > 0.9 * TimeLaw(at).seconds(step)


def test_a_bandwidth_bound_step_does_not_care_for_compute() -> None:
    step = composed(contexts=[1000])
    at = deployment()
    twice = replace(at.gpu, peak_flops={dtype: 2 * peak for dtype, peak in at.gpu.peak_flops.items()})
    base_s, faster_s = TimeLaw(at).seconds(step), TimeLaw(replace(at, gpu=twice)).seconds(step)
    assert faster_s == pytest.approx(base_s, rel=0.01)


def test_batching_shares_the_weights_and_not_the_kv() -> None:
    law = TimeLaw(deployment())
    one, many = law.seconds(composed(contexts=[200])), law.seconds(composed(contexts=[200] * 32))
    assert many < 1.3 * one
    one, many = law.seconds(composed(contexts=[30_000])), law.seconds(composed(contexts=[30_000] * 32))
    assert many > 4 * one


def test_a_mixed_step_reads_the_weights_once() -> None:
    law = TimeLaw(deployment())
    prompt, decodes = [(64, 0, True)], [500] * 64
    apart = law.seconds(composed(prompt)) + law.seconds(composed(contexts=decodes))
    assert law.seconds(composed(prompt, decodes)) < 0.75 * apart


def test_a_sliding_window_caps_what_is_attended() -> None:
    law = TimeLaw(deployment(model="mistral-7b-v0.1"))
    full = TimeLaw(replace(law.deployment, model=replace(law.deployment.model, sliding_window=None)))
    for chunks, contexts in (([(1000, 500, True)], []), ([], [3000] * 40)):
        assert law.seconds(composed(chunks, contexts)) == pytest.approx(
            full.seconds(composed(chunks, contexts)), rel=1e-12
        )
    at_window, far = composed(contexts=[4096] * 40), composed(contexts=[30_000] * 40)
    assert law.seconds(far) == pytest.approx(law.seconds(at_window), rel=1e-12)
    assert full.seconds(far) > 2 * law.seconds(far)
    assert law.seconds(composed([(16_000, 0, True)])) < full.seconds(composed([(16_000, 0, True)]))


def test_chunks_cost_more_than_the_prompt_at_once() -> None:
    law = TimeLaw(deployment())
    whole = law.seconds(composed([(8192, 0, True)]))
    chunked = sum(law.seconds(composed([(512, past, past == 7680)])) for past in range(0, 8192, 512))
    assert 1.05 * whole < chunked < 2.5 * whole


def test_latent_attention_is_nearer_to_compute_than_grouped_heads() -> None:
    """Absorbed MLA does 242 FLOP a byte of bf16 KV where 8 query heads a KV head do 8 (roofline.md 2.3)."""
    saved: dict[str, float] = {}
    for model in ("deepseek-v3", "llama-3.1-70b"):
        replica = TimeLaw(deployment("h200-sxm", model, precision=FP8, compute_dtype="fp8")).replica
        whole, no_flops = (replica.decode_seconds(64.0, 64 * 8000.0, kept) for kept in (Kept(), Kept(compute=0.0)))
        saved[model] = 1 - no_flops / whole
    assert saved["deepseek-v3"] > 0.4
    assert saved["llama-3.1-70b"] < 0.2


# --- one step and many, with a resource taken away -------------------------------------------------------------------


@each_deployment
@given(steps=st.lists(st.tuples(chunk_lists, context_lists, st.integers(0, 10)), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_a_step_alone_and_in_a_column_takes_the_same(
    name: str, steps: list[tuple[list[tuple[int, int, bool]], list[int], int]]
) -> None:
    law = TimeLaw(DEPLOYMENTS[name])
    compositions = [composed(chunks, contexts, number) for chunks, contexts, number in steps]
    alone = [law.seconds(step) for step in compositions]
    assert law.seconds_of(columns(compositions)) == pytest.approx(alone, rel=1e-12, abs=0)
    for resource in RESOURCES:
        removed = law.seconds_of(columns(compositions), resource)
        freed = TimeLaw(law.deployment, without=resource)
        assert [freed.seconds(step) for step in compositions] == pytest.approx(removed, rel=1e-12, abs=0)
        assert np.all(removed <= np.array(alone) * (1 + 1e-12)), resource
        assert np.all(removed >= 0)


def test_the_row_is_the_number_where_no_column_gives_it() -> None:
    law = TimeLaw(deployment(cold_steps=4, cold_s=1.0))
    table = columns([composed(contexts=[100]) for _ in range(6)])
    del table["number"]
    extra = law.seconds_of(table) - law.seconds_of(table, "cold_start")
    assert extra == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_a_step_without_tokens_takes_no_time() -> None:
    table = columns([composed(), composed(contexts=[10])])
    for at in DEPLOYMENTS.values():
        for resource in (None, *RESOURCES):
            seconds = TimeLaw(at).seconds_of(table, resource)
            assert seconds[0] == 0.0 < seconds[1], resource


def test_each_resource_takes_its_own_time_along() -> None:
    law = TimeLaw(deployment("h100-sxm", "llama-3.1-70b", 4))
    decode_few, decode_long = composed(contexts=[500] * 4), composed(contexts=[20_000] * 64)
    prompt = composed([(4096, 0, True)])
    for step, resource in ((decode_few, "weight_bytes"), (decode_long, "kv_bytes"), (prompt, "compute")):
        left = {name: without(law, step, name) for name in RESOURCES}
        assert min(left, key=lambda name: left[name]) == resource
        assert left[resource] < 0.6 * law.seconds(step)
    assert without(law, decode_few, "cold_start") == law.seconds(decode_few)


def test_a_small_batch_in_fp8_waits_for_weights_too() -> None:
    law = TimeLaw(deployment("h200-sxm", "llama-3.1-70b", precision=FP8, compute_dtype="fp8"))
    step = composed(contexts=[500] * 4)
    left = {name: without(law, step, name) / law.seconds(step) for name in RESOURCES}
    assert left["weight_bytes"] < 0.55
    assert all(share > 0.8 for name, share in left.items() if name != "weight_bytes")


def test_taking_away_the_prompts_of_others_is_a_question_for_altered_columns() -> None:
    law = TimeLaw(deployment())
    table = columns([composed([(2048, 0, True)], [1000] * 16)])
    alone = columns([composed(contexts=[1000] * 16)])
    for name in ("prefill_tokens", "prefill_pairs", "prefill_past_tokens", "chunks", "last_chunks"):
        table[name] = np.zeros_like(table[name])
    assert law.seconds_of(table) == pytest.approx(law.seconds_of(alone), rel=1e-12)


def test_only_resources_can_be_taken_away() -> None:
    with pytest.raises(ValueError, match="known: compute, weight_bytes"):
        TimeLaw(deployment()).seconds_of(columns([composed(contexts=[1])]), "slots")


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_step_costs_microseconds() -> None:
    law = TimeLaw(deployment("h100-sxm", "llama-3.1-8b"))
    step = composed([(512, 1024, False)], [1000] * 64)
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(1000):
            law.seconds(step)
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 15e-6
