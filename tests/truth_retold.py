"""A run of the engine told step by step from what its executor saw, and its direct effects asked of each step in turn.

Nothing of `truth/parts.py` or `direct.py` is used: membership comes from the plans themselves, and a step without a resource is asked of
a law that knows nothing of that resource.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.simulated import SimulatedExecutor
from phasewise.instrumented_engine.executors.time_law import RESOURCES as LAW_RESOURCES
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.plan import StepOutcome, StepPlan
from phasewise.instrumented_engine.recording import StepComposition
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.simulation import VirtualClock
from phasewise.instrumented_engine.truth.direct import RESOURCES

FIRST, TOKENS = 0, 1


@dataclass(frozen=True)
class Seen:
    """A step as it was executed. chunks: request -> (past, new, last, recompute); decodes: request -> attended tokens."""

    number: int
    start_ns: int
    end_ns: int
    factor: float
    chunks: dict[int, tuple[int, int, bool, bool]]
    decodes: dict[int, int]
    preempted: frozenset[int]

    @property
    def everybody(self) -> set[int]:
        return {*self.chunks, *self.decodes}

    def made_of(self, who: Callable[[int], bool]) -> StepComposition:
        """With the chunks of some only."""
        chunks = [chunk for request, chunk in self.chunks.items() if who(request)]
        pairs = 0
        for past, new, _, _ in chunks:
            for query in range(new):
                pairs += past + query + 1
        return StepComposition(
            number=self.number,
            prefill_tokens=sum(new for _, new, _, _ in chunks),
            prefill_pairs=pairs,
            prefill_past_tokens=sum(past for past, _, _, _ in chunks),
            chunks=len(chunks),
            last_chunks=sum(last for _, _, last, _ in chunks),
            decode_sequences=len(self.decodes),
            context_tokens=sum(self.decodes.values()),
        )


@dataclass
class Watcher:
    inner: SimulatedExecutor
    clock: VirtualClock
    steps: list[Seen] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.inner.execute(plan)
        now = self.clock.now_ns()
        self.steps.append(
            Seen(
                plan.number,
                now,
                now + outcome.duration_ns,
                float(self.inner.noise(np.array([plan.number]))[0]),
                {c.sequence.index: (c.past_tokens, c.new_tokens, c.last, c.recompute) for c in plan.chunks},
                {one.index: one.computed_tokens + 1 for one in plan.decodes},
                frozenset(one.index for one in plan.preempted),
            )
        )
        return outcome


@dataclass
class Story:
    """A run by request: moments of the engine's own sequences, the rest from the steps."""

    steps: list[Seen]
    queued_ns: dict[int, int]
    tokens_ns: dict[int, list[int]]
    tools_ns: dict[int, list[tuple[int, int]]]

    def waits(self, request: int) -> tuple[list[float], list[float]]:
        """(waited, computed again) seconds before and after the first token."""
        waited, again = [0.0, 0.0], [0.0, 0.0]
        since: int | None = self.queued_ns[request]
        first = self.tokens_ns[request][0]
        part = FIRST
        for step in self.steps:
            if request in step.preempted:
                since, part = step.start_ns, FIRST if step.start_ns < first else TOKENS
            if request in step.everybody:
                if since is not None:
                    waited[part] += (step.start_ns - since) / 1e9
                since = None
            if request in step.chunks and step.chunks[request][3]:
                again[FIRST if step.end_ns <= first else TOKENS] += (step.end_ns - step.start_ns) / 1e9
        return waited, again


