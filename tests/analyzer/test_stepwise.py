"""Steps of known composition give known seconds: each second of a request goes to what its steps were made of."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from builders import START_UNIX_NS, make_request
from step_contexts import RULES, Steps, booked, stepped_context, stepped_request, warm

from phasewise.analyzer.attribution import attribute_instance
from phasewise.collector.context import Context
from phasewise.collector.records import Request
from phasewise.rules.vocabulary import CAUSES, cause_column


def column(context: Context, request: Request, name: str) -> object:
    return attribute_instance(context, RULES).filter(pl.col("request_key") == request.request_key)[name][0]


# --- own steps ------------------------------------------------------------------------------------------------------


def test_a_request_alone_meets_no_one() -> None:
    steps = Steps()
    first = steps.ran(0.100, prefill=2000)
    last = warm(steps, 50)
    alone = stepped_request(steps, [(1, first, first), (2, first + 1, last)], input_tokens=2000)
    found = booked(stepped_context([alone], steps.rows), alone)
    assert "interference" not in found and "unexplained" not in found
    assert not any(cause.startswith(("queue.", "kv.")) for cause in found)


def test_a_long_prompt_beside_a_decode_costs_it_what_its_step_is_longer() -> None:
    steps = Steps()
    begun = steps.ran(0.012, prefill=100)
    warm(steps, 40)
    mixed = steps.ran(0.060, prefill=1000, sequences=1, context=500)
    last = warm(steps, 40, sequences=2, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100)
    long = stepped_request(steps, [(1, mixed, mixed), (2, mixed + 1, last)], input_tokens=1000)
    context = stepped_context([held, long], steps.rows)
    assert booked(context, held)["interference"] == pytest.approx(0.050, rel=0.01)
    assert "interference" not in booked(context, long)
    # A step bound by FLOPs hides the bytes of its weights: hardly more than its constant part can go elsewhere.
    assert 0.050 <= booked(context, long)["prefill.compute"] <= 0.060


def test_two_prompts_in_one_step_share_it_by_what_each_adds() -> None:
    """Steps of 10 ms and 50 us a prompt token: 600 + 200 tokens take 50 ms; without the other's the first would take 40 ms."""
    steps = Steps()
    for tokens in (100, 200, 400, 600, 800, 1000, 1200) * 4:
        steps.ran(0.010 + tokens * 50e-6, prefill=tokens)
        steps.ran(0.010, sequences=1, context=500)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800)
    last = warm(steps, 20, sequences=2, context=800)
    one = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=600)
    two = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=200)
    context = stepped_context([one, two], steps.rows)
    assert booked(context, one)["interference"] == pytest.approx(0.010, rel=0.05)
    assert booked(context, two)["interference"] == pytest.approx(0.030, rel=0.05)


def test_steps_of_others_between_own_chunks_are_interference() -> None:
    steps = Steps()
    warm(steps, 20)
    first = steps.ran(0.050, prefill=512)
    for _ in range(3):
        steps.ran(0.050, prefill=512)
    second = steps.ran(0.050, prefill=512)
    last = warm(steps, 20)
    cut = stepped_request(steps, [(1, first, first), (1, second, second), (2, second + 1, last)], input_tokens=1024)
    context = stepped_context([cut], steps.rows)
    assert booked(context, cut)["interference"] == pytest.approx(0.150, rel=1e-6)


def test_time_between_steps_is_the_scheduler_s_as_far_as_it_says() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    for _ in range(40):
        steps.pause(0.003)
        last = steps.ran(0.010, sequences=1, context=500, schedule_s=0.002)
    one = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    found = booked(stepped_context([one], steps.rows), one)
    assert found["host.scheduler"] == pytest.approx(40 * 0.002)
    assert found["host"] == pytest.approx(40 * 0.001, rel=0.05)


