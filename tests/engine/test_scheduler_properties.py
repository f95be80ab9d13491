"""What holds for any settings and any traffic. `Driver` audits every step: blocks, budgets, counts; here is what holds over a run."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_workloads import cancels, configs, requests
from scheduling import Driver, Trace
from thorough import examples

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.instrumented_engine.telemetry import DECODE

runs = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def expected_tokens(spec: RequestSpec) -> int:
    stop = spec.stop_after_tokens
    return spec.max_output_tokens if stop is None else min(stop, spec.max_output_tokens)


def kept(trace: Trace) -> list[Sequence]:
    return [sequence for sequence in trace.sequences.values() if sequence.finish_reason != "abort"]


@runs
@given(configs(), requests(), cancels())
def test_what_holds_over_any_run(config: EngineConfig, specs: list[RequestSpec], stops: list[tuple[int, str]]) -> None:
    driver = Driver(config)
    trace = driver.run(specs, stops)
    assert driver.scheduler.waiting_count == driver.scheduler.running_count == 0
    assert driver.scheduler.pool.used_blocks == 0
    assert len(trace.sequences) + len(trace.refused) == len(specs)
    all_get_what_they_asked_for(trace)
    reasons_add_up_to_the_wait(trace)
    times_and_segments_tell_what_happened(trace)
    first_come_first_served_within_a_class(config, trace)
    waiting_counts_tell_the_truth(config, trace)
    the_window_is_kept(config, trace)


def all_get_what_they_asked_for(trace: Trace) -> None:
    assert all(refusal.never for refusal in trace.refused.values())  # nothing here limits the queue
    for sequence in kept(trace):
        assert sequence.output_tokens == expected_tokens(sequence.spec)
        assert (sequence.finish_reason == "stop") == (
            sequence.spec.stop_after_tokens is not None
            and sequence.spec.stop_after_tokens <= sequence.spec.max_output_tokens
        )


def reasons_add_up_to_the_wait(trace: Trace) -> None:
    for sequence in kept(trace):
        assert min(sequence.waits_ns) >= 0
        assert sum(sequence.waits_ns) == trace.expected_wait_ns(sequence)


def times_and_segments_tell_what_happened(trace: Trace) -> None:
    for sequence in kept(trace):
        name = sequence.spec.request_id
        mine = [
            (step, [chunk for chunk in step.chunks if chunk[0] == name])
            for step in trace.steps
            if name in step.decodes or any(chunk[0] == name for chunk in step.chunks)
        ]
        got = [step.end_ns for step, chunks in mine if not chunks or chunks[0][3]]
        assert sequence.queued_ns == sequence.spec.arrival_ns
        assert sequence.scheduled_ns == mine[0][0].start_ns
        assert sequence.prefilled_ns == sequence.first_token_ns == got[0]
        assert sequence.last_token_ns == sequence.finished_ns == got[-1]
        assert sequence.output_tokens == len(got)
        tools = trace.tools_ns.get(name, [])
        gaps = [
            after - before - sum(end - start for start, end in tools if start == before)
            for before, after in pairwise(got)
        ]
        assert sequence.longest_gap_ns == max(gaps, default=0)
        first = [(step.start_ns, step.end_ns) for step, chunks in mine if chunks and step.end_ns <= got[0]]
        assert sequence.chunks == first
        told = [(number, phase) for phase, start, end in sequence.segments for number in range(start, end + 1)]
        assert told == [(step.number, DECODE if not chunks else 3 if chunks[0][4] else 1) for step, chunks in mine]
        joined = pairwise(sequence.segments)
        assert all(before[0] != after[0] or before[2] + 1 < after[1] for before, after in joined)
        assert sequence.preemptions == len(trace.preempted_ns.get(name, []))
        if not sequence.preemptions:
            computed = sum(chunks[0][2] for _, chunks in mine if chunks)
            assert computed + (sequence.cached_tokens or 0) == sequence.spec.prompt_tokens


def first_come_first_served_within_a_class(config: EngineConfig, trace: Trace) -> None:
    last: dict[tuple[object, ...], int] = {}
    for sequence in trace.sequences.values():  # in order of submission
        if sequence.scheduled_ns is None:
            continue
        spec = sequence.spec
        share = config.tenants.get(spec.tenant or "")
        reserved = share is not None and share.reserved_slots > 0
        key = (
            spec.request_class if config.pools else None,
            spec.priority if config.order == "priority" else None,
            spec.tenant if config.order == "fair" or reserved else None,
        )
        assert sequence.scheduled_ns >= last.get(key, 0)
        last[key] = sequence.scheduled_ns


@runs
@given(configs(), requests(), cancels())
def test_the_same_input_gives_the_same_run(
    config: EngineConfig, specs: list[RequestSpec], stops: list[tuple[int, str]]
) -> None:
    one, two = (Driver(config).run(specs, stops) for _ in range(2))
    assert one.steps == two.steps
    assert [sequence.waits_ns for sequence in one.sequences.values()] == [
        sequence.waits_ns for sequence in two.sequences.values()
    ]


@runs
@given(configs(), requests(real=True), cancels(), st.booleans())
def test_memory_holds_the_own_tokens_of_each_sequence(
    config: EngineConfig, specs: list[RequestSpec], stops: list[tuple[int, str]], again: bool
) -> None:
    """The driver writes every token's prefix into the blocks and reads all of it back before each step; `again`: the answers
    come back as prompts, so that generated blocks are shared too."""
    driver = Driver(config, real=True)
    trace = driver.run(specs, stops)
    if again:
        later = []
        for sequence in kept(trace):
            assert sequence.spec.prompt is not None
            prompt = (*sequence.spec.prompt, *sequence.output)
            if len(prompt) + 2 <= config.max_model_tokens:
                later.append(
                    RequestSpec(
                        request_id="2" + sequence.spec.request_id,
                        arrival_ns=driver.now_ns,
                        prompt_tokens=len(prompt),
                        prompt=prompt,
                        max_output_tokens=2,
                        request_class=sequence.spec.request_class,
                    )
                )
        driver.run(later)
    answers = {sequence.spec.request_id: tuple(sequence.output) for sequence in kept(trace)}
    plain = Driver(EngineConfig(prefix_sharing=False, max_model_tokens=64, block_tokens=4), real=True)
    for name, sequence in plain.run([sequence.spec for sequence in kept(trace)]).sequences.items():
        assert tuple(sequence.output) == answers[name]  # whatever was shared, cut or put back


def waiting_counts_tell_the_truth(config: EngineConfig, trace: Trace) -> None:
    """Nobody is said to lack what is there."""
    for step in trace.steps:
        slot, kv, budget, window, policy = step.waiting
        ran_out = any(step.start_ns in times for times in trace.preempted_ns.values())
        if ran_out and not config.preempt_for_priority and not config.pools:
            assert not any(step.start_ns in times for times in trace.entered_ns.values())
        if config.batching == "continuous":
            assert not slot or step.slots_reserved == config.max_num_seqs
        used = sum(chunk[2] for chunk in step.chunks)
        left = config.step_token_budget - used - len(step.decodes)
        prefill_left = (config.max_prefill_tokens or 10**9) - used
        if config.chunked_prefill and not config.pools:
            assert not budget or min(left, prefill_left) <= 0
        assert not window or config.batching_window_s
        assert not policy or config.pools or config.tenants or config.preempt_for_priority
        if kv and not step.preempted and not config.pools:
            holds_back = any(step.start_ns >= at for times in trace.preempted_ns.values() for at in times)
            assert holds_back or step.kv_blocks_used > 0


def the_window_is_kept(config: EngineConfig, trace: Trace) -> None:
    """Newcomers enter when the oldest of them has waited as long as the window, or when they fill the seats."""
    if not config.batching_window_s or config.pools or trace.preempted_ns:
        return
    for step in trace.steps:
        entered = [sequence for sequence in trace.sequences.values() if sequence.scheduled_ns == step.start_ns]
        seated = step.slots_reserved - len(entered)
        if not entered or (config.batching == "static" and seated):
            continue
        ages = [
            step.start_ns - sequence.queued_ns
            for sequence in trace.sequences.values()
            if sequence.queued_ns is not None
            and sequence.queued_ns <= step.start_ns
            and (sequence.finished_ns is None or sequence.finished_ns > step.start_ns)
            and (sequence.scheduled_ns is None or sequence.scheduled_ns >= step.start_ns)
        ]
        fills = len(entered) + sum(step.waiting) >= config.max_num_seqs - seated
        assert fills or max(ages) >= config.batching_window_s * 1e9
