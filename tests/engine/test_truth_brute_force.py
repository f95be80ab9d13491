"""Effects told again, slowly: step by step and request by request from what an executor saw, against the vectorised ones.

Nothing of `truth/parts.py`, `direct.py` or `waiting.py` is used to tell them: membership comes from the plans themselves, a step without a
resource is asked of a law that knows nothing of that resource, and limits are lifted by settings written down by hand.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from truth_laws import spec
from truth_retold import Story, slow_direct, story

from phasewise.instrumented_engine.config import EngineConfig, PoolShare
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS
from phasewise.instrumented_engine.truth.direct import RESOURCES
from phasewise.instrumented_engine.truth.machines import rulebook
from phasewise.instrumented_engine.truth.parts import BETWEEN, PROMPT, TOKEN, TURN, membership
from phasewise.instrumented_engine.truth.truth import truth_from
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

SEEDS = 40
FEW = 8  # that every run looks at
EACH_SEED = pytest.mark.parametrize(
    "seed", [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, SEEDS))]
)


def drawn(seed: int) -> tuple[EngineConfig, Deployment, tuple[RequestSpec, ...]]:
    """A small scenario with a bit of everything."""
    rng = np.random.default_rng(seed)
    rules = rulebook()
    gpu = str(rng.choice(["l40s", "h100-sxm", "a100-sxm-80gb"]))
    machine = Deployment(
        gpu=rules.gpus[gpu],
        model=rules.models["llama-3.2-1b" if rng.random() < 0.5 else "llama-3.1-8b"],
        tensor_parallel_count=int(rng.choice([1, 2])),
        async_scheduling=bool(rng.random() < 0.5),
        cuda_graphs=bool(rng.random() < 0.5),
        cold_steps=int(rng.choice([0, 20])),
        cold_s=0.1,
        noise_ratio=0.05,
    )
    count = int(rng.integers(2, 14))
    at = np.cumsum(rng.exponential(rng.choice([0.01, 0.1]), count))
    crowded = rng.random() < 0.25  # more come back from their tools than the budget holds
    longest_prompt, longest_output = (5, 30) if crowded else (60, 120) if rng.random() < 0.6 else (400, 40)
    specs = []
    for number in range(count):
        output = int(rng.integers(1, longest_output))
        tools: tuple[ToolCall, ...] = ()
        if rng.random() < (0.8 if crowded else 0.4):
            inside = int(rng.integers(1, output)) if output > 1 else 0
            tools = (ToolCall(inside, int(rng.integers(1, 200)) * 10**6),)
        one = spec(
            number, float(at[number]), int(rng.integers(1, longest_prompt)), output, tools=tools, priority=int(rng.integers(0, 2)),
            context_s=float(rng.choice([0.0, 0.03])),
        )  # fmt: skip
        specs.append(replace(one, request_class="offline" if one.priority else "interactive"))
    longest = max(one.prompt_tokens + one.max_output_tokens for one in specs)
    settings: dict[str, object] = {
        "batching": "static" if rng.random() < 0.2 else "continuous",
        "max_num_seqs": 64 if crowded else int(rng.choice([2, 4, 64])),
        "step_token_budget": 2 if crowded else int(rng.choice([3, 64, 256, 4096])),
        "max_model_tokens": longest,
        "kv_blocks": int(rng.choice([longest // 16 + 3, 2 * longest // 16 + 5, 10_000])),
        "prefix_sharing": bool(rng.random() < 0.5),
        "batching_window_s": float(rng.choice([0.0, 0.0, 0.05])),
    }
    rule = rng.choice(["fcfs", "priority", "seizing", "pools"])
    if rule in ("priority", "seizing"):
        settings |= {"order": "priority", "preempt_for_priority": rule == "seizing"}
    elif rule == "pools":
        settings["kv_blocks"] = 10_000
        settings["pools"] = (
            PoolShare("fast", ("interactive",), 0.5, 0.5, 0.5), PoolShare("slow", ("offline",), 0.5, 0.5, 0.5),
        )  # fmt: skip
    return EngineConfig(**settings), machine, tuple(specs)  # type: ignore[arg-type]


HUGE = 10**6


def lifted_by_hand(config: EngineConfig, limit: str) -> EngineConfig:
    def kept(ratio: float, of: int, more: int) -> float:
        return int(ratio * of + 1e-9) / more

    if limit == "slots":
        pools = tuple(replace(p, slot_ratio=kept(p.slot_ratio, config.max_num_seqs, HUGE)) for p in config.pools)
        return replace(config, max_num_seqs=HUGE, batching="continuous", pools=pools)
    if limit == "budget":
        pools = tuple(
            replace(p, budget_ratio=kept(p.budget_ratio, config.step_token_budget, HUGE)) for p in config.pools
        )
        return replace(config, step_token_budget=HUGE, pools=pools)
    if limit == "kv":
        pools = tuple(replace(p, kv_ratio=kept(p.kv_ratio, config.kv_blocks, HUGE)) for p in config.pools)
        return replace(config, kv_blocks=HUGE, pools=pools)
    if limit == "window":
        return replace(config, batching_window_s=0.0)
    if limit == "empty_slots":
        return replace(config, batching="continuous")
    return replace(config, order="fcfs", preempt_for_priority=False, pools=())


@EACH_SEED
def test_direct_effects_are_those_of_steps_asked_one_by_one(seed: int) -> None:
    config, machine, specs = drawn(seed)
    truth = truth_from(config, TimeLaw(machine), specs, seed)
    assert len(truth.run.served) == len(specs)
    expected = slow_direct(story(config, machine, specs, seed), machine, specs)
    for name in RESOURCES:
        found = np.stack([truth.direct.prompt[name], truth.direct.token[name]])
        assert found == pytest.approx(expected[name], abs=1e-7), name


@EACH_SEED
def test_waiting_effects_are_those_of_runs_without_the_limit(seed: int) -> None:
    config, machine, specs = drawn(seed)
    truth = truth_from(config, TimeLaw(machine), specs, seed)
    before = story(config, machine, specs, seed)
    for limit, rerun in truth.waiting.reruns.items():
        if limit == "all":
            settings = config
            for one in ("policy", "slots", "budget", "window", "kv"):
                settings = lifted_by_hand(settings, one)
        else:
            settings = lifted_by_hand(config, limit)
        after = story(settings, machine, specs, seed)
        for request in range(len(specs)):
            there = next(one for one in rerun.served if one.index == request)
            assert there.finished_ns is not None
            assert there.last_token_ns == after.tokens_ns[request][-1], limit
    singles = {limit: None for limit in truth.waiting.reruns if limit not in ("all", "empty_slots")}
    saved = {
        limit: _saved(before, story(lifted_by_hand(config, limit), machine, specs, seed), specs) for limit in singles
    }
    total = sum((np.maximum(waited, 0.0) for waited, _ in saved.values()), start=np.zeros((2, len(specs))))
    if "all" in truth.waiting.reruns:
        settings = config
        for one in ("policy", "slots", "budget", "window", "kv"):
            settings = lifted_by_hand(settings, one)
        everything, _ = _saved(before, story(settings, machine, specs, seed), specs)
        reasons = dict(zip(QUEUE_REASONS, range(5), strict=True))
        mine = [reasons[{"slots": "slot"}.get(limit, limit)] for limit in singles]
        waited_for = np.array([any(one.waits_ns[reason] for reason in mine) for one in truth.run.served])
        hidden = np.maximum(everything - total, 0.0) * waited_for  # else it waited for the running step only
    else:
        hidden = np.zeros_like(total)
    by_class = sum((waited for waited, _ in saved.values()), start=np.zeros_like(total)) + hidden
    found = sum(
        (values for cause, values in truth.waiting.by_cause.items() if cause != "kv.preempt"),
        start=np.zeros((3, len(specs))),
    )
    assert found[:2] == pytest.approx(by_class, abs=1e-9)
    if "kv" in saved:
        assert truth.waiting.by_cause["kv.preempt"][:2] == pytest.approx(saved["kv"][1], abs=1e-9)
    if not hidden.any():
        names = {"slots": ("queue.slots", "queue.capacity", "queue.empty_slots"), "kv": ("kv.wait",)}
        for limit, (waited, _) in saved.items():
            causes = names.get(limit, (f"queue.{limit}",))
            none = np.zeros((3, len(specs)))
            found = sum((truth.waiting.by_cause.get(name, none) for name in causes), start=none)
            assert found[:2] == pytest.approx(waited, abs=1e-9), limit
    # A limit that was not asked changes nothing. But a batching window ends early when those who wait would fill the seats: more
    # seats only lengthen it.
    for limit in {"slots", "budget", "window", "policy", "kv"} - set(singles):
        if limit == "slots" and config.batching_window_s:
            continue
        after = story(lifted_by_hand(config, limit), machine, specs, seed)
        assert after.tokens_ns == before.tokens_ns, limit


def _saved(before: Story, after: Story, specs: tuple[RequestSpec, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[2 parts, requests]: waited less, computed again less."""
    was = [before.waits(request) for request in range(len(specs))]
    now = [after.waits(request) for request in range(len(specs))]
    waited = np.array([one[0] for one in was]) - np.array([one[0] for one in now])
    again = np.array([one[1] for one in was]) - np.array([one[1] for one in now])
    return waited.T, again.T


