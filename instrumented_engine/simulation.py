"""The engine on a virtual clock: a setup and arrivals in, a recording out; the same seed gives the same run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.simulated import SimulatedExecutor
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.sequence import RequestSpec


@dataclass(frozen=True, slots=True)
class Setup:
    """One replica: what it runs on and how it is set."""

    config: EngineConfig
    deployment: Deployment


class VirtualClock:
    """Time that passes only when told to."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, duration_ns: int) -> None:
        self._now_ns += duration_ns


def simulate(setup: Setup, arrivals: Iterable[RequestSpec], *, seed: int) -> Recording:
    """Runs until every request has ended. arrivals: in order of `arrival_ns`."""
    requests = list(arrivals)
    clock = VirtualClock(requests[0].arrival_ns if requests else 0)
    executor = SimulatedExecutor(TimeLaw(setup.deployment), seed=seed)
    core = EngineCore(setup.config, executor, clock, meter_ns=None)
    core.run(requests)
    return core.recording
