"""What is offered and refused where a simulated continuous-batching engine of known truth showed what helps."""

from __future__ import annotations

import pytest
from situations import (
    MIXED,
    OVERLOAD,
    SHORT_BUDGET,
    SHORT_BUDGET_SHARES,
    SHORT_POOL,
    SHORT_POOL_SHARES,
    STARVED,
    make_situation,
    offered,
    refused,
)

from phasewise.analyzer.conditions import Value
from phasewise.analyzer.matching import match
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()


def test_fewer_slots_are_no_answer_to_a_wait_for_blocks() -> None:
    matched = match(make_situation("kv.wait", SHORT_POOL, SHORT_POOL_SHARES), RULES, limit=20)
    assert "lower_max_num_seqs" not in offered(matched)
    assert {"raise_gpu_memory_utilization", "add_gpu_memory", "kv_cache_quantization", "add_replicas"} <= set(
        offered(matched)
    )
    said = refused(matched)["lower_max_num_seqs"]
    assert said["number"] == pytest.approx(0.034)
    assert "kv.wait, stays as it is" in str(said["reason"])


def test_fewer_slots_are_offered_where_preemption_holds_as_much_as_the_wait() -> None:
    shares = {"kv.wait": 0.29, "kv.preempt": 0.23, "decode.weights": 0.3, "prefill.compute": 0.18}
    signals = {**STARVED, "preemptions_per_request": 22 / 24}
    matched = match(make_situation("kv.wait", signals, shares), RULES)
    item = next(i for i in matched.recommend if i["technique"] == "lower_max_num_seqs")
    assert item["ceiling"] == {"direct": pytest.approx(0.23 + 0.23 * 22 / 24), "induced": 0.0}


def test_a_queue_for_the_step_budget_is_not_shortened_by_a_smaller_budget() -> None:
    matched = match(make_situation("queue.budget", SHORT_BUDGET, SHORT_BUDGET_SHARES), RULES, limit=20)
    assert {"raise_prefill_chunk", "add_replicas", "prefill_decode_disaggregation", "shorten_prompt"} <= set(
        offered(matched)
    )
    assert "admission_control" in offered(matched)
    assert not {"cap_prefill_per_step", "interleave_decode_with_prefill"} & set(offered(matched))
    wider = {**SHORT_BUDGET, "step_token_budget_tokens": 1024.0}
    ledger = refused(match(make_situation("queue.budget", wider, SHORT_BUDGET_SHARES), RULES))
    assert "queue for the budget get longer" in str(ledger["cap_prefill_per_step"]["reason"])
    # Prompts are alike: an order among them helps no one.
    assert "fair_or_priority_scheduling" not in offered(matched)
    mixed = {**SHORT_BUDGET, "long_prompt_ratio": 0.6}
    assert "fair_or_priority_scheduling" in offered(
        match(make_situation("queue.budget", mixed, SHORT_BUDGET_SHARES), RULES, limit=20)
    )


def test_two_engines_share_what_others_take_from_a_request_but_not_in_a_healthy_window() -> None:
    for cause, signals, shares in (
        ("kv.wait", SHORT_POOL, SHORT_POOL_SHARES),
        ("queue.budget", SHORT_BUDGET, SHORT_BUDGET_SHARES),
        ("interference", MIXED, {"interference": 0.5, "decode.weights": 0.5}),
    ):
        assert "add_replicas" in offered(match(make_situation(cause, signals, shares), RULES, limit=20)), cause
        healthy = match(make_situation(cause, {**signals, "status": "healthy"}, shares), RULES, limit=20)
        assert "add_replicas" not in offered(healthy), cause


def test_a_larger_batch_is_for_offline_work_and_promises_no_latency() -> None:
    shares = {"decode.weights": 0.9, "prefill.compute": 0.1}
    signals: dict[str, Value] = {"status": "healthy", "decode_batch_mean": 2.0}
    plain = match(make_situation("decode.weights", signals, shares), RULES, limit=20)
    assert "larger_decode_batch" not in offered(plain)
    offline = match(make_situation("decode.weights", {**signals, "offline_ratio": 0.8}, shares), RULES, limit=20)
    item = next(i for i in offline.recommend if i["technique"] == "larger_decode_batch")
    assert item["ceiling"] == {"direct": None, "induced": None}
    assert item["expected"] == {"low": None, "high": None, "source": "model estimate"}


def test_host_time_before_the_queue_is_not_shortened_by_faster_steps() -> None:
    """Two seconds in the frontend of a request that then runs for one."""
    shares = {"host": 0.64, "decode.weights": 0.34, "prefill.compute": 0.02}
    signals: dict[str, Value] = {
        "status": "slow", "frontend_ratio": 0.99, "decode_ratio": 0.35, "cuda_graphs": False, "async_scheduling": False,
    }  # fmt: skip
    matched = match(make_situation("host", signals, shares), RULES, limit=20)
    assert "scale_api_servers" in offered(matched)
    assert not {"cuda_graphs", "async_scheduling"} & set(offered(matched))
    assert "move_blocking_work_off_event_loop" in {item["technique"] for item in matched.withheld}
    between = {**signals, "frontend_ratio": 0.3}
    assert {"cuda_graphs", "async_scheduling"} <= set(
        offered(match(make_situation("host", between, shares), RULES, limit=20))
    )


@pytest.mark.parametrize("metric", ["itl", "tpot"])
def test_an_objective_on_gaps_between_tokens_forbids_what_lengthens_steps(metric: str) -> None:
    longer = {"raise_max_num_seqs", "larger_decode_batch", "raise_prefill_chunk", "batch_prefill_across_requests"}
    for cause, signals, shares in (
        ("queue.slots", OVERLOAD, {"queue.slots": 0.9, "decode.weights": 0.1}),
        ("queue.budget", {**SHORT_BUDGET, "prefill_requests_per_step_mean": 1.0}, SHORT_BUDGET_SHARES),
        ("decode.weights", {"decode_batch_mean": 2.0, "offline_ratio": 1.0}, {"decode.weights": 0.9}),
    ):
        free = match(make_situation(cause, signals, shares), RULES, limit=20)
        assert longer & set(offered(free)), cause
        bound = match(make_situation(cause, {**signals, "objective_metric": metric}, shares), RULES, limit=20)
        assert not longer & set(offered(bound)), cause


def test_an_objective_on_the_first_token_allows_a_smaller_budget_only_against_interference() -> None:
    ttft: dict[str, Value] = {**MIXED, "objective_metric": "ttft"}
    assert "cap_prefill_per_step" in offered(
        match(make_situation("interference", ttft, {"interference": 0.5, "decode.weights": 0.5}), RULES)
    )
    shares = {"prefill.compute": 0.5, "interference": 0.4, "decode.weights": 0.1}
    own = match(make_situation("prefill.compute", ttft, shares), RULES, limit=20)
    assert "cap_prefill_per_step" not in offered(own)
    assert "ttft" in str(refused(own)["cap_prefill_per_step"]["reason"])


@pytest.mark.parametrize("name", ["cache_aware_routing", "least_loaded_routing"])
@pytest.mark.parametrize("replicas", [None, 1.0])
def test_routing_needs_two_replicas_that_are_known(name: str, replicas: float | None) -> None:
    signals: dict[str, Value] = {
        "status": "slow", "replicas_count": replicas, "replica_imbalance_ratio": 2.0, "prefix_missed_ratio": 0.6,
    }  # fmt: skip
    for cause in ("queue.slots", "queue.upstream", "prefill.compute", "kv.evicted"):
        assert name not in offered(match(make_situation(cause, signals, {cause: 0.9}), RULES, limit=30)), cause
