"""The loop: context stages, tools, cancels and refusals around the scheduler, on a virtual clock with steps of one millisecond."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.plan import StepOutcome, StepPlan
from phasewise.instrumented_engine.request_telemetry import request_telemetry
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence, State, ToolCall
from phasewise.instrumented_engine.simulation import VirtualClock
from phasewise.instrumented_engine.telemetry import request_drafts

MS = 1_000_000
CONFIG = EngineConfig(max_num_seqs=4, kv_blocks=64, max_model_tokens=512)


class Millisecond:
    """Every step takes one."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        return StepOutcome(MS)


def make_core(config: EngineConfig = CONFIG, finished: Callable[[Sequence], None] | None = None) -> EngineCore:
    return EngineCore(config, Millisecond(), VirtualClock(), on_finished=finished, meter_ns=None)


def make_spec(name: str = "r", **given: object) -> RequestSpec:
    plain = RequestSpec(request_id=name, arrival_ns=0, prompt_tokens=20, max_output_tokens=64, stop_after_tokens=5)
    return dataclasses.replace(plain, **given)  # type: ignore[arg-type]


def ran(*specs: RequestSpec, config: EngineConfig = CONFIG) -> dict[str, Sequence]:
    core = make_core(config)
    core.run(specs)
    return {one.spec.request_id: one for one in core.recording.finished}


def test_a_request_alone_takes_one_step_for_its_prompt_and_one_a_further_token() -> None:
    one = ran(make_spec())["r"]
    assert (one.queued_ns, one.scheduled_ns, one.first_token_ns, one.finished_ns) == (0, 0, MS, 5 * MS)
    assert one.output_tokens == 5 and one.finish_reason == "stop"


def test_the_context_stage_stands_before_the_queue() -> None:
    one = ran(make_spec(context_ns=7 * MS))["r"]
    assert one.queued_ns == one.scheduled_ns == 7 * MS
    phases = {
        draft.name: draft.end_unix_ns - draft.start_unix_ns for draft in request_drafts(request_telemetry(one, "m"))[1:]
    }
    assert phases["context"] == 7 * MS and phases["queue"] == 0


def test_tools_before_inside_and_after_the_stream_are_external_and_stop_nobody_else() -> None:
    tools = (ToolCall(0, 3 * MS), ToolCall(2, 10 * MS), ToolCall(None, 4 * MS))
    both = ran(make_spec("with", tools=tools), make_spec("without"))
    one, other = both["with"], both["without"]
    assert one.external == [(0, 3 * MS), (5 * MS, 15 * MS), (18 * MS, 22 * MS)]
    assert one.finished_ns == 22 * MS and one.last_token_ns == 18 * MS
    assert one.longest_gap_ns == MS, "the tool's time is no gap of the engine"
    assert other.finished_ns == 5 * MS


def test_a_paused_request_keeps_its_seat() -> None:
    tools = (ToolCall(2, 10 * MS),)
    both = ran(make_spec("first", tools=tools), make_spec("second"), config=dataclasses.replace(CONFIG, max_num_seqs=1))
    assert both["second"].scheduled_ns == both["first"].finished_ns == 15 * MS


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_ends_now_wherever_it_stands(steps: int) -> None:
    ended: list[Sequence] = []
    core = make_core(finished=ended.append)
    core.submit(make_spec())
    for _ in range(steps):
        assert core.step()
    assert core.cancel("r") and not core.cancel("r") and not core.cancel("nobody")
    assert [one.finish_reason for one in ended] == ["abort"]
    assert ended[0].finished_ns == steps * MS and ended[0].output_tokens == steps
    assert core.scheduler.pool.free_blocks == 64 and not core.step() and core.live_count == 0


def test_a_request_cancelled_in_its_context_stage_never_reaches_the_queue() -> None:
    core = make_core()
    core.submit(make_spec(context_ns=5 * MS))
    core.cancel("r")
    core.run([make_spec("other", arrival_ns=9 * MS)])
    given_up, other = core.recording.finished
    assert given_up.queued_ns is None and given_up.finish_reason == "abort"
    assert other.scheduled_ns == 9 * MS


def test_a_refusal_is_told_at_once_or_after_the_context_stage() -> None:
    config = dataclasses.replace(CONFIG, max_num_seqs=1, max_waiting=1)
    core = make_core(config)
    assert isinstance(core.submit(make_spec("a")), Sequence)
    core.step()
    assert isinstance(core.submit(make_spec("b", arrival_ns=MS)), Sequence)
    refused = core.submit(make_spec("c", arrival_ns=MS))
    assert isinstance(refused, Refusal) and refused.retry_after_s > 0 and not refused.never
    core.submit(make_spec("d", arrival_ns=MS, context_ns=MS))
    core.run([])
    late = next(one for one in core.recording.finished if one.spec.request_id == "d")
    assert (
        late.state is State.FINISHED and late.finish_reason == "refused" and "the queue is full" in (late.error or "")
    )
    assert [spec.request_id for spec, _ in core.recording.refused] == ["c", "d"]


def test_a_request_that_can_never_run_is_refused_for_good() -> None:
    refused = make_core().submit(make_spec(prompt_tokens=600))
    assert isinstance(refused, Refusal) and refused.never and "664 tokens, the most is 512" in refused.reason


def test_the_recording_holds_what_each_step_was_made_of() -> None:
    core = make_core()
    core.run([make_spec("a"), make_spec("b", arrival_ns=2 * MS, prompt_tokens=30)])
    columns = core.recording.step_columns()
    assert columns["start_ns"].tolist() == [n * MS for n in range(7)]
    assert columns["prefill_tokens"].tolist() == [20, 0, 30, 0, 0, 0, 0]
    assert columns["prefill_pairs"].tolist()[:3] == [210, 0, 465]
    assert columns["decode_sequences"].tolist() == [0, 1, 1, 2, 2, 1, 1]
    assert columns["context_tokens"].tolist()[:4] == [0, 21, 22, 23 + 31]
    assert columns["running"].tolist() == [1, 1, 2, 2, 2, 1, 1]
    chunks = core.recording.chunk_columns()
    assert list(zip(chunks["step"], chunks["request"], chunks["new_tokens"], strict=True)) == [(0, 0, 20), (2, 1, 30)]
    assert core.recording.telemetry()[0].schedule_ns is None, "nobody measured it on a virtual clock"


def test_the_schedulers_own_time_is_measured_where_time_is_real() -> None:
    ticks = iter(range(0, 10_000, 7))
    core = EngineCore(CONFIG, Millisecond(), VirtualClock(), meter_ns=lambda: next(ticks))
    core.run([make_spec()])
    assert [step.schedule_ns for step in core.recording.telemetry()] == [14] * 5, "planning, and booking what was done"