def test_what_follows_the_last_step_is_delivery() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 20)
    one = stepped_request(
        steps, [(1, begun, begun), (2, begun + 1, last)], finished_s=steps.now_s + 0.3, input_tokens=10
    )
    assert booked(stepped_context([one], steps.rows), one)["host"] == pytest.approx(0.3, rel=1e-3)


# --- preemption and tools -------------------------------------------------------------------------------------------


def preempted(kv_used: int) -> tuple[Context, Request]:
    steps = Steps()
    room = {"kv_blocks_used": kv_used, "kv_blocks_total": 100}
    begun = steps.ran(0.020, prefill=200, **room)
    for _ in range(20):
        left = steps.ran(0.010, sequences=4, context=2000, **room)
    for _ in range(7):
        steps.ran(0.010, sequences=3, context=1500, **room)
    again = steps.ran(0.040, prefill=220, sequences=3, context=1500, **room)
    for _ in range(20):
        last = steps.ran(0.010, sequences=4, context=2000, **room)
    segments = [(1, begun, begun), (2, begun + 1, left), (3, again, again), (2, again + 1, last)]
    row = stepped_request(steps, segments, input_tokens=200, preemptions=1)
    return stepped_context([row], steps.rows), row


def test_a_preemption_costs_the_wait_and_the_steps_computed_again() -> None:
    context, row = preempted(kv_used=98)
    found = booked(context, row)
    assert found["kv.wait"] == pytest.approx(7 * 0.010)
    assert found["kv.preempt"] == pytest.approx(0.040)
    measured = column(context, row, "measured_s")
    assert measured == pytest.approx(0.07 + 0.04)


def test_a_preemption_with_free_blocks_was_for_someone_else() -> None:
    context, row = preempted(kv_used=40)
    found = booked(context, row)
    assert found["queue.policy"] == pytest.approx(7 * 0.010)
    assert "kv.wait" not in found


def test_waits_stated_after_a_preemption_are_not_those_before_the_first_step() -> None:
    context, row = preempted(kv_used=98)
    waited = replace(
        row,
        arrival_unix_ns=row.arrival_unix_ns - 500_000_000,
        queued_unix_ns=(row.queued_unix_ns or 0) - 500_000_000,
        queue_s=0.5,
        queue_slot_s=0.5,
        queue_kv_s=0.07,
        e2e_s=(row.e2e_s or 0) + 0.5,
    )
    found = booked(replace(context, requests=stepped_context([waited], []).requests), waited)
    assert found.get("queue.slots", 0.0) + found.get("queue.capacity", 0.0) == pytest.approx(0.5)
    assert found["kv.wait"] == pytest.approx(0.07)


def test_a_tool_inside_the_stream_is_external_and_its_last_step_is_not() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    left = warm(steps, 20)
    warm(steps, 30, sequences=2, context=1000)
    back = steps.ran(0.010, sequences=1, context=500)
    last = warm(steps, 20)
    segments = [(1, begun, begun), (2, begun + 1, left), (2, back, last)]
    row = stepped_request(steps, segments, external_s=0.294, input_tokens=10)
    found = booked(stepped_context([row], steps.rows), row)
    assert found["external"] == pytest.approx(0.294)
    assert "interference" not in found and "queue.budget" not in found and "unexplained" not in found


def test_a_tool_during_which_nothing_ran_is_not_the_host() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    warm(steps, 20)
    steps.pause(2.0)
    last = warm(steps, 20)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], external_s=2.0, input_tokens=10)
    found = booked(stepped_context([row], steps.rows), row)
    assert found["external"] == pytest.approx(2.0)
    assert found.get("host", 0.0) < 0.001


# --- the queue ------------------------------------------------------------------------------------------------------


