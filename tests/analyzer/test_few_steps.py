"""What steps cannot tell, the data sheet decides: a few steps of one batch size do not say that the device waits for the host."""

from __future__ import annotations

import numpy as np
import pytest
from step_contexts import recorded_context

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.machine import Machine
from phasewise.analyzer.step_bounds import bounds_of
from phasewise.analyzer.step_fit import Composition, fit_steps
from phasewise.analyzer.step_parts import PARTS, WEIGHT_EFFICIENCY, split
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.simulation import Setup, simulate
from phasewise.rules.counting import Precision
from phasewise.rules.load import load_rulebook
from phasewise.rules.vocabulary import CAUSES, cause_column

RULES = load_rulebook()


def deployment(model: str, gpu: str, devices: int = 1) -> Deployment:
    return Deployment(gpu=RULES.gpus[gpu], model=RULES.models[model], tensor_parallel_count=devices)


def run(at: Deployment, count: int, outputs: int, prompt: int, gap_s: float, seed: int) -> Recording:
    arrivals = [
        RequestSpec(
            request_id=f"r{k}", arrival_ns=round(k * gap_s * 1e9), prompt_tokens=prompt, max_output_tokens=outputs
        )
        for k in range(count)
    ]
    return simulate(Setup(EngineConfig(max_num_seqs=8), at), arrivals, seed=seed)


def booked(recording: Recording, model: str, gpu: str, devices: int = 1) -> dict[str, float]:
    """Shares of the time of all requests, by cause."""
    settings = {"accelerator": gpu, "model": model, "tensor_parallel": devices}
    answer = attribute_instance(recorded_context(recording, model, settings)[2], RULES)
    seconds = {cause: float(answer[cause_column(cause)].sum()) for cause in CAUSES}
    return {cause: value / sum(seconds.values()) for cause, value in seconds.items()}


CASES = [
    (1, 16, 16, 1.0),  # one short answer on a fresh engine
    (1, 200, 16, 1.0),
    (5, 16, 16, 1.0),  # one after the other
    (8, 64, 300, 0.0),  # at once
    (30, 64, 300, 0.05),
]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("count", "outputs", "prompt", "gap_s"), CASES)
def test_an_8b_on_an_h100_decodes_at_the_speed_of_its_weights(
    count: int, outputs: int, prompt: int, gap_s: float, seed: int
) -> None:
    """The law: 5.1 ms of weights and 1.15 ms of host in steps of 6.4 ms."""
    at = deployment("llama-3.1-8b", "h100-sxm")
    recording = run(at, count, outputs, prompt, gap_s, seed)
    law, columns = TimeLaw(at), recording.step_columns()
    whole = law.seconds_of(columns).sum()
    host = 1 - law.seconds_of(columns, without="host").sum() / whole
    share = booked(recording, "llama-3.1-8b", "h100-sxm")
    assert share["decode.weights"] == max(share.values())
    assert share["host"] == pytest.approx(host, abs=0.05)


@pytest.mark.parametrize(
    ("model", "gpu", "devices"),
    [("llama-3.1-8b", "l4", 1), ("llama-3.1-70b", "h100-sxm", 4), ("llama-3.1-8b", "a100-sxm-80gb", 1)],
)
def test_other_machines_too(model: str, gpu: str, devices: int) -> None:
    recording = run(deployment(model, gpu, devices), 1, 16, 16, 1.0, 1)
    share = booked(recording, model, gpu, devices)
    assert share["decode.weights"] == max(share.values()) and share["decode.weights"] > 0.7


def made(count: int, sequences: tuple[int, int], context: tuple[int, int]) -> Composition:
    rng = np.random.default_rng(3)
    running = rng.integers(sequences[0], sequences[1] + 1, count).astype(float)
    nothing = np.zeros(count)
    return Composition(running, running, running * rng.integers(*context, count), nothing, nothing)


def host_share(made_of: Composition, step_s: float) -> float:
    """Of steps that take the same whatever they are made of, with 2 % of noise."""
    built = Machine(RULES.models["llama-3.1-8b"], RULES.gpus["h100-sxm"], Precision(), "bf16", 1)
    noise = np.random.default_rng(4).lognormal(0, 0.02, len(made_of.tokens))
    model = fit_steps(made_of, step_s * noise, bounds_of(built))
    return float(split(model, built, made_of).shares()[PARTS.index("host")].mean())


def test_steps_that_do_tell_are_believed() -> None:
    """Contexts that would cost 1 to 20 ms and cost nothing: the device waits, and the weights hide as well."""
    assert host_share(made(3000, (4, 64), (500, 8000)), 0.030) > 0.8
    # The same steps with contexts of 20 µs: nothing says whether 5.6 of 30 ms are hidden.
    short = host_share(made(40, (1, 1), (20, 500)), 0.030)
    assert short == pytest.approx(1 - 15.01e9 / 3.35e12 / WEIGHT_EFFICIENCY / 0.030, abs=0.03)


def test_the_error_of_the_context_s_cost_shrinks_with_the_steps_and_their_contexts() -> None:
    def error(count: int, sequences: tuple[int, int], context: tuple[int, int]) -> float:
        made_of = made(count, sequences, context)
        noise = np.random.default_rng(5).lognormal(0, 0.02, count)
        return fit_steps(made_of, (0.006 + 40e-9 * made_of.context) * noise, None).context_error_s

    few, many = error(100, (1, 8), (100, 4000)), error(1600, (1, 8), (100, 4000))
    assert few / many == pytest.approx(4.0, rel=0.4)
    assert error(400, (1, 1), (100, 300)) > 5 * error(400, (1, 1), (100, 4000))
    assert error(40, (4, 4), (1000, 1001)) == float("inf")


def test_the_error_is_the_spread_of_repeated_fits() -> None:
    made_of = made(300, (2, 12), (100, 4000))
    slopes, told = [], []
    for seed in range(60):
        noise = np.random.default_rng(seed).lognormal(0, 0.02, 300)
        model = fit_steps(made_of, (0.006 + 40e-9 * made_of.context) * noise, None)
        low, high = np.quantile(made_of.context, (0.1, 0.9))
        slopes.append(float(np.diff(model.context_time_s(np.array([low, high])))[0] / (high - low)))
        told.append(model.context_error_s)
    assert np.mean(told) == pytest.approx(np.std(slopes), rel=0.6)
