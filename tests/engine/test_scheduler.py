"""What one step holds and who enters, leaves, is cut or put back, on built examples."""

from __future__ import annotations

from collections import Counter

import pytest
from scheduling import MS, Driver, Step, make_config, make_spec, prompted

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.scheduler import Scheduler
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence, State, ToolCall
from phasewise.instrumented_engine.telemetry import DECODE, PREFILL, RECOMPUTE

SLOT, KV, BUDGET, WINDOW, POLICY = range(5)


def fixed(config: EngineConfig, *specs: RequestSpec, real: bool = False) -> Driver:
    """Steps of 10 ms; `specs` are there from the beginning."""
    driver = Driver(config, real=real, duration=lambda plan: 10 * MS)
    for spec in specs:
        assert driver.submit(spec) is not None
    return driver


def stepped(driver: Driver) -> Step:
    step = driver.step()
    assert step is not None
    return step


def sizes(step: Step) -> list[tuple[str, int]]:
    return [(name, new) for name, _, new, _, _ in step.chunks]


# --- what a step holds ------------------------------------------------------------------------------------------------


def test_decodes_go_first_then_chunks_then_newcomers() -> None:
    config = make_config(step_token_budget=20, prefill_chunk_tokens=12)
    driver = fixed(config, make_spec(0, prompt_tokens=8), make_spec(1, prompt_tokens=30), make_spec(2, prompt_tokens=5))
    assert sizes(stepped(driver)) == [("r0", 8), ("r1", 12)]
    second = stepped(driver)
    assert second.decodes == ("r0",)
    assert sizes(second) == [("r1", 12), ("r2", 5)]
    third = stepped(driver)
    assert third.decodes == ("r0", "r2") and sizes(third) == [("r1", 6)]
    assert third.chunks[0][3]  # the last one


def test_budget_left_by_the_head_is_why_the_others_wait() -> None:
    driver = fixed(make_config(step_token_budget=30), *(make_spec(number) for number in range(3)))
    step = stepped(driver)
    assert sizes(step) == [("r0", 30)] and step.waiting == (0, 0, 2, 0, 0)
    stepped(driver)
    second = driver.trace.sequences["r1"]
    assert second.scheduled_ns == 10 * MS and second.waits_ns == [0, 0, 10 * MS, 0, 0]


def test_all_prompts_together_stay_under_max_prefill_tokens() -> None:
    driver = fixed(make_config(max_prefill_tokens=50), make_spec(0), make_spec(1))
    step = stepped(driver)
    assert sizes(step) == [("r0", 40), ("r1", 10)]


def test_without_chunks_a_prompt_runs_whole_or_not_at_all() -> None:
    config = make_config(chunked_prefill=False, prefill_chunk_tokens=3, max_num_seqs=4)
    driver = fixed(config, make_spec(0), make_spec(1), make_spec(2, prompt_tokens=2))
    first = stepped(driver)
    assert sizes(first) == [("r0", 40)] and first.waiting == (0, 0, 2, 0, 0)  # r2 would fit, but r1 came first
    second = stepped(driver)
    assert second.decodes == ("r0",) and sizes(second) == [("r1", 40), ("r2", 2)]


def test_without_chunks_a_prompt_over_max_prefill_tokens_runs_alone() -> None:
    config = make_config(chunked_prefill=False, max_prefill_tokens=30)
    driver = fixed(config, make_spec(0, prompt_tokens=5), make_spec(1), make_spec(2, prompt_tokens=5))
    assert sizes(stepped(driver)) == [("r0", 5)]
    assert sizes(stepped(driver)) == [("r1", 40)]
    assert sizes(stepped(driver)) == [("r2", 5)]


def test_decodes_take_turns_where_the_budget_is_too_small_for_all() -> None:
    """Only tools can bring it about: while two sequences wait for theirs, two others come."""
    config = make_config(step_token_budget=2)
    tool = (ToolCall(2, 100 * MS),)
    specs = [make_spec(number, prompt_tokens=1, max_output_tokens=50, tools=tool * (number < 2)) for number in range(4)]
    driver = fixed(config, *specs)
    while driver.scheduler.running_count < 4:
        stepped(driver)
    counts = Counter(name for _ in range(12) for name in stepped(driver).decodes)
    assert counts == dict.fromkeys(("r0", "r1", "r2", "r3"), 6)