def queued_behind(reserved: int, step_s: dict[int, float], sequences: int, kv_used: int = 20) -> dict[str, float]:
    """Seconds by cause, over its wait, of a request that waits for a slot while `sequences` of `reserved` decode; step_s: duration by sequences."""
    steps = Steps()
    room = {"kv_blocks_used": kv_used, "kv_blocks_total": 100, "slots_reserved": reserved, "waiting_slot": 1}
    for count, took in step_s.items():
        for _ in range(20):
            steps.ran(took, sequences=count, context=count * 500)
    before = steps.now_s
    while steps.now_s < before + 1.0:
        steps.ran(step_s[sequences], sequences=sequences, context=sequences * 500, running=sequences, **room)
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 10)
    row = stepped_request(
        steps,
        [(1, begun, begun), (2, begun + 1, last)],
        queued_s=before,
        input_tokens=10,
        queue_slot_s=steps.start_s(begun) - before,
    )
    found = booked(stepped_context([row], steps.rows), row)
    return {cause: seconds / (row.queue_s or 1.0) for cause, seconds in found.items()}


def test_full_slots_beside_steps_that_hardly_grow_want_more_slots() -> None:
    flat = {1: 0.0101, 8: 0.0108, 16: 0.0116, 32: 0.0132}
    assert queued_behind(32, flat, 32)["queue.slots"] == pytest.approx(1.0)


def test_full_slots_beside_steps_that_grow_with_their_sequences_are_the_capacity() -> None:
    steep = {8: 0.008, 16: 0.016, 32: 0.032, 64: 0.064}
    assert queued_behind(64, steep, 64)["queue.capacity"] == pytest.approx(1.0)


def test_slots_do_not_help_where_the_pool_is_full() -> None:
    flat = {1: 0.0101, 8: 0.0108, 16: 0.0116, 32: 0.0132}
    assert queued_behind(32, flat, 32, kv_used=99)["queue.capacity"] == pytest.approx(1.0)


def test_seats_of_ended_sequences_in_a_static_batch_are_empty() -> None:
    flat = {1: 0.0101, 8: 0.0108, 16: 0.0116, 32: 0.0132}
    assert queued_behind(32, flat, 8)["queue.empty_slots"] == pytest.approx(1.0)


def test_the_step_that_ran_at_arrival_is_booked_by_what_it_was_made_of() -> None:
    """It arrives 20 ms into a prompt's step of 100 ms: the other 80 ms are that prompt's."""
    steps = Steps()
    warm(steps, 20)
    busy = steps.ran(0.100, prefill=2000)
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 10)
    late = stepped_request(
        steps, [(1, begun, begun), (2, begun + 1, last)], queued_s=steps.start_s(busy) + 0.02, input_tokens=10
    )
    assert booked(stepped_context([late], steps.rows), late)["interference"] == pytest.approx(0.080)


def test_without_stated_reasons_the_steps_count_who_waits_for_what() -> None:
    steps = Steps()
    warm(steps, 20)
    queued = steps.now_s + 0.005
    warm(steps, 1)
    for _ in range(30):
        steps.ran(0.010, sequences=1, context=500, waiting_window=3, waiting_budget=1, waiting_slot=0)
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 10)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], queued_s=queued, input_tokens=10)
    found = booked(stepped_context([row], steps.rows), row)
    assert found["queue.window"] == pytest.approx(0.225)
    assert found["queue.budget"] == pytest.approx(0.075)


# --- what is not in sight -------------------------------------------------------------------------------------------


def test_requests_without_steps_are_booked_as_before() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 20)
    one = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    plain = [make_request(at_s=0.01 * i, queue_s=0.0, prefill_s=0.3, first_token_s=0.0) for i in range(3)]
    without = attribute_instance(stepped_context(plain, []), RULES).sort("request_key")
    beside = attribute_instance(stepped_context([*plain, one], steps.rows), RULES).sort("request_key")
    keys = [row.request_key for row in plain]
    assert without["first_causes"].null_count() == 3
    assert beside.filter(pl.col("request_key").is_in(keys))["first_causes"].null_count() == 3
    assert beside.filter(pl.col("request_key") == one.request_key)["first_causes"].null_count() == 0


