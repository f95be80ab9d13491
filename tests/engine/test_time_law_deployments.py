"""The time law on many devices, with the host in the way, without graphs, and where a deployment cannot be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from time_law_steps import FP8, RULES, bound_s, composed, deployment, without

from phasewise.instrumented_engine.executors.deployment import kv_blocks_for
from phasewise.instrumented_engine.executors.time_law import TimeLaw
from phasewise.rules.counting import Precision, fixed_linear_weights, head_weights
from phasewise.rules.errors import InputError
from phasewise.rules.kernels.replica import Replica

# --- devices, host, launches -----------------------------------------------------------------------------------------


def test_tensor_parallelism_divides_work_and_adds_collectives() -> None:
    prompt = composed([(4096, 0, True)])
    seconds: list[float] = []
    communication: list[float] = []
    for devices in (1, 2, 4, 8):
        law = TimeLaw(
            deployment(model="llama-3.1-70b", gpu="h200-sxm", devices=devices, precision=FP8, compute_dtype="fp8")
        )
        seconds.append(law.seconds(prompt))
        communication.append(seconds[-1] - without(law, prompt, "communication"))
    assert communication[0] == pytest.approx(0.0, abs=1e-12)
    assert all(value > 0.01 * whole for value, whole in zip(communication[1:], seconds[1:], strict=True))
    for before, after in pairwise(seconds):
        assert 0.5 * before < after < before, "twice the devices: faster, and never twice as fast"


def test_a_small_model_on_eight_devices_waits_for_host_and_links() -> None:
    """roofline.md 2.6, third finding: roofline over measured is 0.03 to 0.10 for an 8B model at TP8 in FP8."""
    at = deployment("h200-sxm", "llama-3.1-8b", 8, precision=FP8, compute_dtype="fp8")
    law = TimeLaw(at)
    for batch in (1, 8, 16):
        contexts = [1024] * batch
        step = composed(contexts=contexts)
        whole = law.seconds(step)
        saved = 2 * whole - without(law, step, "host") - without(law, step, "communication")
        assert saved > 0.5 * whole
        assert 0.03 < bound_s(at, [], contexts) / whole < 0.12


def test_host_time_is_hidden_or_added() -> None:
    step = composed(contexts=[2000] * 32)
    quick = TimeLaw(deployment(host_step_s=0.0, host_token_s=0.0)).seconds(step)
    hidden = TimeLaw(deployment(host_step_s=2e-3, host_token_s=0.0)).seconds(step)
    added = TimeLaw(deployment(host_step_s=2e-3, host_token_s=0.0, async_scheduling=False)).seconds(step)
    assert hidden == pytest.approx(quick, rel=0.01)
    assert added == pytest.approx(quick + 2e-3, rel=1e-9)
    slow = TimeLaw(deployment(host_step_s=20e-3, host_token_s=1e-4)).seconds(step)
    assert slow == pytest.approx(20e-3 + 32e-4, rel=0.01), "a host slower than the device sets the pace"


def test_without_graphs_a_small_step_waits_for_launches() -> None:
    step = composed(contexts=[100])
    graphs, eager = (TimeLaw(deployment(model="smollm2-135m", cuda_graphs=on)) for on in (True, False))
    launches_s = eager.replica.kernels * eager.deployment.launch_s
    assert eager.seconds(step) >= launches_s > graphs.seconds(step)
    assert without(eager, step, "host") < 0.2 * eager.seconds(step)
    prompt = composed([(8192, 0, True)])
    large = [TimeLaw(deployment(cuda_graphs=on)).seconds(prompt) for on in (True, False)]
    assert large[1] == pytest.approx(large[0], rel=0.01), "long kernels hide their launches"


def test_slow_resources_slow_what_uses_them() -> None:
    decode, prompt = composed(contexts=[2000] * 64), composed([(8192, 0, True)])
    base = TimeLaw(deployment())
    throttled = TimeLaw(deployment(compute_slow_ratio=2.0))
    assert throttled.seconds(decode) < 1.1 * base.seconds(decode)
    assert throttled.seconds(prompt) > 1.8 * base.seconds(prompt)
    slow_memory = TimeLaw(deployment(memory_slow_ratio=2.0))
    assert slow_memory.seconds(decode) > 1.7 * base.seconds(decode)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"devices": 3}, "1, 2, 4 or 8"),
        ({"gpu": "t4", "devices": 2, "compute_dtype": "fp16"}, "no bandwidth between devices"),
        ({"model": "qwen2.5-0.5b", "devices": 4}, "does not divide the 14 heads"),
        ({"gpu": "a100-sxm-80gb", "compute_dtype": "fp8"}, "no fp8 peak"),
        ({"host_step_s": -1e-3}, "negative"),
        ({"memory_slow_ratio": 0.5}, "below 1"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        deployment(**change)  # type: ignore[arg-type]


def test_the_pool_is_what_the_weights_leave() -> None:
    """80 GB * 0.9 less 16.06 GB of weights, in blocks of 16 tokens of 131,072 bytes."""
    weights = 2 * (fixed_linear_weights(deployment().model) + 2 * head_weights(deployment().model))
    assert kv_blocks_for(deployment(), reserve_bytes=0) == int((72e9 - weights) // (16 * 131_072))
    two = kv_blocks_for(deployment(devices=2), reserve_bytes=0)
    assert two == int((144e9 - weights) // (16 * 131_072)), "weights lie once in the replica, memory twice"
    assert kv_blocks_for(deployment(precision=Precision(kv_bits=8)), reserve_bytes=0) >= 2 * int(
        (72e9 - weights) // (16 * 131_072)
    )


def test_copies_of_the_kv_take_their_place() -> None:
    """Two KV heads on eight devices lie four times in the replica; a latent lies on every device."""
    assert deployment("h100-sxm", "qwen2.5-0.5b", 2).kv_copies == 1
    assert deployment("h200-sxm", "llama-3.1-70b", 8).kv_copies == 1
    assert deployment("h200-sxm", "deepseek-v3", 8, precision=FP8, compute_dtype="fp8").kv_copies == 8


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="leaves no room for KV"):
        kv_blocks_for(deployment("l4", "llama-3.1-70b"))


def test_accelerators_without_curves_use_the_generic_ones() -> None:
    assert RULES.gpus["l4"].efficiency is None
    replica: Replica = TimeLaw(deployment("l4", "qwen2.5-0.5b")).replica
    own = TimeLaw(deployment("h100-sxm", "qwen2.5-0.5b")).replica
    assert replica.products[0].kernel.curve != own.products[0].kernel.curve