# --- leaving and entering ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [False, True])
def test_seat_and_blocks_of_one_that_leaves_serve_the_next_step(cancelled: bool) -> None:
    first = make_spec(0, prompt_tokens=40, max_output_tokens=1 if not cancelled else 20)
    config = make_config(max_num_seqs=1, kv_blocks=16)
    driver = fixed(config, first, make_spec(1))
    stepped(driver)
    if cancelled:
        assert sizes(stepped(driver)) == []
        driver.cancel(driver.now_ns, "r0")
        assert driver.scheduler.pool.used_blocks == 0
    assert sizes(stepped(driver)) == [("r1", 40)]


def test_cancelling_a_waiting_one_lets_the_next_pass() -> None:
    driver = fixed(make_config(max_num_seqs=1), make_spec(0, max_output_tokens=2), make_spec(1), make_spec(2))
    stepped(driver)
    driver.cancel(driver.now_ns, "r1")
    stepped(driver)
    assert sizes(stepped(driver)) == [("r2", 40)]
    gone = driver.trace.sequences["r1"]
    assert (gone.state, gone.finish_reason, gone.scheduled_ns) == (State.FINISHED, "abort", None)
    assert gone.waits_ns[SLOT] == 10 * MS


def test_a_slot_or_the_blocks_are_why_one_waits() -> None:
    slots = fixed(make_config(max_num_seqs=1), make_spec(0), make_spec(1))
    assert stepped(slots).waiting == (1, 0, 0, 0, 0)
    blocks = fixed(make_config(kv_blocks=19), make_spec(0), make_spec(1))
    assert stepped(blocks).waiting == (0, 1, 0, 0, 0)


def test_the_wait_for_a_running_step_has_no_reason() -> None:
    driver = Driver(make_config(), duration=lambda plan: 10 * MS)
    driver.run([make_spec(0), make_spec(1, arrival_ns=4 * MS)])
    late = driver.trace.sequences["r1"]
    assert (late.queued_ns, late.scheduled_ns) == (4 * MS, 10 * MS)
    assert late.waits_ns == [0, 0, 0, 0, 0]


def test_newcomers_leave_one_percent_to_those_who_run() -> None:
    config = make_config(kv_blocks=200, step_token_budget=900, max_model_tokens=800)
    first, second = make_spec(0, prompt_tokens=400), make_spec(1, prompt_tokens=396)
    assert sizes(stepped(fixed(config, first, second))) == [("r0", 400)]  # 100 + 99 of 200 would leave one
    assert len(sizes(stepped(fixed(config, first, make_spec(1, prompt_tokens=392))))) == 2
    whole = fixed(config, make_spec(0, prompt_tokens=799, max_output_tokens=1))  # but alone it may have all
    assert stepped(whole).kv_blocks_used == 200


# --- memory runs out ----------------------------------------------------------------------------------------------------


def test_the_last_come_is_put_back_and_computes_its_tokens_again() -> None:
    config = make_config(kv_blocks=8, max_model_tokens=32)
    driver = fixed(config, *(make_spec(number, prompt_tokens=12, max_output_tokens=12) for number in range(2)))
    while not (step := stepped(driver)).preempted:
        pass
    assert step.preempted == ("r1",) and step.decodes == ("r0",)
    assert step.waiting == (0, 1, 0, 0, 0)
    back = driver.trace.sequences["r1"]
    generated = back.output_tokens
    assert generated > 0 and back.target_tokens == 12 + generated and back.preempted_ns == step.start_ns
    driver.run([])
    assert back.output_tokens == 12 and back.preemptions == 1
    assert [segment[0] for segment in back.segments] == [PREFILL, DECODE, RECOMPUTE, DECODE]
    assert len(back.chunks) == 1  # computing again is no prefill
    again = [step for step in driver.trace.steps if any(chunk[4] for chunk in step.chunks)]
    assert sizes(again[0]) == [("r1", 12 + generated)]
    assert back.waits_ns[KV] == again[0].start_ns - step.start_ns
    assert back.longest_gap_ns >= back.waits_ns[KV]


