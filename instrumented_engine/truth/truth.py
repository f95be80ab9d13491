"""What is true of a scenario: effects by resource and cause for each request, the right answer for each objective, the levers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.recording import Floats
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.truth.direct import Direct, direct_effects
from phasewise.instrumented_engine.truth.labels import (
    METRICS,
    WindowLabel,
    by_cause,
    metric_seconds,
    request_labels,
    window_label,
)
from phasewise.instrumented_engine.truth.lever import Lever, levers_of
from phasewise.instrumented_engine.truth.run import Law, Run, run
from phasewise.instrumented_engine.truth.scenario import Scenario
from phasewise.instrumented_engine.truth.waiting import Waiting, waiting_effects, waits_of


@dataclass(frozen=True, slots=True)
class Truth:
    """run: the factual one, its recording included. effects: [PARTS, requests] seconds by cause; direct: the same by resource.

    windows: by objective (ttft, tpot, itl, e2e). levers: by what was changed.
    """

    run: Run
    direct: Direct
    waiting: Waiting
    effects: Mapping[str, Floats]
    waited_s: Floats
    windows: Mapping[str, WindowLabel]
    levers: Mapping[str, Lever]

    def rows(self) -> pl.DataFrame:
        """One row a served request, in order of arrival: its times, what each resource and cause would save it over its whole
        time (`saved_<resource>_s`, `effect_<cause>_s`), its class, cause and margin."""
        classes, causes, margin = request_labels(self.effects, self.waited_s)
        served = self.run.served
        columns: dict[str, object] = {
            "request_id": [one.spec.request_id for one in served],
            "arrival_ns": [one.spec.arrival_ns for one in served],
            "input_tokens": [one.spec.prompt_tokens for one in served],
            "output_tokens": [one.output_tokens for one in served],
            **{f"{metric}_s": metric_seconds(self.run, metric)[0] for metric in ("ttft", "tpot", "e2e")},
            "waited_s": self.waited_s.sum(axis=0),
            **{f"saved_{name}_s": self.direct.of(name).sum(axis=0) for name in self.direct.prompt},
            **{f"effect_{cause.replace('.', '_')}_s": values.sum(axis=0) for cause, values in self.effects.items()},
            "class": classes,
            "cause": causes,
            "margin_ratio": margin,
        }
        return pl.DataFrame(columns)


def truth_of(scenario: Scenario, requests_count: int | None = None, *, removals: bool = False) -> Truth:
    """Runs a scenario, asks its steps and limits, and labels it. requests_count: only the first so many.

    removals: levers also for the resources of a step (each a run of its own that costs more than one that lifts a limit).
    """
    arrivals = scenario.arrivals[:requests_count]
    return truth_from(scenario.setup.config, scenario.law, arrivals, scenario.seed, removals=removals)


def truth_from(
    config: EngineConfig, law: Law, arrivals: tuple[RequestSpec, ...], seed: int, *, removals: bool = False
) -> Truth:
    """The same from its parts; `law` may be any that can be asked without a resource."""
    factual = run(config, law, arrivals, seed)
    direct = direct_effects(factual)
    waiting = waiting_effects(config, factual, seed)
    effects = by_cause(direct, waiting.by_cause)
    waited_s = waits_of(factual).waited_s
    return Truth(
        run=factual,
        direct=direct,
        waiting=waiting,
        effects=effects,
        waited_s=waited_s,
        windows={metric: window_label(factual, effects, waited_s, metric) for metric in METRICS},
        levers=levers_of(config, factual, waiting.reruns, direct, seed, removals=removals),
    )
