"""What the vLLM plugin reads out of vLLM's statistics: known things exactly, and nothing that they do not tell."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_stats import MS, START_NS, Details, Done, State, brought, config, reading

from phasewise.instrumented_engine.telemetry import (
    _STEP_ARRAYS,
    SCOPE,
    STEP_SPAN_NS,
    STEPS_PER_SPAN,
    WIRE_VERSION,
    RequestTelemetry,
    request_drafts,
)
from phasewise.instrumented_engine.vllm import wire
from phasewise.instrumented_engine.vllm.facts import EngineFacts, facts_of
from phasewise.instrumented_engine.vllm.readings import Finished, Reading, Step, StepReader, Unnamed, finished_of
from phasewise.instrumented_engine.vllm.settings import settings_of

SYNC = EngineFacts(details=True, asynchronous=False, kv_blocks_total=24)
BLIND = EngineFacts(details=False, asynchronous=False, kv_blocks_total=24)


def steps(facts: EngineFacts, *readings: Reading) -> list[Step]:
    reader = StepReader(facts)
    return [step for step in map(reader.read, readings) if step is not None]


def detailed(at_ms: float, *, running: int = 2, waiting: int = 0, **made_of: Any) -> Reading:
    state = State(running, waiting, iteration_details=Details(**made_of))
    return reading(at_ms, state, brought(at_ms, decoded=1))


def test_the_scheduler_says_what_a_step_was_made_of() -> None:
    state = State(3, 2, 1, kv_cache_usage=0.5, iteration_details=Details(100, 2, 2, elapsed_ms=12.5, iteration_index=7))
    (step,) = steps(SYNC, reading(50, state, brought(40, decoded=2, first=1)))
    assert step == Step(
        number=7, start_unix_ns=START_NS + round(27.5 * MS), duration_ns=round(12.5 * MS), prefill_tokens=100, decode_seqs=2,
        running=3, waiting=3, kv_blocks_used=12, preemptions=0,
    )  # fmt: skip


def test_tokens_computed_again_after_a_preemption_are_no_decoding() -> None:
    again = detailed(10, num_generation_requests=2, num_generation_tokens=41)
    assert steps(SYNC, again)[0].prefill_tokens == 39
    speculating = EngineFacts(details=True, asynchronous=False, speculative=True)
    assert steps(speculating, again)[0].prefill_tokens == 0


def test_an_engine_that_schedules_ahead_is_timed_by_its_answers() -> None:
    """There `elapsed_ms` is the wait for a step that has long been running."""
    ahead = EngineFacts(details=True, asynchronous=True)
    first, second = steps(ahead, detailed(30, num_ctx_tokens=5), detailed(50, iteration_index=1))
    assert first.duration_ns == 10 * MS
    assert second.duration_ns == pytest.approx(20 * MS, abs=1000)  # vLLM stamps in float seconds


def test_without_details_outputs_tell_and_what_they_do_not_is_unknown() -> None:
    told = steps(
        BLIND,
        reading(0, State(1), brought(0, first=1, computed=5)),  # one step did the whole prompt
        reading(20, State(2), brought(20, decoded=1)),  # another sequence runs and has no output: it is at its prompt
        reading(40, State(2), brought(40, decoded=1, first=1, computed=200)),  # 200 tokens in two steps
        reading(60, State(1), brought(60, decoded=2, finished_requests=[Done()])),
        reading(80, State(0), brought(80, decoded=1, finished_requests=[Done()])),
        reading(500, State(1), None),  # a prompt's first part, and nobody decodes
        reading(520, State(0), None),  # no step: the engine cleans up
    )
    assert [step.prefill_tokens for step in told] == [5, None, None, 0, 0, None]
    assert [step.decode_seqs for step in told] == [0, 1, 1, 2, 1, 0]
    assert [step.duration_ns for step in told] == [None, 20 * MS, 20 * MS, 20 * MS, 20 * MS, None]
    assert [step.start_unix_ns - START_NS for step in told] == [0, 0, 20 * MS, 40 * MS, 60 * MS, 500 * MS]
    assert [step.number for step in told] == list(range(6))


def test_without_details_a_step_that_tells_of_a_preemption_has_unknown_prompt_tokens() -> None:
    (step,) = steps(BLIND, reading(0, State(2), brought(0, decoded=2, num_preempted_reqs=1)))
    assert (step.prefill_tokens, step.preemptions) == (None, 1)


def test_what_is_no_step_or_only_a_share_of_one_makes_none() -> None:
    several = EngineFacts(details=False, one_front_end=False)
    assert steps(several, reading(0, State(2), brought(0, decoded=1))) == []
    dummy = State(0, iteration_details=Details(is_dummy=True))
    assert steps(SYNC, reading(0, dummy, None), reading(1, None, brought(1)), reading(2, State(1), None)) == []


def test_a_finished_request_has_the_times_of_vllms_own_span() -> None:
    (done,) = finished_of(reading(9, State(), brought(2000, finished_requests=[Done()])))
    assert done == Finished(
        request_id="cmpl-1-0", arrival_unix_ns=START_NS + 500 * MS, finished_unix_ns=START_NS + 2000 * MS, input_tokens=20,
        cached_tokens=16, output_tokens=8, preemptions=0, finish_reason="length",
    )  # fmt: skip
    with pytest.raises(Unnamed):
        finished_of(reading(9, State(), brought(0, finished_requests=[Done(request_id=None)])))


def test_the_configuration_is_read_and_what_it_lacks_is_unknown() -> None:
    assert facts_of(config(), 0) == EngineFacts(
        model="m",
        kv_blocks_total=24,
        details=True,
        asynchronous=False,
        one_front_end=True,
        speculative=False,
        traced=True,
    )
    two = facts_of(config(parallel_config={"data_parallel_size": 2}, cache_config={"num_gpu_blocks": 50}), 1)
    assert (two.engine_index, two.kv_blocks_total) == (1, 24)
    assert facts_of(config(cache_config={"num_gpu_blocks": 25}, parallel_config={"data_parallel_size": 2}), 0).kv_blocks_total is None  # fmt: skip
    assert facts_of(config(lora_config=object()), 0).model is None  # an adapter's requests have its name
    set_so = facts_of(config(scheduler_config={"max_num_seqs": 8}, cache_config={"enable_prefix_caching": True}), 0)
    assert set_so.settings == {"phasewise.max_num_seqs": 8, "phasewise.prefix_caching": True}
    bare = facts_of(object(), 0)
    assert (bare.model, bare.kv_blocks_total, bare.details, bare.asynchronous, bare.traced) == (
        None,
        None,
        False,
        True,
        False,
    )


def test_the_words_are_those_of_the_wire_format() -> None:
    assert (wire.SCOPE, wire.WIRE_VERSION) == (SCOPE, WIRE_VERSION)
    assert (wire.STEPS_PER_SPAN, wire.STEP_SPAN_NS) == (STEPS_PER_SPAN, STEP_SPAN_NS)
    assert set(wire.ARRAYS) - set(_STEP_ARRAYS.values()) == {"waiting"}
    request = Finished(
        request_id="r", arrival_unix_ns=START_NS, finished_unix_ns=START_NS + 5 * MS, input_tokens=3, cached_tokens=0,
        output_tokens=2, preemptions=1, finish_reason="stop",
    )  # fmt: skip
    made = wire.request_draft(request, "m", b"i", 0)
    ours, *_ = request_drafts(
        RequestTelemetry(
            trace_id=made.trace_id.to_bytes(16, "big"), span_id=made.span_id.to_bytes(8, "big"), request_id="r", model="m",
            arrival_unix_ns=START_NS, finished_unix_ns=START_NS + 5 * MS, input_tokens=3, cached_tokens=0, output_tokens=2,
            preemptions=1, finish_reason="stop", supplement=True,
        )
    )  # fmt: skip
    assert (made.name, made.server, made.attributes) == (ours.name, ours.server, dict(ours.attributes))


def test_step_spans_are_cut_where_other_things_are_known_and_where_numbers_are_missing() -> None:
    def step(number: int, prefill: int | None, at_s: float = 0.0) -> Step:
        return Step(
            number=number, start_unix_ns=START_NS + round(at_s * 1e9), duration_ns=5 * MS, prefill_tokens=prefill
        )

    drafts = wire.step_drafts(
        [step(0, 1), step(1, 2), step(2, None), step(3, 3), step(5, 3), step(6, 3, at_s=1.0)], 24, b"i"
    )
    firsts = [draft.attributes["phasewise.step.first"] for draft in drafts]
    assert firsts == [0, 2, 3, 5, 6]
    assert [draft.attributes.get("phasewise.step.prefill_tokens") for draft in drafts] == [[1, 2], None, [3], [3], [3]]
    assert all("phasewise.step.running" not in draft.attributes for draft in drafts)
    assert len({draft.span_id for draft in drafts}) == 5 and len({draft.trace_id for draft in drafts}) == 1
    many = wire.step_drafts([step(n, 0) for n in range(600)], None, b"i")
    assert [len(draft.attributes["phasewise.step.prefill_tokens"]) for draft in many] == [256, 256, 88]  # type: ignore[arg-type]


def test_a_restart_under_the_same_name_repeats_no_id() -> None:
    def ids(instance: bytes) -> set[int]:
        drafts = wire.step_drafts([Step(number=0, start_unix_ns=START_NS)], None, instance)
        return {draft.span_id for draft in drafts} | {draft.trace_id for draft in drafts}

    assert not ids(b"first") & ids(b"second")


def test_settings_come_from_the_environment_and_a_wrong_one_is_named() -> None:
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"}
    assert settings_of(named).endpoint == "http://b"
    assert settings_of({}).endpoint is None
    assert settings_of(named | {"PHASEWISE_VLLM": "off"}).endpoint is None
    assert settings_of(named | {"OTEL_SDK_DISABLED": "true"}).endpoint is None
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        settings_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon"})
    with pytest.raises(ValueError, match="PHASEWISE_VLLM_QUEUE"):
        settings_of({"PHASEWISE_VLLM_QUEUE": "3"})
