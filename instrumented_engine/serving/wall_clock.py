"""Real time for the engine's clock and for a simulated executor's steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from phasewise.instrumented_engine.plan import Executor, StepOutcome, StepPlan


class WallClock:
    """Unix nanoseconds that never step back: the wall clock read once, the monotonic clock from then on. Any thread."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        return self._offset_ns + time.monotonic_ns()

    def advance(self, duration_ns: int) -> None:
        """Real time has passed already."""


class PacedExecutor:
    """A simulated executor on real time: a step takes what the inner one says times `time_scale`, and is told as it was
    measured, the oversleeping of the machine included. time_scale 0.1: ten times as fast as the accelerator."""

    def __init__(
        self, inner: Executor, clock: WallClock, *, time_scale: float = 1.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._scale = time_scale
        self._sleep = sleep

    def execute(self, plan: StepPlan) -> StepOutcome:
        start_ns = self._clock.now_ns()
        outcome = self._inner.execute(plan)
        left_ns = start_ns + round(outcome.duration_ns * self._scale) - self._clock.now_ns()
        if left_ns > 0:
            self._sleep(left_ns / 1e9)
        return StepOutcome(max(1, self._clock.now_ns() - start_ns), outcome.tokens)
