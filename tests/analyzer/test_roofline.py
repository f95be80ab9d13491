"""What bounds a phase, with a known device and without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.analyzer.roofline import judge_decode, judge_prefill, judge_step, known_ridges, physics_check
from phasewise.rules.counting import Chunk, Precision, step_work
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
H100, A6000, H20 = RULES.gpus["h100-sxm"], RULES.gpus["rtx-a6000"], RULES.gpus["h20"]
LLAMA = RULES.models["llama-3.1-8b"]
KNOWN = tuple(RULES.gpus.values())


def test_decode_at_batch_one_reads_weights() -> None:
    judged = judge_decode(LLAMA, H100, 1, 2048)
    assert judged.bound == "bandwidth"
    assert judged.weight_io_ratio == pytest.approx(0.98, abs=0.01)
    assert judged.time_s == pytest.approx(4.56e-3, rel=1e-2)
    assert judged.reason is None
    assert judged.offer is None


def test_the_bytes_that_bind_flip_from_weights_to_kv() -> None:
    few, many = judge_decode(LLAMA, H100, 16, 2048), judge_decode(LLAMA, H100, 128, 2048)
    assert few.kv_io_ratio == pytest.approx(0.22, abs=0.01)
    assert many.kv_io_ratio == pytest.approx(0.70, abs=0.01)
    assert few.bound == many.bound == "bandwidth"


def test_prefill_of_a_long_prompt_computes() -> None:
    judged = judge_prefill(LLAMA, H100, 2048)
    assert judged.bound == "compute"
    assert judged.linear.bound == "compute"


def test_linear_layers_and_attention_are_judged_apart() -> None:
    """At 512 sequences on an H20 the linear layers compute while attention still reads KV."""
    judged = judge_decode(LLAMA, H20, 512, 2048)
    bounds = {group.name: group.bound for group in judged.groups}
    assert bounds["linear"] == "compute"
    assert bounds["attention"] == "bandwidth"


def test_r1_step_time_on_an_a6000() -> None:
    judged = judge_decode(RULES.models["llama-2-7b"], A6000, 1, 2048)
    assert judged.time_s == pytest.approx(18.637e-3, rel=0.005)


def test_two_devices_halve_the_bound() -> None:
    one, two = judge_decode(LLAMA, H100, 8, 1024), judge_decode(LLAMA, H100, 8, 1024, tp=2)
    assert one.time_s is not None
    assert two.time_s == pytest.approx(one.time_s / 2)
    assert two.linear.intensity_flop_per_byte == one.linear.intensity_flop_per_byte


def test_absorbed_latent_attention_is_near_the_ridge() -> None:
    judged = judge_decode(RULES.models["deepseek-v3"], RULES.gpus["h200-sxm"], 64, 32_768, dtype="bf16")
    attention = judged.groups[1]
    assert attention.intensity_flop_per_byte == pytest.approx(241.8, rel=0.01)
    assert attention.bound == "compute"


# --- an unknown device ----------------------------------------------------------------------------------------------------


def test_far_from_every_ridge_the_answer_needs_no_device() -> None:
    assert judge_decode(LLAMA, None, 4, 512, known=KNOWN).bound == "bandwidth"
    assert judge_prefill(LLAMA, None, 4096, known=KNOWN).bound == "compute"


def test_between_the_ridges_it_refuses_and_says_what_would_decide() -> None:
    judged = judge_decode(LLAMA, None, 200, 16, known=KNOWN)
    assert judged.bound is None
    assert judged.time_s is None
    assert judged.reason is not None
    assert "between the lowest" in judged.reason
    assert judged.offer is not None
    assert "name the accelerator" in judged.offer


def test_without_anything_to_compare_with_it_refuses() -> None:
    judged = judge_decode(LLAMA, None, 1, 512)
    assert judged.bound is None
    assert judged.offer is not None


def test_a_device_without_the_data_type_is_unknown_for_it() -> None:
    judged = judge_decode(LLAMA, RULES.gpus["t4"], 1, 512, dtype="bf16", known=KNOWN)
    assert judged.bound == "bandwidth"
    assert judged.time_s is None
    prompt = judge_prefill(LLAMA, RULES.gpus["t4"], 128, dtype="bf16", known=KNOWN)
    assert prompt.bound is None
    assert prompt.reason is not None
    assert "T4 states no bf16 peak" in prompt.reason


def test_groups_bound_differently_are_not_decided_without_a_device() -> None:
    """Many sequences with long contexts: linear layers compute anywhere, but attention moves more bytes."""
    judged = judge_decode(LLAMA, None, 1000, 8192, known=KNOWN)
    assert judged.linear.bound == "compute"
    assert judged.bound is None


def test_ridges_are_those_of_the_data_type() -> None:
    assert known_ridges(KNOWN, "bf16") == pytest.approx((37.0, 419.0), abs=0.1)
    assert known_ridges(KNOWN, "int4") is None


# --- properties -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 512), st.integers(1, 8192), st.sampled_from([4.0, 8.0, 16.0]))
def test_the_bound_is_never_below_either_roof(batch: int, context: int, bits: float) -> None:
    judged = judge_decode(LLAMA, H100, batch, context, weight_bits=bits)
    assert judged.time_s is not None
    assert judged.time_s >= judged.flops / H100.peak_flops["bf16"] * (1 - 1e-9)
    assert judged.time_s >= judged.bytes / H100.nominal_bandwidth_bytes_per_s * (1 - 1e-9)


@given(st.integers(1024, 8192))
def test_more_bandwidth_never_changes_a_compute_bound_group(prompt: int) -> None:
    h200 = RULES.gpus["h200-sxm"]  # an H100 with more bandwidth
    slow, fast = judge_prefill(LLAMA, H100, prompt), judge_prefill(LLAMA, h200, prompt)
    assert slow.linear.bound == "compute"
    assert fast.linear.time_s == slow.linear.time_s


def test_a_mixed_step_is_judged_as_one() -> None:
    work = step_work(LLAMA, Precision(), chunks=[Chunk(512)], contexts=[1024] * 8)
    judged = judge_step("prefill", work, H100, "bf16", 1)
    alone = judge_prefill(LLAMA, H100, 512)
    decode = judge_decode(LLAMA, H100, 8, 1024)
    assert judged.time_s is not None
    assert alone.time_s is not None
    assert decode.time_s is not None
    assert judged.time_s < alone.time_s + decode.time_s


# --- physics ----------------------------------------------------------------------------------------------------------------


def test_faster_than_the_bound_is_reported_not_clamped() -> None:
    judged = judge_decode(LLAMA, H100, 1, 2048)
    found = physics_check(judged, 0.002)
    assert found is not None
    assert found.measured_s == 0.002
    assert found.ratio == pytest.approx(2.28, abs=0.01)
    assert "faster than the device allows" in found.text


def test_slower_than_the_bound_is_nothing_special() -> None:
    judged = judge_decode(LLAMA, H100, 1, 2048)
    assert physics_check(judged, 0.005) is None
    assert physics_check(judge_decode(LLAMA, None, 1, 2048), 1e-9) is None
