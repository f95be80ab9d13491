"""What a step costs, and which resource that is: the host, the weights, the KV, the links, or a start that is still cold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from step_contexts import RULES, Steps, booked, stepped_context, stepped_request, warm

from phasewise.rules.counting import Precision, kv_bytes_per_token, weight_bytes_stored

H100_8B = {"accelerator": "h100-sxm", "model": "llama-3.1-8b"}


# --- first steps and outliers ---------------------------------------------------------------------------------------


def test_first_steps_far_above_later_ones_are_the_cold_start() -> None:
    steps = Steps()
    first = steps.ran(2.0, prefill=100)
    for extra in (1.0, 0.5):
        steps.ran(0.010 + extra, sequences=1, context=500)
    warm(steps, 60)
    for _ in range(20):
        steps.ran(0.020, prefill=100)
        last = warm(steps, 5)
    row = stepped_request(steps, [(1, first, first), (2, first + 1, 62)], input_tokens=100)
    assert last > 62
    found = booked(stepped_context([row], steps.rows), row)
    assert found["cold_start"] == pytest.approx(1.98 + 1.5, rel=0.01)
    assert "unexplained" not in found


def test_a_start_that_fades_over_most_of_what_is_seen_is_cold_all_along() -> None:
    """The first of 120 steps takes 100 ms more, falling to nothing at the 80th; loads change meanwhile."""
    steps = Steps()
    begun = steps.ran(0.110, prefill=10)
    extra = []
    for number in range(1, 120):
        sequences = 1 + number % 7
        extra.append(0.100 * max(0.0, 1 - number / 80))
        last = steps.ran(0.010 + sequences * 1e-4 + extra[-1], sequences=sequences, context=500 * sequences)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    assert booked(stepped_context([row], steps.rows), row)["cold_start"] == pytest.approx(sum(extra) + 0.1, rel=0.1)


def test_a_stall_long_after_the_start_is_the_host_s() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    warm(steps, 300)
    steps.ran(1.0, sequences=1, context=500)
    last = warm(steps, 300)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    found = booked(stepped_context([row], steps.rows), row)
    assert found["host"] == pytest.approx(0.990, rel=0.01)
    assert "cold_start" not in found and "unexplained" not in found


def test_where_the_start_is_not_in_sight_no_step_is_the_engine_s_first() -> None:
    steps = Steps()
    warm(steps, 10)
    begun = steps.ran(2.0, prefill=100)
    last = warm(steps, 60)
    for _ in range(20):
        steps.ran(0.020, prefill=100)
        warm(steps, 5)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100)
    found = booked(stepped_context([row], steps.rows[5:]), row)
    assert "cold_start" not in found
    assert found["host"] == pytest.approx(1.98, rel=0.01)


# --- resources of a step --------------------------------------------------------------------------------------------


def decoded_at(
    duration_s: Callable[[int, int], float], settings: Mapping[str, object] | None = None
) -> dict[str, float]:
    """Shares of decode by cause of an engine whose step takes duration_s(sequences, context)."""

    steps = Steps()
    begun = steps.ran(0.020, prefill=10)
    for number in range(400):
        sequences = 4 + (number * 7) % 29
        context = sequences * (300 + (number * 131) % 3700)
        last = steps.ran(duration_s(sequences, context), sequences=sequences, context=context)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10, model="llama-3.1-8b")
    found = booked(stepped_context([row], steps.rows, settings), row)
    total = sum(found.values())
    return {cause: seconds / total for cause, seconds in found.items()}


WEIGHTS_S = (weight_bytes_stored(RULES.models["llama-3.1-8b"], Precision()) - 2 * 4096 * 128256) / 3.35e12
KV_TOKEN_S = kv_bytes_per_token(RULES.models["llama-3.1-8b"]) / 3.35e12


def test_a_step_as_long_whatever_it_holds_is_the_host_s() -> None:
    shares = decoded_at(lambda sequences, context: 0.030, H100_8B)
    assert shares["host"] > 0.9
    assert shares.get("decode.kv", 0.0) < 0.02


def test_a_constant_near_what_the_weights_cost_is_reading_them() -> None:
    """But for starting the kernels, a tenth of such a step by their curves, which no byte makes shorter."""
    shares = decoded_at(lambda sequences, context: WEIGHTS_S / 0.8 + context * KV_TOKEN_S / 0.8, H100_8B)
    mean = WEIGHTS_S / (WEIGHTS_S + 18 * 2150 * KV_TOKEN_S)
    assert shares["decode.kv"] == pytest.approx(1 - mean, abs=0.05)
    assert shares.get("host", 0.0) < 0.11
    assert shares["decode.weights"] == pytest.approx(mean - shares["host"], abs=0.05)


def test_a_constant_far_above_the_weights_is_weights_and_host() -> None:
    shares = decoded_at(lambda sequences, context: WEIGHTS_S / 0.8 + 0.012 + context * KV_TOKEN_S / 0.8, H100_8B)
    total = WEIGHTS_S / 0.8 + 0.012 + 18 * 2150 * KV_TOKEN_S / 0.8
    assert shares["host"] == pytest.approx(0.012 / total, abs=0.05)
    assert shares["decode.weights"] == pytest.approx(WEIGHTS_S / 0.8 / total, abs=0.05)


def test_half_the_bandwidth_makes_reading_longer_not_the_host() -> None:
    shares = decoded_at(lambda sequences, context: 2 * (WEIGHTS_S + context * KV_TOKEN_S) / 0.8, H100_8B)
    assert shares.get("host", 0.0) < 0.15
    assert shares["decode.weights"] > 0.5


def test_an_unnamed_accelerator_is_known_by_what_its_context_costs() -> None:
    """The bandwidth it reaches on KV bytes tells what the weights cost; what is left is the host's."""
    shares = decoded_at(lambda sequences, context: WEIGHTS_S / 0.8 + 0.012 + context * KV_TOKEN_S / 0.8)
    total = WEIGHTS_S / 0.8 + 0.012 + 18 * 2150 * KV_TOKEN_S / 0.8
    assert shares["host"] == pytest.approx(0.012 / total, abs=0.12)


def test_an_unnamed_accelerator_that_no_context_slows_is_not_reading() -> None:
    shares = decoded_at(lambda sequences, context: 0.030)
    assert shares["host"] > 0.9


def test_on_several_devices_what_tokens_cost_beyond_their_flops_is_communication() -> None:
    slow_link = {**H100_8B, "tensor_parallel": 4}
    shares = decoded_at(
        lambda sequences, context: WEIGHTS_S / 3.2 + 0.002 + sequences * 2e-4 + context * KV_TOKEN_S / 3.2, slow_link
    )
    assert shares["communication.node"] > 0.5
    assert shares["communication.node"] > 3 * shares.get("host", 0.0)