@EACH_SEED
def test_a_request_has_the_class_that_its_effects_add_up_to(seed: int) -> None:
    config, machine, specs = drawn(seed)
    truth = truth_from(config, TimeLaw(machine), specs, seed)
    rows = truth.rows().to_dicts()
    for number, row in enumerate(rows):
        sums: dict[str, float] = defaultdict(float)
        for part in range(3):
            queue = 0.0
            for cause, values in truth.effects.items():
                if cause.startswith("queue."):
                    queue += float(values[part, number])
                else:
                    sums[CLASS_OF_CAUSE[cause]] += float(values[part, number])
            sums["queueing"] += min(queue, float(truth.waited_s[part, number]))
        ordered = sorted(sums.values(), reverse=True)
        assert sums[row["class"]] == pytest.approx(ordered[0])
        assert CLASS_OF_CAUSE[row["cause"]] == row["class"]
        assert row["margin_ratio"] == pytest.approx((ordered[0] - max(0.0, ordered[1])) / ordered[0])


def test_the_small_scenarios_meet_everything() -> None:
    """Else the comparison above would prove little."""
    causes: set[str] = set()
    preempted = 0
    kinds: set[int] = set()
    for seed in range(SEEDS):
        config, machine, specs = drawn(seed)
        truth = truth_from(config, TimeLaw(machine), specs, seed)
        causes |= set(truth.effects)
        preempted += len(truth.run.preempted)
        kinds |= set(membership(truth.run).kind.tolist())
    assert preempted > 20 and kinds == {PROMPT, TOKEN, BETWEEN, TURN}
    assert {
        "queue.slots", "queue.empty_slots", "queue.budget", "queue.window", "queue.policy", "kv.wait", "kv.preempt",
        "interference", "cold_start", "communication.node", "prefill.attention_io", "context", "external",
    } <= causes  # fmt: skip
