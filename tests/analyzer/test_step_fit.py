"""The fit of step times: never negative, as good as any other, and convex where a step is bound by the larger of two things."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.machine import Machine
from phasewise.analyzer.step_bounds import bounds_of
from phasewise.analyzer.step_fit import Composition, fit_steps, nonnegative
from phasewise.analyzer.step_parts import PARTS, split
from phasewise.rules.counting import Precision
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6))
def test_the_solution_meets_the_conditions_of_a_minimum(terms: int, seed: int) -> None:
    """Karush, Kuhn and Tucker: x >= 0, no descent where x is 0, no slope where it is not."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(terms + 3, terms))
    gram = rows.T @ rows + 1e-6 * np.eye(terms)
    right = rng.normal(size=terms) * 10
    x = nonnegative(gram, right)
    slope = gram @ x - right
    assert (x >= 0).all()
    assert (slope >= -1e-7).all()
    assert np.abs(slope[x > 0]).max(initial=0.0) <= 1e-7


def composition(seed: int, count: int = 2000, prompts: float = 0.3) -> Composition:
    rng = np.random.default_rng(seed)
    sequences = rng.integers(1, 64, count).astype(float)
    prefill = np.where(rng.random(count) < prompts, rng.integers(16, 2000, count), 0).astype(float)
    return Composition(
        tokens=sequences + prefill,
        sequences=sequences,
        context=sequences * rng.integers(100, 4000, count),
        pairs=prefill * (prefill + 1) / 2,
        prefilling=(prefill > 0).astype(float),
    )


def law(made_of: Composition) -> Floats:
    """Bound by 5 ms of weights or 40 us a token, whichever is more; 50 ns a token of context; 1 ms of host."""
    return np.maximum(0.005, 40e-6 * made_of.tokens) + 50e-9 * made_of.context + 0.001


def test_a_larger_of_two_is_followed_on_both_sides() -> None:
    made_of = composition(1)
    model = fit_steps(made_of, law(made_of), None)
    asked = composition(2)
    error = model.seconds(asked) / law(asked) - 1
    assert np.quantile(np.abs(error), 0.95) < 0.04
    few, many = model.token_slope_s(np.array([20.0, 1500.0]))
    assert few < 4e-6
    assert many == pytest.approx(40e-6, rel=0.05)
    assert model.context_slope_s(np.array([60_000.0]))[0] == pytest.approx(50e-9, rel=0.05)


def test_noise_and_stalls_move_little() -> None:
    made_of = composition(3)
    rng = np.random.default_rng(4)
    took = law(made_of) * rng.lognormal(0, 0.05, len(made_of.tokens))
    took[rng.integers(0, len(took), 40)] += 1.0
    model = fit_steps(made_of, took, None)
    asked = composition(5)
    assert np.quantile(np.abs(model.seconds(asked) / law(asked) - 1), 0.95) < 0.06
    assert model.spread_ratio == pytest.approx(0.05, rel=0.25)


def test_equal_sequences_are_read_as_context_not_as_their_number() -> None:
    """All of 2,000 tokens: number and context say the same; bytes of context explain what both could."""
    rng = np.random.default_rng(6)
    sequences = rng.integers(1, 64, 500).astype(float)
    nothing = np.zeros(500)
    made_of = Composition(sequences, sequences, sequences * 2000, nothing, nothing)
    model = fit_steps(made_of, 0.006 + made_of.context * 60e-9, None)
    assert model.context_slope_s(np.array([64_000.0]))[0] == pytest.approx(60e-9, rel=0.2)
    assert model.sequence_s < 0.1 * 60e-9 * 2000


def test_what_no_step_shows_is_taken_from_the_data_sheet() -> None:
    built = Machine(RULES.models["llama-3.1-8b"], RULES.gpus["h100-sxm"], Precision(), "bf16", 1)
    bounds = bounds_of(built)
    assert bounds is not None
    made_of = composition(7, prompts=0.0)
    model = fit_steps(made_of, law(made_of), bounds)
    assert model.pair_s >= bounds.pair_s
    assert model.token_slope_s(np.array([2000.0]))[0] >= bounds.token_s


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "unknown"]),
    st.sampled_from(["h100-sxm", "l40s", "unknown"]),
    st.sampled_from([1, 2, 8]),
)
def test_parts_of_a_step_add_up_to_its_prediction(seed: int, model_id: str, gpu_id: str, devices: int) -> None:
    built = Machine(RULES.models.get(model_id), RULES.gpus.get(gpu_id), Precision(), "bf16", devices)
    made_of = composition(seed, 300)
    rng = np.random.default_rng(seed)
    model = fit_steps(made_of, law(made_of) * rng.lognormal(0, 0.1, 300), bounds_of(built))
    parts = split(model, built, made_of)
    assert (parts.seconds >= 0).all()
    np.testing.assert_allclose(parts.total, model.seconds(made_of), rtol=1e-9)
    np.testing.assert_allclose(parts.shares().sum(axis=0), 1.0, rtol=1e-9)
    assert len(parts.seconds) == len(PARTS)


def test_bounds_are_those_of_the_reference_numbers() -> None:
    """Llama-3.1-8B on an H100 (roofline.md 2.6): 15.01 GB of weights, 131,072 bytes a token, one step of 64 x 2,048: 9.61 ms."""
    built = Machine(RULES.models["llama-3.1-8b"], RULES.gpus["h100-sxm"], Precision(), "bf16", 1)
    bounds = bounds_of(built)
    assert bounds is not None
    weights = bounds.weights_s(np.array([64.0]))[0]
    assert weights == pytest.approx(15.01e9 / 3.35e12, rel=1e-3)
    assert weights + 64 * 2048 * bounds.context_s == pytest.approx(9.61e-3, rel=2e-3)
    assert bounds.knee_tokens == pytest.approx(295, rel=0.1)
    assert bounds_of(Machine(None, RULES.gpus["h100-sxm"], Precision(), "bf16", 1)) is None
