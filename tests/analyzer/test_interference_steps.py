"""Whose prompts took the time that requests lost, by the steps of their engine."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from interference import divided, linear_steps, sight
from step_contexts import RULES, Steps, booked, recorded_context, stepped_context, stepped_request, warm

from phasewise.analyzer.blame import Axis, closed
from phasewise.analyzer.interference_ledger import ledger_of
from phasewise.collector.records import Request
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall
from phasewise.instrumented_engine.simulation import Setup, simulate


def test_prompts_in_one_step_share_what_a_decode_lost_by_what_each_adds() -> None:
    """600 + 200 tokens make the step 40 ms longer for the sequence that decodes in it: 30 ms and 10 ms."""
    steps = linear_steps()
    begun = steps.ran(0.015, prefill=100)
    warm(steps, 30)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800, sequences=1, context=500)
    last = warm(steps, 20, sequences=3, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100, tenant="chat")
    long = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=600, tenant="rag")
    short = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=200, tenant="chat")
    context = stepped_context([held, long, short], steps.rows)
    lost = divided(sight(context), [held, long, short])[held.request_key]
    whole = round(booked(context, held)["interference"] * 1e9)
    assert whole == pytest.approx(40e6, rel=0.02)
    assert sum(lost) == whole and lost[0] == 0 and lost[3] == 0
    assert lost[1] / lost[2] == pytest.approx(3.0, rel=0.02)
    # In the step of its own prompt each waits for the other's tokens, and for no other's.
    shared = divided(sight(context), [held, long, short])
    assert shared[long.request_key] == [0, 0, sum(shared[long.request_key]), 0]
    assert sum(shared[long.request_key]) == pytest.approx(10e6, rel=0.05)
    assert shared[short.request_key] == [0, sum(shared[short.request_key]), 0, 0]
    assert sum(shared[short.request_key]) == pytest.approx(30e6, rel=0.05)
    ledger = ledger_of([sight(context)])
    assert ledger.inferred_ns == 0 and ledger.measured_ns == ledger.lost_ns
    assert ledger.pairs[("rag", None), ("chat", None)][2] == 2
    assert ledger.culprits[0]["request_key"] == long.request_key and ledger.culprits[0]["victims"] == 2
    assert ledger.culprits[0]["input_tokens"] == 600 and ledger.culprits[0]["provenance"] == "measured"


def crowded() -> tuple[Steps, Request, Request, tuple[int, int]]:
    """A step of 800 prompt tokens beside a decode: who decodes, a prompt with 200 of them, and the step and the last one."""
    steps = linear_steps()
    begun = steps.ran(0.015, prefill=100)
    warm(steps, 30)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800, sequences=1, context=500)
    last = warm(steps, 20, sequences=3, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100)
    short = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=200)
    return steps, held, short, (both, last)


def test_prompt_tokens_of_nobody_in_sight_are_unnamed() -> None:
    """Of 800 tokens in the step the steps' requests have 200: three quarters of the loss are of a request that is still open."""
    steps, held, short, _ = crowded()
    lost = divided(sight(stepped_context([held, short], steps.rows)), [held, short])[held.request_key]
    assert lost[0] == 0 and lost[2] / sum(lost) == pytest.approx(0.75, rel=0.02)


def test_a_request_whose_steps_nobody_tells_is_found_by_its_prefill() -> None:
    steps, held, short, (both, last) = crowded()
    mute = replace(stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=600), segments=None)
    found = sight(stepped_context([held, short, mute], steps.rows))
    lost = divided(found, [held, short, mute])[held.request_key]
    assert lost[0] == 0 and lost[3] == 0
    assert lost[2] / lost[1] == pytest.approx(3.0, rel=0.02)
    told = {str(one["request_key"]): one["provenance"] for one in ledger_of([found]).culprits}
    # Of what the mute one itself lost in that step only the overlap tells.
    assert told[mute.request_key] == "inferred" and told[short.request_key] == "mixed"


def test_a_prompt_that_waits_for_its_turn_loses_it_to_the_prompts_that_ran_meanwhile() -> None:
    """Between its two chunks of 300 tokens lie two steps of 40 ms and 20 ms with others' prompts, and one without any prompt."""
    steps = linear_steps()
    first = steps.ran(0.025, prefill=300)
    one = steps.ran(0.040, prefill=600)
    bare = steps.ran(0.010, sequences=1, context=500)
    other = steps.ran(0.020, prefill=200)
    second = steps.ran(0.025, prefill=300)
    last = warm(steps, 20, sequences=3, context=1500)
    waits = stepped_request(steps, [(1, first, first), (1, second, second), (2, second + 1, last)], input_tokens=600)
    large = stepped_request(steps, [(1, one, one), (2, bare, bare), (2, second + 1, last)], input_tokens=600)
    small = stepped_request(steps, [(1, other, other), (2, second + 1, last)], input_tokens=200)
    rows = [waits, large, small]
    context = stepped_context(rows, steps.rows)
    lost = divided(sight(context), rows)[waits.request_key]
    assert lost == pytest.approx([0, 40e6, 20e6, 0], abs=2)
    assert sum(lost) == round(booked(context, waits)["interference"] * 1e9)


def arrivals(count: int, rate_per_s: float) -> list[RequestSpec]:
    """Prompts and answers of all lengths; each third request calls a tool."""
    chance = random.Random(7)
    at_s, found = 0.0, []
    for number in range(count):
        at_s += chance.expovariate(rate_per_s)
        output = chance.randrange(2, 120)
        tools = (ToolCall(chance.randrange(output), chance.randrange(1, 400) * 10**6),) if number % 3 == 0 else ()
        found.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_ns=round(at_s * 1e9),
                prompt_tokens=chance.randrange(1, 3000),
                max_output_tokens=output,
                tools=tools,
            )
        )
    return found


@pytest.mark.parametrize(
    ("config", "rate_per_s"),
    [
        (EngineConfig(max_num_seqs=16, step_token_budget=512, kv_blocks=700), 8.0),
        (EngineConfig(max_num_seqs=8, step_token_budget=2048, max_prefill_tokens=128), 20.0),
    ],
)
def test_of_a_run_every_lost_second_is_found_again_in_its_steps(
    config: EngineConfig, rate_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue, prefill and decode one by one: what steps took is what attribution books, or more where it had to cut a phase."""
    at = Deployment(gpu=RULES.gpus["h100-sxm"], model=RULES.models["llama-3.1-8b"])
    recording = simulate(Setup(config, at), arrivals(120, rate_per_s), seed=7)
    rows, _, context = recorded_context(recording, "llama-3.1-8b", {"accelerator": "h100-sxm", "model": "llama-3.1-8b"})
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def noted(axis: Axis, asked: np.ndarray, whole: np.ndarray) -> Axis:
        place = axis.losses.part * asked.shape[1] + axis.losses.victim
        seen.append((np.bincount(place, weights=axis.lost_s(), minlength=asked.size), asked.reshape(-1)))
        return closed(axis, asked, whole)

    monkeypatch.setattr("phasewise.analyzer.interference_sights.closed", noted)
    found = sight(context)
    ((raw, asked),) = seen
    assert (raw >= asked - 1e-7).all() and raw.sum() <= 1.02 * asked.sum()
    assert np.isclose(raw, asked, atol=1e-7).mean() > 0.95
    each = divided(found, rows)
    assert sum(lost[-1] for lost in each.values()) == 0  # all of its requests are in sight
    assert sum(map(sum, each.values())) > 10**9
    ledger = ledger_of([found])
    assert ledger.inferred_ns == 0 and ledger.measured_ns == ledger.lost_ns