def story(config: EngineConfig, deployment: Deployment, specs: tuple[RequestSpec, ...], seed: int) -> Story:
    clock = VirtualClock(specs[0].arrival_ns)
    watcher = Watcher(SimulatedExecutor(TimeLaw(deployment), seed=seed), clock)
    core = EngineCore(config, watcher, clock, meter_ns=None)
    core.run(specs)
    queued, tools = {}, {}
    tokens: dict[int, list[int]] = defaultdict(list)
    for one in core.recording.finished:
        assert one.queued_ns is not None
        queued[one.index], tools[one.index] = one.queued_ns, list(one.external)
    for step in watcher.steps:
        for request in step.decodes:
            tokens[request].append(step.end_ns)
        for request, (_, _, last, _) in step.chunks.items():
            if last:
                tokens[request].append(step.end_ns)
    return Story(watcher.steps, queued, tokens, tools)


def slow_direct(told: Story, deployment: Deployment, specs: tuple[RequestSpec, ...]) -> dict[str, np.ndarray]:
    """[2 kinds (prompt, token), 3 parts, requests] by resource."""
    laws = {None: TimeLaw(deployment)} | {name: TimeLaw(deployment, without=name) for name in LAW_RESOURCES}
    found = {name: np.zeros((2, 3, len(specs))) for name in RESOURCES}

    def seconds(step: Seen, who: Callable[[int], bool], without: str | None = None) -> float:
        return laws[without].seconds(step.made_of(who)) * step.factor

    for request in range(len(specs)):
        times = told.tokens_ns[request]
        inside = seated = False
        computing = True  # its prompt, or what was lost of it
        for step in told.steps:
            part = FIRST if step.end_ns <= times[0] else TOKENS
            if request in step.preempted:
                seated, computing = False, True
            own, decodes = request in step.chunks, request in step.decodes
            ends = [(told.queued_ns[request], FIRST)]
            ends += [(end, TOKENS) for start, end in told.tools_ns[request] if times[0] <= start < times[-1]]
            for moment, where in ends:  # it came, or came back, while this step ran
                if step.start_ns < moment < step.end_ns and not own and not decodes:
                    share = (step.end_ns - moment) / (step.end_ns - step.start_ns)
                    kind = 0 if where == FIRST else 1
                    _add(found, kind, where, request, step, seconds, share, own=False, whole=False)
            away = any(start <= step.start_ns < end for start, end in told.tools_ns[request])
            back = any(step.start_ns < end < step.end_ns and start < end for start, end in told.tools_ns[request])
            if own or decodes:
                inside = seated = True
                _add(found, 0 if own else 1, part, request, step, seconds, 1.0, own=own, whole=False)
                computing = own and not step.chunks[request][2]
            elif inside and seated and not away and not back and step.end_ns <= times[-1]:
                # It holds a seat, no tool is at work, and the step gave it nothing.
                _add(found, 0 if computing else 1, part, request, step, seconds, 1.0, own=False, whole=True)
    for request, one in enumerate(specs):
        found["context"][0, FIRST, request] = one.context_ns / 1e9
        for call in one.tools:
            if call.after_tokens is None:
                part = 2
            else:
                part = (
                    FIRST
                    if call.after_tokens == 0
                    else 2
                    if call.after_tokens >= len(told.tokens_ns[request])
                    else TOKENS
                )
            if part != 2 or call.after_tokens is None:
                found["external"][0, part, request] += call.duration_ns / 1e9
    return found


def _add(
    found: dict[str, np.ndarray], kind: int, part: int, request: int, step: Seen,
    seconds: Callable[..., float], share: float, *, own: bool, whole: bool,
) -> None:  # fmt: skip
    def everybody(_: int) -> bool:
        return True

    def mine(other: int) -> bool:
        return own and other == request

    as_it_was = seconds(step, everybody)
    for name in ("weight_bytes", "kv_bytes", "host", "communication", "cold_start"):
        found[name][kind, part, request] += share * max(0.0, as_it_was - seconds(step, everybody, name))
    alone = seconds(step, mine)
    if whole and step.chunks:
        found["others_prefill"][kind, part, request] += share * as_it_was
        return
    found["others_prefill"][kind, part, request] += share * max(0.0, as_it_was - alone)
    found["compute"][kind, part, request] += share * max(0.0, alone - seconds(step, mine, "compute"))
