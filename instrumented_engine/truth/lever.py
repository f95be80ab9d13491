"""Levers: what changes for everybody when a limit or a resource goes, in a run that schedules anew.

A lever differs from an effect: the effect of a resource keeps every batch as it was, the lever lets the queue drain that a shorter
step or a larger batch drains. Recommendations are judged by levers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import LAW_COLUMNS, RESOURCES, TimeLaw
from phasewise.instrumented_engine.recording import Floats, Ints, StepComposition
from phasewise.instrumented_engine.truth.direct import Direct
from phasewise.instrumented_engine.truth.labels import metric_seconds
from phasewise.instrumented_engine.truth.run import Run, run

FACTUAL = "factual"


@dataclass(frozen=True, slots=True)
class Lever:
    """Figures of one run. throughput: output tokens of served requests a second, from the first arrival to the last end."""

    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    throughput_tok_per_s: float
    served: int


@dataclass(frozen=True, slots=True)
class _Without:
    """A deployment's law with one resource of its steps gone."""

    law: TimeLaw
    resource: str

    def seconds(self, composition: StepComposition) -> float:
        one = {name: np.array([getattr(composition, name)], dtype=np.int64) for name in (*LAW_COLUMNS, "number")}
        return float(self.law.seconds_of(one, without=self.resource)[0])

    def seconds_of(self, columns: Mapping[str, Ints], without: str | None = None) -> Floats:
        assert without is None, "one resource at a time"
        return self.law.seconds_of(columns, without=self.resource)


def figures(one: Run) -> Lever:
    """Of all served requests; 0 where there is nothing to measure."""

    def mean_and_p99(metric: str) -> tuple[float, float]:
        values = metric_seconds(one, metric)[0]
        values = values[np.isfinite(values)]
        return (float(values.mean()), float(np.percentile(values, 99))) if len(values) else (0.0, 0.0)

    ttft, tpot, e2e = mean_and_p99("ttft"), mean_and_p99("tpot"), mean_and_p99("e2e")
    tokens = sum(sequence.output_tokens for sequence in one.served)
    span_s = one.span_s
    return Lever(*ttft, *tpot, *e2e, tokens / span_s if span_s > 0 else 0.0, len(one.served))


def levers_of(
    config: EngineConfig, factual: Run, reruns: Mapping[str, Run], direct: Direct, seed: int, *, removals: bool
) -> dict[str, Lever]:
    """By what was changed: `factual` itself, the limits lifted, context and tools where there are any; with `removals` also each
    resource of a step that would save somebody something."""
    found = {FACTUAL: figures(factual)} | {limit: figures(rerun) for limit, rerun in reruns.items()}
    bare = {
        "context": tuple(replace(spec, context_ns=0) for spec in factual.arrivals),
        "external": tuple(replace(spec, tools=()) for spec in factual.arrivals),
    }
    for resource, arrivals in bare.items():
        if direct.of(resource).any():
            found[resource] = figures(run(config, factual.law, arrivals, seed))
    if removals and isinstance(factual.law, TimeLaw):
        for resource in RESOURCES:
            if direct.of(resource).any():
                found[resource] = figures(run(config, _Without(factual.law, resource), factual.arrivals, seed))
    return found
