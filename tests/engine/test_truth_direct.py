"""Direct effects against arithmetic on steps made of known parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truth_laws import MS, START_NS, PartsLaw, spec

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.recording import STEP_COLUMNS, Recording
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence, ToolCall
from phasewise.instrumented_engine.truth.direct import RESOURCES, direct_effects, left_over_s
from phasewise.instrumented_engine.truth.parts import AFTER, FIRST, TOKENS
from phasewise.instrumented_engine.truth.run import Run, recorded, run

CONFIG = EngineConfig(kv_blocks=10_000, step_token_budget=10_000, max_model_tokens=10_000)
EVERYTHING = PartsLaw(
    weights_s=4e-3, host_s=2e-3, communication_s=1e-3, token_s=1e-5, context_s=1e-6, cold_s=5e-3, cold_steps=2
)


def ran(law: PartsLaw, *specs: RequestSpec, config: EngineConfig = CONFIG) -> Run:
    return run(config, law, specs, seed=0)


def test_a_request_alone_gains_exactly_what_each_resource_took() -> None:
    one = ran(EVERYTHING, spec(0, 0, prompt=1000, output=5))
    effects = direct_effects(one)
    prompt = {name: float(effects.prompt[name][FIRST, 0]) for name in RESOURCES}
    token = {name: float(effects.token[name][TOKENS, 0]) for name in RESOURCES}
    assert prompt == pytest.approx(
        {
            "compute": 0.01,
            "weight_bytes": 4e-3,
            "kv_bytes": 0,
            "host": 2e-3,
            "communication": 1e-3,
            "cold_start": 5e-3,
            "others_prefill": 0,
            "context": 0,
            "external": 0,
        }
    )
    contexts = 1001 + 1002 + 1003 + 1004
    assert token["kv_bytes"] == pytest.approx(contexts * 1e-6)
    assert token["compute"] == pytest.approx(4e-5)
    assert token["weight_bytes"] == pytest.approx(16e-3)
    assert token["cold_start"] == pytest.approx(5e-3)  # of the second step; the third is warm
    served = one.served[0]
    assert served.finished_ns is not None
    e2e_s = (served.finished_ns - served.spec.arrival_ns) / 1e9
    assert sum(prompt.values()) + sum(token.values()) == pytest.approx(e2e_s, abs=1e-8)


def test_others_prompts_cost_the_one_that_decodes_their_tokens_and_the_one_that_prefills_nothing() -> None:
    law = PartsLaw(weights_s=0.01, token_s=1e-4)
    # The second comes in the middle of the first one's third step, so its prompt is part of the fourth.
    one = ran(law, spec(0, 0, prompt=10, output=8), spec(1, 0.026, prompt=500, output=2))
    effects = direct_effects(one)
    others = effects.of("others_prefill")
    assert others[TOKENS, 0] == pytest.approx(500 * 1e-4)
    assert others[FIRST, 0] == 0
    # The step that ran at its arrival held no prompt, and its own step no other one.
    assert others[FIRST, 1] == 0
    # Compute of the first one's tokens in that step is its own and the batch's, not the prompt's.
    assert effects.token["compute"][TOKENS, 0] == pytest.approx(8 * 1e-4)


def test_two_prompts_in_one_step_delay_each_other_by_their_own_tokens() -> None:
    one = ran(PartsLaw(token_s=1e-4), spec(0, 0, prompt=300, output=1), spec(1, 0, prompt=100, output=1))
    effects = direct_effects(one)
    assert effects.of("others_prefill")[FIRST] == pytest.approx([0.01, 0.03])
    assert effects.prompt["compute"][FIRST] == pytest.approx([0.03, 0.01])


def test_the_wait_for_the_running_step_gains_its_share_of_that_steps_saving() -> None:
    law = PartsLaw(weights_s=0.01, token_s=1e-4)
    one = ran(law, spec(0, 0, prompt=400, output=2), spec(1, 0.04, prompt=10, output=1))
    # The first step takes 10 + 40 ms; the second request comes after 40 of them, and waits the last fifth.
    effects = direct_effects(one)
    assert effects.prompt["weight_bytes"][FIRST, 1] == pytest.approx(0.01 + 0.2 * 0.01)
    assert effects.of("others_prefill")[FIRST, 1] == pytest.approx(0.2 * 0.05)  # nothing else was in that step


def test_a_step_between_own_chunks_counts_whole_as_others_prompts() -> None:
    """Steps 0 and 2 hold the first one's chunks, step 1 the whole prompt of the second; written down by hand."""
    recording = Recording(kv_blocks_total=100)
    rows = [(0, 0, 0, 50, 0), (1, 1, 0, 80, 1), (2, 0, 50, 50, 1)]  # step, request, past, new, last
    for step, _, past, new, last in rows:
        values = {"start_ns": START_NS + step * 10 * MS, "duration_ns": 10 * MS, "prefill_tokens": new, "chunks": 1}
        values |= {"prefill_pairs": new * past + new * (new + 1) // 2, "prefill_past_tokens": past, "last_chunks": last}
        recording.steps.append(tuple(values.get(name, 0) for name in STEP_COLUMNS))
    recording.chunks = [(*row, 0) for row in rows]
    specs = (spec(0, 0, prompt=100, output=1), spec(1, 0, prompt=80, output=1))
    for index, (segments, first_token) in enumerate([([[1, 0, 0], [1, 2, 2]], 30), ([[1, 1, 1]], 20)]):
        one = Sequence(specs[index], index)
        one.queued_ns, one.scheduled_ns = START_NS + 6 * MS * index, START_NS + 10 * MS * index
        one.segments, one.output_tokens = segments, 1
        one.first_token_ns = one.last_token_ns = one.finished_ns = START_NS + first_token * MS
        recording.finished.append(one)
    effects = direct_effects(recorded(specs, recording, PartsLaw(host_s=0.01)))
    # The second was queued after six of step 0's ten milliseconds and waited for the rest of it.
    assert effects.of("others_prefill")[FIRST] == pytest.approx([0.01, 0.004])
    assert effects.of("host")[FIRST] == pytest.approx([0.03, 0.014])
    # The same gap after a preemption is a wait of its own, not part of the steps it was in.
    effects = direct_effects(recorded(specs, recording, PartsLaw(host_s=0.01), preempted=[(1, 0)]))
    assert effects.of("others_prefill")[FIRST, 0] == 0
    assert effects.of("host")[FIRST, 0] == pytest.approx(0.02)


def test_context_and_tools_are_as_long_as_they_were_and_lie_where_they_were() -> None:
    tools = (ToolCall(0, 10**8), ToolCall(2, 2 * 10**8), ToolCall(None, 3 * 10**8))
    one = ran(PartsLaw(weights_s=0.01), spec(0, 0, prompt=10, output=5, context_s=0.5, tools=tools))
    effects = direct_effects(one)
    assert effects.of("context")[:, 0] == pytest.approx([0.5, 0, 0])
    external = effects.of("external")
    assert [external[part, 0] for part in (FIRST, TOKENS, AFTER)] == pytest.approx([0.1, 0.2, 0.3])
    assert effects.of("weight_bytes").sum() == pytest.approx(0.05)  # the pause for the tool is no step of its own


def test_the_wait_for_the_running_step_after_a_tool_gains_its_share_too() -> None:
    """The tool of the first ends while the second one's prompt is computed, 10 + 40 ms and nothing else: it waits the last 30."""
    law = PartsLaw(weights_s=0.01, token_s=1e-4)
    tool = ToolCall(1, 95 * MS)
    one = ran(law, spec(0, 0, prompt=50, output=3, tools=(tool,)), spec(1, 0.06, prompt=400, output=1))
    # Step 0 ends at 15 ms, the tool at 110; step 1 runs from 60 to 110.
    effects = direct_effects(one)
    assert effects.token["others_prefill"][TOKENS, 0] == 0  # it comes back in the very moment the step ends
    one = ran(law, spec(0, 0, prompt=50, output=3, tools=(tool,)), spec(1, 0.09, prompt=400, output=1))
    effects = direct_effects(one)
    assert effects.token["others_prefill"][TOKENS, 0] == pytest.approx(0.6 * 0.05)
    assert effects.token["weight_bytes"][TOKENS, 0] == pytest.approx(0.6 * 0.01 + 2 * 0.01)


def test_who_comes_in_the_moment_of_a_plan_waits_for_no_running_step() -> None:
    """Two at once and one seat: what the second waits is for the seat, from the first moment on."""
    config = EngineConfig(kv_blocks=10_000, max_num_seqs=1, max_model_tokens=10_000)
    one = ran(PartsLaw(token_s=1e-4), spec(0, 0, prompt=300, output=2), spec(1, 0, prompt=100, output=1), config=config)
    assert not direct_effects(one).of("others_prefill").any()


def test_a_turn_that_does_not_come_is_part_of_the_decode() -> None:
    """A budget of two, and three that decode since the first is back from its tool: each sits out now and then."""
    config = EngineConfig(kv_blocks=10_000, step_token_budget=2, max_model_tokens=10_000, prefix_sharing=False)
    tool_s = 0.0345
    first = spec(0, 0, prompt=1, output=9, tools=(ToolCall(1, round(tool_s * 1e9)),))
    one = ran(PartsLaw(host_s=0.01), first, *(spec(k, 0, prompt=1, output=12) for k in (1, 2)), config=config)
    effects = direct_effects(one)
    sat_out_s = 0.0
    for row, sequence in enumerate(one.served):
        assert sequence.first_token_ns is not None and sequence.last_token_ns is not None
        between_s = (sequence.last_token_ns - sequence.first_token_ns) / 1e9 - (0.0 if row else tool_s)
        assert effects.token["host"][TOKENS, row] == pytest.approx(between_s)
        assert effects.prompt["host"][TOKENS, row] == 0
        sat_out_s += between_s - 0.01 * (sequence.output_tokens - 1)
    assert sat_out_s > 0.05


@given(
    st.lists(
        st.tuples(st.floats(0, 0.3), st.integers(1, 300), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    st.integers(2, 6),
)
@settings(max_examples=60, deadline=None)
def test_taking_everything_away_leaves_nothing(rows: list[tuple[float, int, int]], seats: int) -> None:
    """With parts that add up, so do the effects: to all the time in steps, for every request and part."""
    law = PartsLaw(weights_s=4e-3, host_s=2e-3, communication_s=1e-3, token_s=1e-5, cold_s=1e-2, cold_steps=3)
    specs = [spec(number, at, prompt, output) for number, (at, prompt, output) in enumerate(sorted(rows))]
    config = EngineConfig(kv_blocks=10_000, step_token_budget=10_000, max_model_tokens=10_000, max_num_seqs=seats)
    one = run(config, law, specs, seed=0)
    effects = direct_effects(one)
    assert all((effects.of(name) >= 0).all() for name in RESOURCES)
    total = sum((effects.of(name) for name in RESOURCES), start=np.zeros((3, len(specs))))
    steps_s = left_over_s(one)
    assert total[TOKENS] == pytest.approx(steps_s[TOKENS], abs=1e-7)
    assert (total[FIRST] >= steps_s[FIRST] - 1e-7).all()  # the share of the step that ran at arrival comes on top
