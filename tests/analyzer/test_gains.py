"""What a change can take off the time, and how waiting drains."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.analyzer.gains import (
    DIRECT,
    INDUCED,
    GainInputs,
    Value,
    acted_share,
    backlog_relief_ratio,
    expected_tokens_per_round,
    kv_bytes_saved,
    load_split,
    pool_growth,
    pool_relief_ratio,
    preemption_avoided,
    prefix_reuse,
    queue_drain,
    speculation_saved,
    speculation_speedup,
    weight_bytes_saved,
)
from phasewise.analyzer.waiting import (
    kingman_wait_s,
    mmc_wait_s,
    sojourn_removed_ratio,
    wait_removed_ratio,
    waiting_probability,
)
from phasewise.rules.schema import DIRECT_GAINS, INDUCED_GAINS

ratios = st.floats(0.0, 1.0)


def make_inputs(
    shares: dict[str, float], acts_on: tuple[str, ...], signals: dict[str, Value] | None = None, **parameters: float
) -> GainInputs:
    return GainInputs(shares, signals or {}, acts_on, parameters)


def test_rules_may_name_exactly_the_functions_there_are() -> None:
    assert set(DIRECT_GAINS) == set(DIRECT)
    assert set(INDUCED_GAINS) == set(INDUCED)


def test_four_drafts_accepted_at_80_percent_yield_3_3616_tokens() -> None:
    assert expected_tokens_per_round(0.8, 4) == pytest.approx(3.3616, abs=1e-9)
    assert expected_tokens_per_round(1.0, 4) == 5
    assert expected_tokens_per_round(0.0, 4) == 1


def test_drafting_costs() -> None:
    assert speculation_speedup(0.8, 4, 0.0) == pytest.approx(3.3616)
    assert speculation_speedup(0.2, 4, 0.2) < 1


def test_speculation_uses_the_measured_acceptance_and_never_promises_a_loss() -> None:
    shares = {"decode.weights": 0.5}

    def saved(signals: dict[str, Value] | None = None) -> float:
        acts = ("decode.weights",)
        return speculation_saved(make_inputs(shares, acts, signals, acceptance=0.8, draft_tokens=4, draft_cost_ratio=0))

    assert saved() == pytest.approx(0.5 * (1 - 1 / 3.3616))
    assert saved({"spec_acceptance_ratio": 0.0}) == 0


def test_weight_bits_act_on_weight_bytes_only() -> None:
    shares = {"decode.weights": 0.6, "decode.kv": 0.3}
    assert weight_bytes_saved(
        make_inputs(shares, ("decode.weights",), {"weight_bits": 16.0}, to_bits=4)
    ) == pytest.approx(0.45)
    assert weight_bytes_saved(make_inputs(shares, ("decode.weights",), {"weight_bits": 4.0}, to_bits=4)) == 0


def test_kv_bits_act_on_reads_and_on_room() -> None:
    acts = ("kv.wait", "decode.kv")
    assert kv_bytes_saved(make_inputs({"decode.kv": 0.4}, acts, to_bits=8)) == pytest.approx(0.2)
    short: dict[str, Value] = {"kv_pool_tokens": 1000.0, "kv_need_tokens": 5000.0}
    assert kv_bytes_saved(make_inputs({"kv.wait": 0.8}, acts, short, to_bits=8)) == pytest.approx(0.8 * 0.5)


def test_a_pool_large_enough_ends_the_shortage() -> None:
    assert pool_relief_ratio(1000, 1500, 2) == 1
    assert pool_relief_ratio(1000, 3000, 2) == 0.5
    assert pool_relief_ratio(None, 3000, 2) == 1
    assert pool_relief_ratio(1000, 900, 2) == 1
    assert pool_growth(
        make_inputs({"kv.preempt": 0.4, "kv.wait": 0.2}, ("kv.preempt", "kv.wait"), factor=1.5)
    ) == pytest.approx(0.6)


@pytest.mark.parametrize(("growth", "ended"), [(1.5, 1 / 3), (2.0, 0.5), (4.0, 0.75)])
def test_a_backlog_far_above_the_pool_drains_as_admissions_speed_up(growth: float, ended: float) -> None:
    """A pool of 6,000 tokens and 117,600 needed: twice the pool admits twice as fast, it does not end a twentieth."""
    assert pool_relief_ratio(6000, 117_600, growth) == pytest.approx(ended)


@given(st.floats(1, 1e6), st.floats(1, 1e7), st.floats(1.01, 8), st.floats(1.01, 8))
def test_a_larger_pool_never_ends_less(pool: float, need: float, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert 0 <= pool_relief_ratio(pool, need, low) <= pool_relief_ratio(pool, need, high) <= 1


def test_a_burst_drains_by_more_than_departures_speed_up() -> None:
    """Of 300 requests 189 wait at the peak: departures twice as fast end 0.5 / 0.63 of the waiting."""
    assert backlog_relief_ratio(0.5, 189 / 300) == pytest.approx(0.794, abs=1e-3)
    assert backlog_relief_ratio(0.5, 1.0) == 0.5
    assert backlog_relief_ratio(0.5, 0.1) == 1
    assert backlog_relief_ratio(0.5, None) == 1
    assert backlog_relief_ratio(0.0, None) == 0


# Seconds a continuous-batching simulation took (mean of the slowest tenth) before and after the change: the ceiling must
# lie above what happened, and where a change helped it must not be dismissed. 300 requests, one burst.
STARVED = {"kv.wait": 0.887, "kv.preempt": 0.034, "decode.weights": 0.047, "decode.kv": 0.029}
STARVED_SIGNALS: dict[str, Value] = {
    "kv_pool_tokens": 6000.0, "kv_need_tokens": 117_600.0, "waiting_max": 189.0, "requests_count": 300.0,
    "preemptions_per_request": 1.4,
}  # fmt: skip
KV = ("kv.wait", "kv.preempt")


@pytest.mark.parametrize(("factor", "before_s", "after_s"), [(1.5, 122.6, 69.8), (2.0, 122.6, 44.8)])
def test_the_ceiling_of_a_larger_pool_lies_above_what_a_simulation_gained(
    factor: float, before_s: float, after_s: float
) -> None:
    ceiling = pool_growth(make_inputs(STARVED, KV, STARVED_SIGNALS, factor=factor))
    gained = 1 - after_s / before_s
    assert gained <= ceiling <= gained + 0.2


def test_half_the_load_is_worth_most_of_the_wait() -> None:
    """Simulated: 122.6 s to 30.5 s with half the requests; what others do falls with their number."""
    assert load_split(make_inputs(STARVED, KV, STARVED_SIGNALS, factor=2)) == pytest.approx(
        0.887 * 0.5 / 0.63 + 0.034 / 2
    )
    assert load_split(make_inputs({"interference": 0.4}, ("interference",), factor=2)) == pytest.approx(0.2)
    assert load_split(make_inputs({"queue.budget": 0.8}, ("queue.budget",), factor=2)) == pytest.approx(0.8)


def test_fewer_slots_spare_preemption_and_no_other_wait() -> None:
    """Simulated: 12 instead of 64 slots took the slowest tenth from 122.6 s to 154.5 s, 8 to 243.6 s."""
    assert preemption_avoided(make_inputs(STARVED, ("kv.preempt",), STARVED_SIGNALS)) == pytest.approx(0.068)
    assert preemption_avoided(make_inputs({"kv.wait": 0.9}, ("kv.preempt",))) == 0
    often: dict[str, Value] = {"preemptions_per_request": 0.9}
    captured = make_inputs({"kv.wait": 0.29, "kv.preempt": 0.23}, ("kv.preempt",), often)
    assert preemption_avoided(captured) == pytest.approx(0.23 * 1.9)


def test_a_queue_moves_less_than_work_where_the_file_says_so() -> None:
    inputs = make_inputs(
        {"queue.budget": 0.6, "prefill.compute": 0.2},
        ("queue.budget", "prefill.compute"),
        fraction=0.5,
        waiting_fraction=0.25,
    )
    assert acted_share(inputs) == pytest.approx(0.25)


def test_reuse_is_bounded_by_what_was_missed() -> None:
    missed: dict[str, Value] = {"prefix_missed_ratio": 0.25}
    assert prefix_reuse(make_inputs({"prefill.compute": 0.8}, ("prefill.compute",), missed)) == pytest.approx(0.2)


# --- waiting ------------------------------------------------------------------------------------------------------------


def test_at_95_percent_utilisation_a_fifth_less_service_removes_83_percent_of_the_time() -> None:
    assert sojourn_removed_ratio(0.95, 0.20) == pytest.approx(0.833, abs=1e-3)


def test_kingman_is_exact_for_poisson_arrivals_and_exponential_service() -> None:
    assert kingman_wait_s(0.5, 2.0, 1.0, 1.0) == 2.0
    assert kingman_wait_s(1.0, 2.0, 1.0, 1.0) == math.inf


def test_one_server_of_many_is_the_single_server() -> None:
    assert mmc_wait_s(1, 0.4, 2.0) == pytest.approx(kingman_wait_s(0.8, 2.0, 1.0, 1.0))
    assert mmc_wait_s(2, 1.0, 2.0) == math.inf


def test_erlang_c_against_a_published_value() -> None:
    """Two servers, load 1 Erlang: a third of arrivals waits."""
    assert waiting_probability(2, 1.0) == pytest.approx(1 / 3)
    assert waiting_probability(200, 100.0) < 1e-6


@given(st.floats(0.01, 0.98), ratios, ratios)
def test_more_service_saved_never_removes_less_waiting(utilization: float, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert 0 <= wait_removed_ratio(utilization, low) <= wait_removed_ratio(utilization, high) + 1e-12 <= 1 + 1e-9


@given(st.floats(0.05, 0.98), st.floats(0.01, 0.9))
def test_waiting_falls_by_more_than_service(utilization: float, saved: float) -> None:
    assert wait_removed_ratio(utilization, saved) >= saved - 1e-9


def test_a_saturated_queue_drains_as_departures_speed_up() -> None:
    assert wait_removed_ratio(1.0, 0.3) == pytest.approx(0.3)
    assert wait_removed_ratio(1.0, 0.0, servers_factor=2) == pytest.approx(0.5)


def test_shorter_service_drains_the_queue_it_feeds() -> None:
    shares = {"queue.capacity": 0.9, "decode.weights": 0.1}
    inputs = make_inputs(shares, ("decode.weights",), {"utilization_ratio": 0.95})
    drained = queue_drain(inputs, 0.02)
    assert drained is not None
    assert 0.7 < drained < 0.9


def test_an_unknown_utilisation_is_no_number() -> None:
    assert queue_drain(make_inputs({"queue.slots": 0.9, "decode.kv": 0.1}, ("decode.kv",)), 0.05) is None


def test_nothing_waits_nothing_drains() -> None:
    assert queue_drain(make_inputs({"decode.kv": 1.0}, ("decode.kv",)), 0.5) == 0
