"""What passes between scheduler, executor and clock: one step at a time."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from phasewise.instrumented_engine.sequence import Sequence


@dataclass(slots=True)
class PromptChunk:
    """Part of a prompt (or of a preempted sequence's tokens, `recompute`) in one step. last: the next token comes with it."""

    sequence: Sequence
    past_tokens: int
    new_tokens: int
    last: bool
    recompute: bool = False


@dataclass(slots=True)
class StepPlan:
    """One scheduler iteration. waiting: sequences left in the queue by QUEUE_REASONS. slots_reserved: seats taken, those of
    finished sequences of a static batch included. schedule_ns: what the scheduler itself took, planning and completing (wall clock)."""

    number: int
    chunks: list[PromptChunk] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    waiting: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    slots_reserved: int = 0
    kv_blocks_used: int = 0
    schedule_ns: int = 0

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token in this step: those that decode, then those whose prompt ends."""
        return self.decodes + [chunk.sequence for chunk in self.chunks if chunk.last]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.new_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """tokens: one id for each of `plan.sampled`; None from a simulated executor. duration_ns: of the step."""

    duration_ns: int
    tokens: Items[int] | None = None


class Executor(Protocol):
    """Whatever computes a step. The scheduler, the block pool and the telemetry do not know which one it is."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Blocks until the step is done where time is real; a simulated executor returns at once."""
        ...


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def advance(self, duration_ns: int) -> None:
        """Time a step took passes: virtual clocks jump, real ones have moved already, paced ones sleep."""
        ...
