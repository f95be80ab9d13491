"""A step's kernels by what each resource would save of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from time_law_steps import composed

from phasewise.analyzer.kernel_times import kernel_times
from phasewise.analyzer.machine import Machine
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.rules.counting import Precision
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
PARTS = ("weights", "kv", "compute", "links", "floors")


def built(gpu: str = "h100-sxm", model: str = "llama-3.1-8b", devices: int = 1, bits: float = 16.0) -> Machine:
    return Machine(RULES.models[model], RULES.gpus[gpu], Precision(weight_bits=bits), "bf16", devices)


@given(
    st.sampled_from(["l40s", "a100-sxm-80gb", "h100-sxm", "mi300x"]),
    st.sampled_from([1, 4]),
    st.integers(1, 512),
    st.integers(1, 8_000),
)
def test_the_parts_are_those_of_the_law_and_add_up_to_its_step(gpu: str, devices: int, batch: int, each: int) -> None:
    known = kernel_times(built(gpu, devices=devices))
    assert known is not None
    found = known.decoding(np.array([float(batch)]), np.array([float(batch * each)]))
    at = Deployment(
        gpu=RULES.gpus[gpu],
        model=RULES.models["llama-3.1-8b"],
        tensor_parallel_count=devices,
        host_step_s=0.0,
        host_token_s=0.0,
        launch_s=0.0,
    )
    step = TimeLaw(at).seconds(composed(contexts=[each] * batch))
    assert found.total[0] == pytest.approx(step, rel=1e-9)
    assert all(getattr(found, name)[0] >= 0 for name in PARTS)
    assert (found.links[0] > 0) == (devices > 1)


def test_small_batches_read_and_large_ones_compute() -> None:
    known = kernel_times(built("a100-sxm-80gb", "llama-3.1-70b", bits=4.25))
    assert known is not None
    found = known.decoding(np.array([1.0, 256.0]), np.array([500.0, 128_000.0]))
    assert found.compute[1] > 3 * found.weights[1]
    # Four-bit weights are read as fast as the padded rows of the smallest batch are multiplied.
    assert found.compute[0] > found.weights[0]
    sixteen = kernel_times(built("h100-sxm"))
    assert sixteen is not None
    one = sixteen.decoding(np.array([1.0]), np.array([500.0]))
    assert one.weights[0] > 5 * one.compute[0]


def test_twice_the_context_takes_twice_the_reading_of_it() -> None:
    known = kernel_times(built())
    assert known is not None
    found = known.decoding(np.array([64.0, 64.0]), np.array([2e5, 4e5]))
    assert found.kv[1] / found.kv[0] == pytest.approx(2.0, rel=0.1)
    assert found.weights[1] == pytest.approx(found.weights[0], rel=0.01)


def test_nothing_is_told_of_a_machine_that_nobody_measured() -> None:
    whole = built()
    assert kernel_times(replace(whole, model=None)) is None
    assert kernel_times(replace(whole, gpu=None)) is None
    assert kernel_times(replace(whole, dtype="fp4")) is None
    assert kernel_times(replace(whole, devices=3)) is None
    unlinked = replace(RULES.gpus["h100-sxm"], link_bandwidth_bytes_per_s=None)
    assert kernel_times(replace(whole, gpu=unlinked)) is not None
    assert kernel_times(replace(whole, gpu=unlinked, devices=2)) is None
