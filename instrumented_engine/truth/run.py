"""One run of the engine on a virtual clock, kept so that its steps can be timed again and its requests compared.

Beyond the engine's own recording it holds who was preempted in which step, and the noise each step met.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.simulated import SimulatedExecutor
from phasewise.instrumented_engine.executors.time_law import LAW_COLUMNS, TimeLaw
from phasewise.instrumented_engine.plan import StepOutcome, StepPlan
from phasewise.instrumented_engine.recording import Floats, Ints, Recording, StepComposition, composition
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.instrumented_engine.simulation import VirtualClock

# Taking others' prompts away means setting these of the columns a law reads to what is left.
PROMPT_COLUMNS = LAW_COLUMNS[:5]


class Law(Protocol):
    """Seconds of steps; see `TimeLaw`. A test may bring its own."""

    def seconds(self, composition: StepComposition) -> float: ...

    def seconds_of(self, columns: Mapping[str, Ints], without: str | None = None) -> Floats: ...


class Noise(Protocol):
    """What multiplies a step's time; belongs to the step's number, so that a rerun meets the same."""

    def __call__(self, steps: Ints) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Run:
    """recording, its steps and chunks as arrays, the law and noise that timed them.

    preempted: rows (step, request) in order of steps, request = index of arrival. arrivals: all requests, row = that index.
    """

    arrivals: tuple[RequestSpec, ...]
    recording: Recording
    law: Law
    noise: Floats
    steps: Mapping[str, Ints]
    chunks: Mapping[str, Ints]
    preempted: tuple[tuple[int, int], ...]
    served: tuple[Sequence, ...]

    @property
    def end_ns(self) -> Ints:
        """When each step ended."""
        return self.steps["start_ns"] + self.steps["duration_ns"]

    @property
    def busy_s(self) -> float:
        """Seconds in which some step ran."""
        return float(self.steps["duration_ns"].sum()) / 1e9

    @property
    def span_s(self) -> float:
        """First arrival to last end."""
        if not self.served:
            return 0.0
        last = max(sequence.finished_ns or 0 for sequence in self.served)
        return (last - self.arrivals[0].arrival_ns) / 1e9


@dataclass(slots=True)
class _Watched:
    """An executor that notes whom the scheduler preempted."""

    inner: SimulatedExecutor | LawExecutor
    preempted: list[tuple[int, int]] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.preempted.extend((plan.number, sequence.index) for sequence in plan.preempted)
        return self.inner.execute(plan)


@dataclass(frozen=True, slots=True)
class LawExecutor:
    """Any law, without noise."""

    law: Law

    def execute(self, plan: StepPlan) -> StepOutcome:
        return StepOutcome(duration_ns=max(1, round(self.law.seconds(composition(plan)) * 1e9)))

    def noise(self, steps: Ints) -> Floats:
        return np.ones(len(steps))


def run(config: EngineConfig, law: Law, arrivals: Iterable[RequestSpec], seed: int) -> Run:
    """Until every request has ended. arrivals: in order of `arrival_ns`; a `TimeLaw` meets noise by `seed`, other laws none."""
    requests = tuple(arrivals)
    executor = SimulatedExecutor(law, seed=seed) if isinstance(law, TimeLaw) else LawExecutor(law)
    watched = _Watched(executor)
    core = EngineCore(config, watched, VirtualClock(requests[0].arrival_ns if requests else 0), meter_ns=None)
    core.run(requests)
    return recorded(requests, core.recording, law, watched.preempted, executor.noise)


def recorded(
    arrivals: Iterable[RequestSpec],
    recording: Recording,
    law: Law,
    preempted: Iterable[tuple[int, int]] = (),
    noise: Noise | None = None,
) -> Run:
    """A run from a recording made elsewhere; without noise where none is given."""
    steps = recording.step_columns()
    numbers = np.arange(len(steps["start_ns"]), dtype=np.int64)
    served = sorted(
        (one for one in recording.finished if one.error is None and one.first_token_ns is not None),
        key=lambda one: one.index,
    )
    return Run(
        arrivals=tuple(arrivals),
        recording=recording,
        law=law,
        noise=np.ones(len(numbers)) if noise is None else noise(numbers),
        steps=steps,
        chunks=recording.chunk_columns(),
        preempted=tuple(preempted),
        served=tuple(served),
    )