def test_the_lowest_priority_is_put_back_first() -> None:
    config = make_config(kv_blocks=8, max_model_tokens=32, order="priority")
    driver = fixed(
        config,
        make_spec(0, prompt_tokens=12, max_output_tokens=12, priority=1),
        make_spec(1, prompt_tokens=12, max_output_tokens=12, priority=0),
    )
    while not (step := stepped(driver)).preempted:
        pass
    assert step.preempted == ("r0",)


def test_one_put_back_goes_before_those_that_came_later() -> None:
    config = make_config(kv_blocks=8, max_model_tokens=32)
    driver = fixed(config, *(make_spec(number, prompt_tokens=12, max_output_tokens=12) for number in range(3)))
    driver.run([])
    order = [name for step in driver.trace.steps for name, *_ in step.chunks]
    assert order == ["r0", "r1", "r1", "r2", "r2"]


def test_nobody_enters_while_memory_runs_out_for_those_who_run() -> None:
    """In order `fair` another tenant would take the blocks of the one put back, and be put back itself."""
    config = make_config(kv_blocks=8, max_model_tokens=32, order="fair")
    driver = fixed(
        config, *(make_spec(number, prompt_tokens=12, max_output_tokens=16, tenant="a") for number in range(2))
    )
    for _ in range(5):
        stepped(driver)
    driver.submit(make_spec(2, prompt_tokens=4, tenant="b", arrival_ns=driver.now_ns))
    step = stepped(driver)
    assert step.preempted == ("r1",) and not step.chunks and step.waiting == (0, 2, 0, 0, 0)
    assert sizes(stepped(driver)) == [("r2", 4)]


def test_a_put_back_sequence_finds_its_blocks_in_the_prefix_cache() -> None:
    config = make_config(kv_blocks=8, max_model_tokens=32, prefix_sharing=True)
    prompts = [tuple(range(12)), tuple(range(20, 32))]
    specs = [prompted(make_spec(number, max_output_tokens=9), prompt) for number, prompt in enumerate(prompts)]
    driver = fixed(config, *specs, real=True)
    driver.run([])
    again = [chunk for step in driver.trace.steps for chunk in step.chunks if chunk[4]]
    assert len(again) == 1 and again[0][1] > 0  # part of it was still there
    assert driver.trace.sequences["r1"].cached_tokens == 0  # of the first admission


def test_one_of_higher_priority_takes_the_seat_of_a_lower_one() -> None:
    config = make_config(max_num_seqs=1, order="priority", preempt_for_priority=True)
    driver = fixed(config, make_spec(0, priority=5))
    stepped(driver)
    assert driver.submit(make_spec(1, priority=5, arrival_ns=driver.now_ns)) is not None
    assert stepped(driver).preempted == ()  # the same priority has to wait
    assert driver.submit(make_spec(2, priority=1, arrival_ns=driver.now_ns)) is not None
    step = stepped(driver)
    assert step.preempted == ("r0",) and sizes(step) == [("r2", 40)]
    driver.run([])
    out = driver.trace.sequences["r0"]
    assert out.output_tokens == 10 and out.waits_ns[POLICY] > 0 and out.waits_ns[KV] == 0
    started = {name: step.start_ns for step in reversed(driver.trace.steps) for name, *_ in step.chunks}
    assert started["r0"] < started["r1"]  # back at the head of its class


def test_nobody_is_put_back_where_it_would_not_help() -> None:
    config = make_config(kv_blocks=16, order="priority", preempt_for_priority=True)
    driver = fixed(config, make_spec(0, prompt_tokens=40, priority=0), make_spec(1, prompt_tokens=4, priority=9))
    stepped(driver)
    driver.submit(make_spec(2, prompt_tokens=30, priority=1))  # 8 blocks; the one of r1 and the 3 free are too few
    step = stepped(driver)
    assert step.preempted == () and step.waiting == (0, 1, 0, 0, 0)


# --- static batches and the window ------------------------------------------------------------------------------------