def test_half_the_steps_missing_is_no_composition() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 200)
    one = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    answer = attribute_instance(stepped_context([one], steps.rows[:90]), RULES)
    assert answer["first_causes"][0] is None


def test_a_few_missing_steps_are_unexplained_time() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 200)
    one = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    found = booked(stepped_context([one], [*steps.rows[:50], *steps.rows[60:]]), one)
    assert found["unexplained"] == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["", "[]", "[[1,2]]", "nonsense", "[[9,0,1]]", "[[1,5,2]]", '{"a": 3}'])
def test_segments_that_are_none_are_left_alone(text: str) -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 20)
    one = replace(stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)]), segments=text)
    answer = attribute_instance(stepped_context([one], steps.rows), RULES)
    assert answer["first_causes"][0] is None
    total = sum(answer[cause_column(cause)][0] for cause in CAUSES)
    assert total == pytest.approx(one.e2e_s)


def test_steps_of_another_life_of_the_engine_are_not_these() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10)
    last = warm(steps, 20)
    one = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)])
    moved = [replace(row, start_unix_ns=row.start_unix_ns + 3600 * 10**9) for row in steps.rows]
    assert attribute_instance(stepped_context([one], moved), RULES)["first_causes"][0] is None


# --- what else is told ----------------------------------------------------------------------------------------------


def test_seconds_before_the_first_token_are_told_apart() -> None:
    steps = Steps()
    warm(steps, 20)
    busy = steps.ran(0.100, prefill=2000)
    begun = steps.ran(0.012, prefill=100)
    mixed = steps.ran(0.060, prefill=1000, sequences=1, context=500)
    last = warm(steps, 40)
    row = stepped_request(
        steps, [(1, begun, begun), (2, mixed, last)], queued_s=steps.start_s(busy) + 0.02, input_tokens=100, context_s=0.5,
    )  # fmt: skip
    row = replace(
        row,
        arrival_unix_ns=row.arrival_unix_ns - 500_000_000,
        e2e_s=(row.e2e_s or 0) + 0.5,
        ttft_s=(row.ttft_s or 0) + 0.5,
    )
    context = stepped_context([row], steps.rows)
    first = json.loads(str(column(context, row, "first_causes")))
    assert sum(first.values()) == pytest.approx(row.ttft_s, abs=1e-6)
    assert first["context"] == pytest.approx(0.5)
    assert first["interference"] == pytest.approx(0.080)
    assert booked(context, row)["interference"] == pytest.approx(0.130, rel=0.03)


def test_batch_and_kv_use_come_from_the_steps() -> None:
    steps = Steps()
    begun = steps.ran(0.010, prefill=10, kv_blocks_used=10, kv_blocks_total=100)
    for number in range(30):
        last = steps.ran(
            0.010, sequences=4 if number < 15 else 8, context=4000, kv_blocks_used=20 + number, kv_blocks_total=100
        )
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    context = stepped_context([row], steps.rows)
    assert column(context, row, "decode_batch_mean") == pytest.approx(6.0)
    assert column(context, row, "kv_usage_admission_ratio") == pytest.approx(0.10)
    assert column(context, row, "kv_usage_peak_ratio") == pytest.approx(0.49)


def test_times_far_from_the_epoch_lose_nothing() -> None:
    """Steps are placed by whole nanoseconds; a float of Unix nanoseconds would be off by 256 of them."""
    steps = Steps()
    begun = steps.ran(0.000_001, prefill=10)
    for _ in range(50):
        last = steps.ran(0.000_001, sequences=1, context=10)
    row = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=10)
    assert steps.rows[0].start_unix_ns == START_UNIX_NS
    found = booked(stepped_context([row], steps.rows), row)
    assert found.get("unexplained", 0.0) < 1e-8
    assert np.isfinite(list(found.values())).all()
