"""Waiting effects and their causes in queues whose waits are known exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from truth_laws import PartsLaw, spec

from phasewise.instrumented_engine.config import EngineConfig, PoolShare
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.truth.parts import FIRST, TOKENS
from phasewise.instrumented_engine.truth.run import run
from phasewise.instrumented_engine.truth.truth import Truth, truth_from
from phasewise.instrumented_engine.truth.waiting import waits_of

STEP_S = 0.01
CONSTANT = PartsLaw(host_s=STEP_S)  # a batch costs what one sequence costs
PER_TOKEN = PartsLaw(token_s=STEP_S)  # a batch costs what its sequences cost one after another


def config(**settings: object) -> EngineConfig:
    defaults: dict[str, object] = {"kv_blocks": 100_000, "step_token_budget": 100_000, "max_model_tokens": 10_000}
    return EngineConfig(**(defaults | settings))  # type: ignore[arg-type]


def effect(truth: Truth, cause: str, part: int = FIRST) -> list[float]:
    return truth.effects[cause][part].tolist() if cause in truth.effects else [0.0] * len(truth.run.served)


def test_deterministic_queue_with_one_seat_waits_for_its_seat() -> None:
    """D/D/1 at a utilization of 2: the k-th request waits k * (service - gap), all of it for the seat."""
    service_s, gap_s = 10 * STEP_S, 5 * STEP_S
    specs = tuple(spec(k, k * gap_s, prompt=1, output=10) for k in range(12))
    truth = truth_from(config(max_num_seqs=1), CONSTANT, specs, seed=0)
    expected = [k * (service_s - gap_s) for k in range(12)]
    assert waits_of(truth.run).waited_s[FIRST].tolist() == pytest.approx(expected, abs=1e-6)
    assert effect(truth, "queue.slots") == pytest.approx(expected, abs=1e-6)
    assert "queue.capacity" not in truth.effects
    # The third wait is the first that is longer than the request's own steps.
    assert truth.rows()["cause"].to_list() == ["host"] * 2 + [truth.rows()["cause"][2]] + ["queue.slots"] * 9
    window = truth.windows["ttft"]
    assert (window.cls, window.cause, window.dominant) == ("queueing", "queue.slots", True)


def test_a_seat_that_serves_no_more_is_capacity() -> None:
    """The same queue on a machine whose step takes as long as its sequences together: more seats serve nothing more."""
    specs = tuple(spec(k, k * 5 * STEP_S, prompt=1, output=10) for k in range(12))
    truth = truth_from(config(max_num_seqs=1), PER_TOKEN, specs, seed=0)
    assert not truth.waiting.slots_raise_throughput
    # Lifted, nobody waits for more than the end of the running step (at most 12 tokens).
    waited = waits_of(truth.run).waited_s[FIRST]
    assert (np.array(effect(truth, "queue.capacity")) >= waited - 12 * STEP_S - 1e-6).all()
    assert truth.windows["ttft"].cause == "queue.capacity"


@pytest.mark.parametrize(
    ("law", "cause"),
    [(CONSTANT, "queue.slots"), pytest.param(PER_TOKEN, "queue.capacity", marks=pytest.mark.slow)],
)
def test_poisson_queue_with_exponential_service_waits_as_long_as_theory_says(law: PartsLaw, cause: str) -> None:
    """M/M/1: mean wait rho / (1 - rho) * s within the 99 % interval of independent runs.

    Service is a whole number of steps (geometric), so the mean is that of M/G/1 (Pollaczek and Khinchine), which is within
    1/tokens of M/M/1.
    """
    tokens, load, runs, count = 30, 0.6, 12, 800
    service_s = tokens * STEP_S
    means = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        at = np.cumsum(rng.exponential(service_s / load, count))
        outputs = rng.geometric(1 / tokens, count)
        specs = tuple(spec(k, float(at[k]), prompt=1, output=int(outputs[k])) for k in range(count))
        means.append(float(waits_of(run(config(max_num_seqs=1), law, specs, seed=0)).waited_s[FIRST].mean()))
        if seed == 0:
            assert truth_from(config(max_num_seqs=1), law, specs, seed=0).windows["ttft"].cause == cause
    p = 1 / tokens
    second_moment = (2 - p) / p**2 * STEP_S**2
    expected = load / service_s * second_moment / (2 * (1 - load))
    assert expected == pytest.approx(load / (1 - load) * service_s, rel=1.1 / tokens)
    error = 3.106 * float(np.std(means, ddof=1)) / math.sqrt(runs)  # t at 99.5 % with 11 degrees of freedom
    assert abs(float(np.mean(means)) - expected) < error
    assert error < 0.25 * expected  # else the interval would prove nothing


def test_a_pool_of_known_size_makes_the_kth_wait_for_k_over_residents() -> None:
    """Requests of 4 blocks in a pool of 12: three are resident, the k-th begins after k // 3 services."""
    count, output = 11, 5
    specs = tuple(spec(k, 0, prompt=16 * 4 - output, output=output) for k in range(count))
    truth = truth_from(config(kv_blocks=12, prefix_sharing=False), CONSTANT, specs, seed=0)
    expected = [k // 3 * output * STEP_S for k in range(count)]
    assert effect(truth, "kv.wait") == pytest.approx(expected, abs=1e-6)
    assert int(truth.run.steps["kv_blocks_used"].max()) == 12
    window = truth.windows["ttft"]
    assert (window.cls, window.cause) == ("kv", "kv.wait")


def test_a_queue_that_is_really_memory_is_not_a_queue_for_seats() -> None:
    """Seats for three, memory for two: seats were never full, so lifting them cannot help."""
    specs = tuple(spec(k, 0, prompt=59, output=5) for k in range(9))
    truth = truth_from(config(kv_blocks=8, max_num_seqs=3, prefix_sharing=False), CONSTANT, specs, seed=0)
    assert truth.windows["ttft"].cls == "kv"
    assert max(effect(truth, "queue.slots")) == 0 and max(effect(truth, "queue.capacity")) == 0


def test_what_is_lost_to_preemption_and_computed_again_is_preemption() -> None:
    """Both grow beyond the pool: one is put back, waits, and computes its tokens again."""
    specs = tuple(spec(k, 0, prompt=30, output=100) for k in range(2))
    truth = truth_from(config(kv_blocks=10, prefix_sharing=False), CONSTANT, specs, seed=0)
    lost = [one.index for one in truth.run.served if one.preemptions]
    assert lost == [1]
    again = effect(truth, "kv.preempt", TOKENS)
    assert again[0] == 0
    assert again[1] == pytest.approx(STEP_S * truth.run.served[1].preemptions)  # one step computes all of it again
    assert effect(truth, "kv.wait", TOKENS)[1] > 10 * STEP_S
    # All it lost: it ended that much later than in a pool without end, where both end after 100 steps.
    ended = [((one.finished_ns or 0) - one.spec.arrival_ns) / 1e9 for one in truth.run.served]
    lost_s = effect(truth, "kv.wait", TOKENS)[1] + again[1]
    assert ended[1] - 100 * STEP_S == pytest.approx(lost_s, abs=STEP_S + 1e-6)


def test_a_long_prompt_computed_again_after_a_short_wait_is_preemption() -> None:
    """Two prompts of 62 tokens in a pool of 9 blocks: in step 3 both need their fifth block and one is left. The second is put back,
    waits for the three steps the first still needs, and computes its 62 + 3 tokens again at 10 ms each."""
    specs = (spec(0, 0, prompt=62, output=6), spec(1, 0, prompt=62, output=8))
    truth = truth_from(config(kv_blocks=9, prefix_sharing=False), PER_TOKEN, specs, seed=0)
    assert truth.run.preempted == ((3, 1),)
    assert effect(truth, "kv.wait", TOKENS) == pytest.approx([0, 3 * STEP_S], abs=1e-6)
    assert effect(truth, "kv.preempt", TOKENS) == pytest.approx([0, 65 * STEP_S], abs=1e-6)
    window = truth.windows["tpot"]
    assert (window.cls, window.cause, window.dominant) == ("kv", "kv.preempt", True)


def test_a_limit_that_hides_behind_the_only_one_reached_is_found() -> None:
    """One seat for prompts of nearly the whole pool: seats are all that was ever short, but with more of them memory would be."""
    specs = tuple(spec(k, 0, prompt=59, output=5) for k in range(4))
    truth = truth_from(config(kv_blocks=7, max_num_seqs=1, prefix_sharing=False), CONSTANT, specs, seed=0)
    assert set(truth.waiting.reruns) == {"slots", "all"}
    assert effect(truth, "queue.capacity") == pytest.approx([k * 5 * STEP_S for k in range(4)], abs=1e-6)
    assert "queue.slots" not in truth.effects  # a second one would serve nothing more


def test_a_pool_that_is_full_while_seats_of_another_idle_is_policy() -> None:
    """Two seats, one kept for a class that never comes: the others take turns. Dropping the pools halves the k-th wait, more seats
    beside the kept ones change nothing."""
    pools = (PoolShare("here", ("here",), 0.5, 0.5, 0.5), PoolShare("away", ("away",), 0.5, 0.5, 0.5))
    specs = tuple(replace(spec(k, 0, prompt=1, output=10), request_class="here") for k in range(6))
    truth = truth_from(config(max_num_seqs=2, pools=pools), CONSTANT, specs, seed=0)
    service_s = 10 * STEP_S
    assert waits_of(truth.run).waited_s[FIRST].tolist() == pytest.approx([k * service_s for k in range(6)], abs=1e-6)
    single = [(k - k // 2) * service_s for k in range(6)]
    hidden = [k // 2 * service_s for k in range(6)]  # all that is left is a matter of both
    assert effect(truth, "queue.policy") == pytest.approx(
        [a + b for a, b in zip(single, hidden, strict=True)], abs=1e-6
    )
    assert truth.windows["ttft"].cause == "queue.policy"


def test_lifted_memory_leaves_room_for_all_at_once() -> None:
    """Ten prompts of 10,000 tokens: the scheduler keeps 1 % of any pool free for those who run, a large one has to grow by that too."""
    specs = tuple(spec(k, 0, prompt=9_990, output=5) for k in range(10))
    truth = truth_from(config(kv_blocks=700, prefix_sharing=False, max_model_tokens=10_000), CONSTANT, specs, seed=0)
    assert not waits_of(truth.waiting.reruns["kv"]).waited_s.any()
    assert effect(truth, "kv.wait") == pytest.approx([k * 5 * STEP_S for k in range(10)], abs=1e-6)


def test_empty_seats_of_a_static_batch_are_known_exactly() -> None:
    """Two seats, answers of 2 and 10 tokens: a third request could have had the seat after 2 steps and gets it after 10."""
    specs = (spec(0, 0, 1, 2), spec(1, 0, 1, 10), spec(2, 0, 1, 4))
    truth = truth_from(config(batching="static", max_num_seqs=2), CONSTANT, specs, seed=0)
    waited = waits_of(truth.run).waited_s[FIRST]
    assert waited.tolist() == pytest.approx([0, 0, 10 * STEP_S], abs=1e-6)
    assert effect(truth, "queue.empty_slots") == pytest.approx([0, 0, 8 * STEP_S], abs=1e-6)
    # The two steps that are left are a matter of seats.
    seats = [a + b for a, b in zip(effect(truth, "queue.slots"), effect(truth, "queue.capacity"), strict=True)]
    assert seats == pytest.approx([0, 0, 2 * STEP_S], abs=1e-6)
    assert truth.rows()["cause"].to_list()[2] == "queue.empty_slots"


def test_a_batching_window_is_waited_out_and_counted_whole() -> None:
    truth = truth_from(config(batching_window_s=0.2, max_num_seqs=8), CONSTANT, (spec(0, 0, 1, 3),), seed=0)
    assert effect(truth, "queue.window") == pytest.approx([0.2], abs=1e-6)
    assert truth.windows["ttft"].cause == "queue.window"


def test_the_budget_makes_prompts_wait_their_turn() -> None:
    """Prompts of a whole budget each: the k-th begins in step k, and lifted at once."""
    specs = tuple(spec(k, 0, prompt=100, output=1) for k in range(10))
    truth = truth_from(config(step_token_budget=100), CONSTANT, specs, seed=0)
    assert effect(truth, "queue.budget") == pytest.approx([k * STEP_S for k in range(10)], abs=1e-6)
    assert truth.windows["ttft"].cause == "queue.budget"


def test_an_order_that_lets_others_pass_is_policy() -> None:
    """One seat; the request of low priority came first of those that wait and is served last."""
    specs = (
        spec(0, 0, 1, 10),
        spec(1, 0.01, 1, 10, priority=1),
        spec(2, 0.02, 1, 10),
        spec(3, 0.03, 1, 10),
    )
    truth = truth_from(config(max_num_seqs=1, order="priority"), CONSTANT, specs, seed=0)
    saved = effect(truth, "queue.policy")
    assert saved[1] == pytest.approx(20 * STEP_S, abs=1e-6)
    assert saved[2] == pytest.approx(-10 * STEP_S, abs=1e-6)  # what it had gained by passing
    assert saved[0] == 0


def test_two_limits_that_hide_one_another_are_found_together() -> None:
    """Seats for one and tokens for one prompt a step: lifting the tokens alone changes nothing at all, both together all."""
    specs = tuple(spec(k, 0, prompt=100, output=1) for k in range(10))
    truth = truth_from(config(step_token_budget=100, max_num_seqs=1), CONSTANT, specs, seed=0)
    queued = np.sum([effect(truth, cause) for cause in truth.effects if cause.startswith("queue.")], axis=0)
    assert queued.tolist() == pytest.approx([k * STEP_S for k in range(10)], abs=1e-6)
    assert truth.windows["ttft"].cls == "queueing"


def test_a_request_alone_waits_for_nothing() -> None:
    tight = config(max_num_seqs=1, kv_blocks=20, step_token_budget=64, order="priority")
    truth = truth_from(tight, CONSTANT, (spec(0, 0, 100, 20),), seed=0)
    assert not any(cause.startswith(("queue.", "kv.")) for cause in truth.effects)


def test_context_before_the_queue_is_no_wait() -> None:
    specs: tuple[RequestSpec, ...] = (spec(0, 0, 10, 5, context_s=1.0), spec(1, 0.1, 10, 5, context_s=1.0))
    truth = truth_from(config(), CONSTANT, specs, seed=0)
    window = truth.windows["ttft"]
    assert (window.cls, window.cause, window.dominant) == ("context", "context", True)
    assert truth.levers["context"].ttft_mean_s == pytest.approx(truth.levers["factual"].ttft_mean_s - 1.0, abs=0.02)
