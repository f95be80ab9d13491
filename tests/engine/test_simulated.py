"""Noise belongs to (seed, step number); a step takes law times noise."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.instrumented_engine.executors.simulated import SimulatedExecutor
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.plan import PromptChunk, StepPlan
from phasewise.instrumented_engine.recording import composition
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()


def executor(seed: int = 1, noise_ratio: float = 0.05) -> SimulatedExecutor:
    at = Deployment(gpu=RULES.gpus["h100-sxm"], model=RULES.models["llama-3.1-8b"], noise_ratio=noise_ratio)
    return SimulatedExecutor(TimeLaw(at), seed)


def plan(number: int) -> StepPlan:
    prompt, decoding = (
        Sequence(RequestSpec(request_id=name, arrival_ns=0, prompt_tokens=700, max_output_tokens=10)) for name in "ab"
    )
    decoding.computed_tokens = 900
    return StepPlan(number, chunks=[PromptChunk(prompt, 200, 500, last=True)], decodes=[decoding])


def test_noise_has_mean_one_and_the_stated_spread() -> None:
    noise = executor(noise_ratio=0.2).noise(np.arange(200_000))
    assert noise.mean() == pytest.approx(1.0, abs=4 * 0.2 / np.sqrt(200_000))
    assert noise.std() == pytest.approx(0.2, rel=0.02)
    assert noise.min() > 0


def test_noise_is_the_same_for_a_step_number_whatever_was_asked_before() -> None:
    steps = np.array([5, 70_000, 5, 3, 1024, 1023])
    first = executor(seed=7)
    whole = first.noise(np.arange(80_000))
    assert np.array_equal(first.noise(steps), whole[steps])
    assert np.array_equal(executor(seed=7).noise(steps), whole[steps])
    assert not np.array_equal(executor(seed=8).noise(steps), whole[steps])


def test_noise_of_neighbours_and_blocks_is_independent() -> None:
    noise = executor(seed=3).noise(np.arange(65_536)) - 1
    for distance in (1, 2, 1024, 2048):
        correlation = np.corrcoef(noise[:-distance], noise[distance:])[0, 1]
        assert abs(correlation) < 0.02, distance


def test_without_noise_a_step_takes_what_the_law_says() -> None:
    quiet = executor(noise_ratio=0.0)
    step = plan(number=4)
    outcome = quiet.execute(step)
    assert outcome.tokens is None
    assert outcome.duration_ns == round(quiet.law.seconds(composition(step)) * 1e9)


def test_a_rerun_meets_the_same_noise_at_the_same_step() -> None:
    whole, rerun = executor(seed=11), executor(seed=11)
    durations = {number: whole.execute(plan(number)).duration_ns for number in range(0, 4000, 37)}
    for number in (3996, 37, 1998, 0):  # another order, other steps left out
        assert rerun.execute(plan(number)).duration_ns == durations[number]
    law_s = whole.law.seconds(composition(plan(37)))
    assert durations[37] == pytest.approx(law_s * float(whole.noise(np.array([37]))[0]) * 1e9, abs=1)
