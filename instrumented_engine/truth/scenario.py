"""A scenario: a deployment, its settings and its requests, complete enough to run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.simulation import Setup
from phasewise.instrumented_engine.truth.run import Law, run

PILOT_COUNT = 96
ALONE_COUNT = 12


@dataclass(frozen=True, slots=True)
class Scenario:
    """family: where it was drawn; it is no label. seed: of the draw and of the step noise. notes: what was drawn, for people."""

    family: str
    seed: int
    setup: Setup
    arrivals: tuple[RequestSpec, ...]
    notes: Mapping[str, str]

    @property
    def law(self) -> Law:
        return TimeLaw(self.setup.deployment)

    @property
    def accelerator(self) -> str:
        return self.setup.deployment.gpu.id

    @property
    def model(self) -> str:
        return self.setup.deployment.model.id


def capacity_per_s(config: EngineConfig, deployment: Deployment, requests: tuple[RequestSpec, ...], seed: int) -> float:
    """Requests a second this deployment serves when they never run out: between the first and the last fifth of a backlog of
    PILOT_COUNT of them, with the settings as they are and the machine warm. Context and tools are left out: they take time, not capacity."""
    backlog = tuple(_bare(spec, spec.arrival_ns) for spec in requests[:PILOT_COUNT])
    done = run(config, TimeLaw(_warm(deployment)), backlog, seed)
    ends = np.sort([(one.last_token_ns or 0) - one.spec.arrival_ns for one in done.served])
    low, high = len(ends) // 5, len(ends) - 1 - len(ends) // 5
    seconds = float(ends[high] - ends[low]) / 1e9
    whole = float(ends[-1]) / 1e9
    # A batch that ends as one has no inside; then the whole backlog is the measure.
    return (high - low) / seconds if seconds > 0.2 * whole else len(ends) / whole


def alone_s(config: EngineConfig, deployment: Deployment, requests: tuple[RequestSpec, ...], seed: int) -> float:
    """Mean end-to-end seconds of ALONE_COUNT requests that come one after another; without context and tools."""
    apart_ns = 3600 * 10**9
    single = tuple(
        _bare(spec, spec.arrival_ns + number * apart_ns) for number, spec in enumerate(requests[:ALONE_COUNT])
    )
    done = run(config, TimeLaw(_warm(deployment)), single, seed)
    return float(np.mean([(one.last_token_ns or 0) - one.spec.arrival_ns for one in done.served])) / 1e9


def _bare(spec: RequestSpec, arrival_ns: int) -> RequestSpec:
    return replace(spec, arrival_ns=arrival_ns, context_ns=0, tools=())


def _warm(deployment: Deployment) -> Deployment:
    return replace(deployment, cold_steps=0, cold_s=0.0)
