"""Each second of a request is booked to one cause, and to the right one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from analyzer_contexts import four_slots, make_context
from builders import START_UNIX_NS, make_request, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.analyzer.attribution import attribute_instance
from phasewise.collector.context import Context
from phasewise.collector.records import EngineSample, Request
from phasewise.rules.load import Rulebook, load_rulebook
from phasewise.rules.vocabulary import CAUSES, cause_column

RULES = load_rulebook()


def booked(context: Context, rules: Rulebook = RULES) -> dict[str, float]:
    """Seconds by cause over all targets, zeros left out."""
    answer = attribute_instance(context, rules)
    assert set(answer["request_key"]) == context.targets
    total = {cause: float(answer[cause_column(cause)].sum()) for cause in CAUSES}
    return {cause: seconds for cause, seconds in total.items() if seconds > 1e-9}


def samples(count: int = 4, **fields: object) -> list[EngineSample]:
    return [make_sample(at_s=i + 0.5, **fields) for i in range(count)]


def test_a_full_slot_limit_with_empty_kv_is_a_wait_for_slots() -> None:
    found = booked(make_context(four_slots(), samples(running=4.0, waiting=4.0, kv_usage_ratio=0.05)))
    assert found["queue.slots"] == pytest.approx(4 * 1 + 4 * 2)
    assert "kv.wait" not in found


def test_the_same_wait_behind_a_full_pool_is_kv() -> None:
    found = booked(make_context(four_slots(), samples(running=4.0, waiting=4.0, kv_usage_ratio=0.97)))
    assert found["kv.wait"] == pytest.approx(12)
    assert "queue.slots" not in found


def test_spans_alone_cannot_tell_slots_from_kv() -> None:
    context = make_context(four_slots())
    assert booked(context)["unexplained"] == pytest.approx(12)
    answer = attribute_instance(context, RULES)
    waited = answer.filter(pl.col(cause_column("unexplained")) > 0)
    assert set(waited["missing_signals"]) == {'["kv_usage"]'}


def test_a_slot_limit_the_engine_states_needs_no_samples() -> None:
    found = booked(make_context(four_slots(), settings={"max_num_seqs": 4}))
    assert found["queue.slots"] == pytest.approx(12)


def test_waiting_with_free_slots_and_blocks_beside_a_long_prompt_is_the_step_budget() -> None:
    long = make_request(at_s=0.0, queue_s=0.0, prefill_s=3.0, first_token_s=0.0, decode_s=1.0, input_tokens=8000)
    early = [make_request(at_s=-9.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=5.0) for _ in range(4)]
    short = make_request(at_s=0.5, queue_s=2.5, prefill_s=0.1, first_token_s=0.0, decode_s=1.0, input_tokens=50)
    found = booked(make_context([long, short, *early], samples(running=1.0, waiting=1.0, kv_usage_ratio=0.05)))
    assert found["queue.budget"] == pytest.approx(2.5)


def test_decode_beside_a_long_prefill_is_interference_beyond_its_clean_steps() -> None:
    calm = [make_request(at_s=10.0 * i, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.0) for i in range(4)]
    held = make_request(at_s=100.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=3.0)
    long = make_request(
        at_s=100.5, queue_s=0.0, prefill_s=2.2, first_token_s=0.0, decode_s=0.01, output_tokens=2, input_tokens=9000
    )
    answer = attribute_instance(make_context([*calm, held, long]), RULES)
    row = answer.filter(pl.col("request_key") == held.request_key).row(0, named=True)
    assert row[cause_column("interference")] == pytest.approx(2.0)
    assert row[cause_column("decode.weights")] == pytest.approx(1.0)


def test_the_step_that_runs_at_arrival_delays_the_newcomer() -> None:
    """vLLM: TTFT less queue less prefill is one number for {C,F}; where another prompt is prefilled it is waiting."""
    first = make_request(at_s=0.0, queue_s=0.0, prefill_s=2.0, first_token_s=0.0, decode_s=0.5)
    second = replace(
        make_request(at_s=0.2, queue_s=0.0, prefill_s=1.0, first_token_s=0.0, decode_s=0.5),
        combined_s=1.9,
        combined_covers="C,F",
        queued_unix_ns=START_UNIX_NS + 2_100_000_000,
        scheduled_unix_ns=START_UNIX_NS + 2_100_000_000,
        first_token_unix_ns=START_UNIX_NS + 3_100_000_000,
        ttft_s=2.9,
        e2e_s=3.4,
        finished_unix_ns=START_UNIX_NS + 3_600_000_000,
    )
    answer = attribute_instance(make_context([first, second]), RULES)
    row = answer.filter(pl.col("request_key") == second.request_key).row(0, named=True)
    assert row[cause_column("interference")] == pytest.approx(1.8)
    assert row[cause_column("host")] == pytest.approx(0.1)


def test_slow_decoding_while_the_preemption_counter_moves_is_recomputation() -> None:
    fast = [make_request(at_s=0.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.0) for _ in range(9)]
    lost = make_request(at_s=0.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=4.0)
    moving = [make_sample(at_s=i + 0.5, kv_usage_ratio=0.97, preemptions=float(i)) for i in range(5)]
    answer = attribute_instance(make_context([*fast, lost], moving), RULES)
    row = answer.filter(pl.col("request_key") == lost.request_key).row(0, named=True)
    assert row[cause_column("kv.preempt")] == pytest.approx(3.0)
    assert row["primary_class"] == "kv"


def test_the_engine_s_own_reasons_go_before_ours() -> None:
    row = make_request(queue_s=2.0, queue_kv_s=1.5, queue_window_s=0.5)
    found = booked(make_context([row]))
    assert found["kv.wait"] == pytest.approx(1.5)
    assert found["queue.window"] == pytest.approx(0.5)


def test_the_router_s_own_wait_is_upstream_and_not_the_engine_s_queue() -> None:
    row = make_request(queue_s=2.0, queue_upstream_s=2.0)
    found = booked(make_context([row], samples(running=4.0, waiting=4.0, kv_usage_ratio=0.97)))
    assert found["queue.upstream"] == pytest.approx(2.0)
    assert "kv.wait" not in found


def test_what_a_tier_takes_to_load_kv_is_kv_and_the_rest_of_the_context_is_not() -> None:
    rows = [make_request(e2e_s=2.72, context_s=1.5, kv_load_s=load_s) for load_s in (1.25, 9.0, None)]
    answer = attribute_instance(make_context(rows), RULES)
    answer = pl.DataFrame({"request_key": [row.request_key for row in rows]}).join(
        answer, on="request_key", maintain_order="left"
    )
    assert answer[cause_column("kv.load")].to_list() == pytest.approx([1.25, 1.5, 0.0])
    assert answer[cause_column("context")].to_list() == pytest.approx([0.25, 0.0, 1.5])


def test_a_known_accelerator_separates_bytes_from_host_time() -> None:
    """Llama-3.1-8B, batch 1, on an H100: 4.6 ms of reading a step at the data sheet's bandwidth (roofline.md 2.6), of which such
    kernels reach 0.84; 40 ms measured is host."""
    row = make_request(
        queue_s=0.0, prefill_s=0.0, decode_s=4.0, output_tokens=101, input_tokens=2000, model="llama-3.1-8b"
    )
    found = booked(make_context([row], settings={"accelerator": "h100_sxm"}))
    reading = found["decode.weights"] + found["decode.kv"]
    assert reading == pytest.approx(100 * 4.56e-3 / 0.84, rel=0.05)
    assert found["host"] == pytest.approx(4.0 - reading - found["decode.compute"] + 0.01)


def test_a_short_prompt_on_a_known_accelerator_is_read_weights_and_a_long_one_is_computed() -> None:
    """Llama-3.1-8B on an H100: 16 tokens read 16 GB (4.6 ms and more) and compute next to nothing; 4,000 tokens compute 60 TFLOP."""
    shares = {}
    for tokens, prefill_s in ((16, 0.006), (4000, 0.12)):
        row = make_request(
            queue_s=0.0, prefill_s=prefill_s, first_token_s=0.0, decode_s=0.0, output_tokens=1, input_tokens=tokens,
            model="llama-3.1-8b",
        )  # fmt: skip
        found = booked(make_context([row], settings={"accelerator": "h100_sxm"}))
        assert sum(found.values()) == pytest.approx(prefill_s)
        shares[tokens] = found["decode.weights"] / prefill_s, found["prefill.compute"] / prefill_s
    assert shares[16][0] > 0.7 > 0.3 > shares[16][1]
    assert shares[4000][0] < 0.15 < 0.8 < shares[4000][1]


def test_a_static_batch_makes_others_wait_for_seats_that_are_empty() -> None:
    """Batches of four of which three end after 1 s and one after 4 s; whoever comes meanwhile waits for the last one."""
    rows = [
        make_request(at_s=5.0 * batch - (4.0 if batch else 0.0), queue_s=4.0 if batch else 0.0, prefill_s=0.1,
                     first_token_s=0.0, decode_s=4.9 if seat == 0 else 1.0,
                     output_tokens=491 if seat == 0 else 101)
        for batch in range(10)
        for seat in range(4)
    ]  # fmt: skip
    found = booked(
        make_context(
            rows, [make_sample(at_s=float(at), running=1.0, waiting=4.0, kv_usage_ratio=0.1) for at in range(50)]
        )
    )
    assert found["queue.empty_slots"] == pytest.approx(36 * 4.0 - found.get("queue.slots", 0.0))
    assert found["queue.empty_slots"] > 36 * 3.0
    assert found.get("unexplained", 0.0) == pytest.approx(0.0)


def test_first_steps_of_a_process_are_its_cold_start() -> None:
    """Ten steps a second in the first 10 s, a hundred a second after: nine tenths of the first seconds are more than usual."""
    rows = [make_request(at_s=0.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=9.9, output_tokens=101)]
    rows += [
        make_request(at_s=10.0 + at, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=0.9, output_tokens=91)
        for at in range(90)
    ]
    scrapes = [
        make_sample(
            at_s=float(at), steps=10.0 * min(at, 10) + 100.0 * max(at - 10, 0), step_tokens=1.0 * at, running=1.0
        )
        for at in range(0, 101, 5)
    ]
    context = make_context(rows, scrapes)
    first = attribute_instance(context, RULES).filter(pl.col("request_key") == rows[0].request_key).row(0, named=True)
    assert first["cause"] == "cold_start"
    assert first[cause_column("cold_start")] == pytest.approx(9.0, rel=0.02)
    later = [replace(one, steps=one.steps + 50_000.0) for one in scrapes if one.steps is not None]
    assert "cold_start" not in booked(make_context(rows, later))  # a process that has long been running


def test_a_request_that_stands_still_among_others_is_told_by_nothing() -> None:
    rows = [
        make_request(at_s=1.0 * at, queue_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=5.0 if at == 30 else 1.0)
        for at in range(60)
    ]
    answer = attribute_instance(make_context(rows, settings={"max_num_seqs": 64}), RULES)
    row = answer.filter(pl.col("request_key") == rows[30].request_key).row(0, named=True)
    assert row["primary_class"] == "inconclusive"
    assert row[cause_column("unexplained")] == pytest.approx(4.0)
    assert row["missing_signals"] == '["tool_spans"]'


def test_phases_beyond_end_to_end_are_cut_within_tolerance_and_refused_beyond() -> None:
    near = replace(make_request(queue_s=0.0, prefill_s=0.5, first_token_s=0.0, decode_s=1.0), e2e_s=1.49)
    far = replace(make_request(queue_s=0.0, prefill_s=0.5, first_token_s=0.0, decode_s=1.0), e2e_s=1.2)
    answer = attribute_instance(make_context([near, far]), RULES)
    rows = {row["request_key"]: row for row in answer.iter_rows(named=True)}
    assert rows[near.request_key]["clamped"]
    assert rows[near.request_key][cause_column("decode.weights")] == pytest.approx(0.99, abs=0.02)
    assert rows[far.request_key]["primary_class"] == "inconclusive"
    assert rows[far.request_key]["cause"] is None
    assert rows[far.request_key][cause_column("unexplained")] == pytest.approx(1.2)


def test_unknown_phases_are_unexplained_and_named() -> None:
    row = replace(
        make_request(),
        queue_s=None, prefill_s=None, decode_s=None, first_token_s=None, context_s=None,
        queued_unix_ns=None, scheduled_unix_ns=None, first_token_unix_ns=None,
    )  # fmt: skip
    context = make_context([row])
    assert booked(context) == {"unexplained": pytest.approx(row.e2e_s)}
    assert attribute_instance(context, RULES)["missing_signals"][0] == '["phases"]'


def test_concurrency_and_batch_come_from_overlap() -> None:
    rows = [make_request(at_s=0.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=0.9) for _ in range(3)]
    answer = attribute_instance(make_context(rows), RULES)
    assert set(answer["concurrency_at_arrival"]) == {3}
    assert answer["decode_batch_mean"].to_numpy() == pytest.approx(3.0)


durations = st.floats(0.0, 5.0, allow_subnormal=False)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    made = make_request(
        at_s=draw(durations), queue_s=draw(durations), prefill_s=draw(durations), first_token_s=draw(durations),
        decode_s=draw(durations), output_tokens=draw(st.integers(1, 200)), input_tokens=draw(st.integers(0, 5000)),
    )  # fmt: skip
    residual = draw(st.floats(0.0, 0.5, allow_subnormal=False))
    assert made.e2e_s is not None
    return replace(made, e2e_s=made.e2e_s + residual, finished_unix_ns=made.finished_unix_ns + round(residual * 1e9))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=8),
    st.lists(st.tuples(durations, st.floats(0, 1), st.integers(0, 9)), max_size=6),
)
def test_the_partition_adds_up_and_has_no_negative_part(
    rows: list[Request], seen: list[tuple[float, float, int]]
) -> None:
    moments = {round(t * 1e9): (usage, waiting) for t, usage, waiting in seen}
    taken = [
        make_sample(at_s=t / 1e9, kv_usage_ratio=usage, waiting=float(waiting), running=2.0)
        for t, (usage, waiting) in moments.items()
    ]
    answer = attribute_instance(make_context(rows, taken), RULES)
    parts = np.stack([answer[cause_column(cause)].to_numpy() for cause in CAUSES])
    keys = {row.request_key: row.e2e_s for row in rows}
    assert (parts >= 0).all()
    assert parts.sum(axis=0) == pytest.approx([keys[key] for key in answer["request_key"]], abs=1e-6)


def test_the_order_of_rows_changes_nothing() -> None:
    rows = four_slots()
    taken = samples(running=4.0, waiting=4.0, kv_usage_ratio=0.05)
    one = attribute_instance(make_context(rows, taken), RULES).sort("request_key")
    other = attribute_instance(make_context(rows[::-1], taken[::-1]), RULES).sort("request_key")
    assert one.equals(other)


def test_sequences_of_one_call_are_not_each_other_s_interference() -> None:
    """n = 4: four spans of one call with one prompt."""
    rows = [make_request(queue_s=0.0, prefill_s=0.4, first_token_s=0.0, decode_s=1.0, call_key="one") for _ in range(4)]
    assert "interference" not in booked(make_context(rows))
    strangers = [replace(row, call_key=row.request_key) for row in rows]
    assert booked(make_context(strangers))["interference"] == pytest.approx(4 * 0.3)


def test_an_engine_that_prefills_all_the_time_is_at_its_capacity() -> None:
    """Prompts one after the other without a gap: neither a slot nor a larger step budget serves more."""
    rows = [
        make_request(at_s=0.0, queue_s=i, prefill_s=1.0, first_token_s=0.0, decode_s=0.05)
        for i in map(float, range(20))
    ]
    seen = [make_sample(at_s=i + 0.5, running=1.0, waiting=10.0, kv_usage_ratio=0.05) for i in range(20)]
    found = booked(make_context(rows, seen))
    assert found["queue.capacity"] == pytest.approx(sum(range(20)))
    assert "queue.budget" not in found and "queue.slots" not in found


def test_a_request_of_no_duration_is_bound_by_nothing() -> None:
    row = replace(make_request(queue_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=0.0), e2e_s=0.0, ttft_s=0.0)
    answer = attribute_instance(make_context([row]), RULES).row(0, named=True)
    assert (answer["primary_class"], answer["cause"]) == ("inconclusive", None)


def test_calls_that_only_a_client_saw_have_no_batch_and_no_bound() -> None:
    row = replace(
        make_request(decode_s=2.0), instance=None, queue_s=None, prefill_s=None, first_token_s=None, context_s=None,
        queued_unix_ns=None, scheduled_unix_ns=None, engine="genai_client",
    )  # fmt: skip
    context = replace(make_context([row]), instance="")
    answer = attribute_instance(context, RULES).row(0, named=True)
    assert answer["decode_batch_mean"] is None
    assert answer["primary_class"] == "inconclusive"