def test_a_static_batch_keeps_its_seats_until_its_last_sequence_ends() -> None:
    specs = [make_spec(number, prompt_tokens=4, max_output_tokens=length) for number, length in enumerate((2, 6, 3))]
    driver = fixed(make_config(batching="static", max_num_seqs=2), *specs)
    first = stepped(driver)
    assert len(first.chunks) == 2 and first.waiting == (1, 0, 0, 0, 0)
    used = first.kv_blocks_used
    for _ in range(5):
        step = stepped(driver)
        assert step.slots_reserved == 2 and not step.chunks and step.waiting == (1, 0, 0, 0, 0)
    assert step.decodes == ("r1",) and step.kv_blocks_used <= used + 1  # the blocks of r0 are free
    last = stepped(driver)
    assert sizes(last) == [("r2", 4)] and last.slots_reserved == 1
    assert driver.trace.sequences["r2"].waits_ns == [60 * MS, 0, 0, 0, 0]


def test_a_static_batch_may_need_several_steps_for_its_prompts() -> None:
    config = make_config(batching="static", max_num_seqs=3, step_token_budget=50)
    driver = fixed(config, *(make_spec(number) for number in range(3)))
    assert sizes(stepped(driver)) == [("r0", 40), ("r1", 10)]
    driver.submit(make_spec(3, arrival_ns=driver.now_ns))
    second = stepped(driver)
    assert second.decodes == ("r0",) and [name for name, _ in sizes(second)] == ["r1", "r2"]
    stepped(driver)
    step = stepped(driver)
    assert step.slots_reserved == 3 and step.waiting == (1, 0, 0, 0, 0)
    assert driver.trace.sequences["r2"].waits_ns == [0, 0, 10 * MS, 0, 0]


def test_a_static_batch_cut_short_by_memory_stays_so() -> None:
    """Two of three fit; the blocks of the one that ends first are free, but its batch is closed."""
    config = make_config(batching="static", kv_blocks=16)
    lengths = (1, 8, 1)
    driver = fixed(
        config, *(make_spec(number, prompt_tokens=24, max_output_tokens=lengths[number]) for number in range(3))
    )
    first = stepped(driver)
    assert len(first.chunks) == 2 and first.waiting == (0, 1, 0, 0, 0)
    for _ in range(7):
        step = stepped(driver)
        assert step.decodes == ("r1",) and not step.chunks and step.waiting == (1, 0, 0, 0, 0)
    assert sizes(stepped(driver)) == [("r2", 24)]


def test_one_put_back_leaves_its_seat_of_a_static_batch() -> None:
    config = make_config(batching="static", kv_blocks=8, max_model_tokens=32)
    driver = fixed(config, *(make_spec(number, prompt_tokens=12, max_output_tokens=12) for number in range(2)))
    assert stepped(driver).slots_reserved == 2
    while not (step := stepped(driver)).preempted:
        pass
    assert step.slots_reserved == 1
    driver.run([])
    again = next(step for step in driver.trace.steps if any(chunk[4] for chunk in step.chunks))
    assert driver.trace.sequences["r0"].finished_ns == again.start_ns  # it comes with the next batch
    assert again.slots_reserved == 1


def test_a_batch_is_formed_when_the_window_ends_or_the_seats_are_filled() -> None:
    config = make_config(batching="static", max_num_seqs=2, batching_window_s=0.05)
    driver = Driver(config, duration=lambda plan: 10 * MS)
    driver.run([make_spec(0, arrival_ns=3 * MS)])
    assert driver.trace.steps[0].start_ns == 53 * MS
    assert driver.trace.sequences["r0"].waits_ns == [0, 0, 0, 50 * MS, 0]
    full = Driver(config, duration=lambda plan: 10 * MS)
    full.run([make_spec(0, arrival_ns=3 * MS), make_spec(1, arrival_ns=20 * MS)])
    assert full.trace.steps[0].start_ns == 20 * MS and len(full.trace.steps[0].chunks) == 2


def test_the_window_holds_newcomers_back_while_others_run() -> None:
    config = make_config(batching_window_s=0.03)
    driver = fixed(config, *(make_spec(number) for number in range(2)))
    assert driver.step() is None and driver.scheduler.wake_ns() == 30 * MS
    driver.now_ns = 30 * MS
    assert len(stepped(driver).chunks) == 2
    driver.submit(make_spec(2, arrival_ns=driver.now_ns))
    assert [stepped(driver).waiting for _ in range(3)] == [(0, 0, 0, 1, 0)] * 3
    assert sizes(stepped(driver)) == [("r2", 40)]


# --- tools, stop tokens, refusals -------------------------------------------------------------------------------------


def test_a_tool_keeps_seat_and_blocks_and_its_time_is_no_gap() -> None:
    config = make_config(max_num_seqs=1)
    driver = fixed(config, make_spec(0, max_output_tokens=4, tools=(ToolCall(2, 500 * MS),)), make_spec(1))
    stepped(driver)
    stepped(driver)
    assert driver.scheduler.paused_count == 1 and driver.scheduler.running_count == 0
    held = driver.scheduler.pool.used_blocks
    assert driver.step() is None and driver.scheduler.wake_ns() == 520 * MS
    assert held > 0 and driver.scheduler.pool.used_blocks == held
    driver.run([])
    sequence = driver.trace.sequences["r0"]
    assert sequence.longest_gap_ns == 10 * MS and sequence.finished_ns == 540 * MS
    assert sequence.segments == [[PREFILL, 0, 0], [DECODE, 1, 3]]  # no step ran in between
    assert driver.trace.sequences["r1"].waits_ns[SLOT] == 540 * MS


def test_a_tool_of_unknown_length_ends_with_resume() -> None:
    driver = fixed(make_config(), make_spec(0, max_output_tokens=4))
    stepped(driver)
    sequence = driver.trace.sequences["r0"]
    driver.scheduler.pause(sequence, None, driver.now_ns + MS)
    assert driver.step() is None and driver.scheduler.wake_ns() is None
    driver.now_ns = 100 * MS
    driver.scheduler.resume(sequence, driver.now_ns)
    assert stepped(driver).decodes == ("r0",)
    assert sequence.longest_gap_ns == 11 * MS  # 1 ms before the tool, and the step


def test_with_real_tokens_a_stop_token_or_the_maximum_ends_a_sequence() -> None:
    scheduler = Scheduler(make_config())
    spec = make_spec(0, prompt_tokens=2, prompt=(1, 2), max_output_tokens=3, stop_token_ids=(9,), stop_after_tokens=1)
    ends = []
    for tokens in ((5, 9), (5, 6, 7)):
        sequence = Sequence(spec)
        assert scheduler.submit(sequence, 0) is None
        for token in tokens:
            plan = scheduler.plan(0)
            assert plan is not None
            finished = scheduler.complete(plan, 10, [token])
        assert finished == [sequence] and tuple(sequence.output) == tokens
        ends.append(sequence.finish_reason)
    assert ends == ["stop", "length"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"prompt_tokens": 60, "max_output_tokens": 10}, "together are 70 tokens"),
        ({"prompt_tokens": 50, "max_output_tokens": 10, "request_class": "x"}, "needs 15 KV blocks, there are 12"),
        ({"max_output_tokens": 0}, "at least 1"),
        ({"prompt_tokens": 0}, "at least 1"),
    ],
)
def test_what_can_never_run_is_refused_for_good(given: dict[str, object], told: str) -> None:
    scheduler = Scheduler(make_config(kv_blocks=12))
    refusal = scheduler.submit(Sequence(make_spec(0, **given)), 0)
    assert isinstance(refusal, Refusal) and refusal.never and told in refusal.reason
    assert scheduler.waiting_count == 0


def test_contiguous_reserves_the_longest_for_each() -> None:
    config = make_config(kv_layout="contiguous", kv_blocks=40)  # 16 blocks each: two fit
    driver = fixed(config, *(make_spec(number, prompt_tokens=4) for number in range(3)))
    step = stepped(driver)
    assert step.kv_blocks_used == 32 and step.waiting == (0, 1, 0, 0, 0)
    paged = stepped(fixed(make_config(kv_blocks=40), *(make_spec(number, prompt_tokens=4) for number in range(3))))
    assert paged.kv_blocks_used == 3 and paged.waiting == (0, 0, 0, 0, 0)
