"""`phasewise engine truth`: what would have been saved, request by request, had a resource not been there."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phasewise.analyzer.statistics import rounded
from phasewise.dashboard.commands.engine_scenario import LIST, drawn, list_families, working

if TYPE_CHECKING:
    from phasewise.instrumented_engine.truth.scenario import Scenario
    from phasewise.instrumented_engine.truth.truth import Truth

SHOWN_CAUSES = 4


def truth(options: Namespace) -> int:
    """Prints the truth about a scenario."""
    if options.scenario == LIST:
        return list_families(as_json=options.json)
    from phasewise.instrumented_engine.truth.truth import truth_of

    scenario = drawn(options)
    with working(f"taking {scenario.family} apart"):
        found = truth_of(scenario)
    if options.json:
        print(json.dumps(document(scenario, found), indent=2, ensure_ascii=False))
    else:
        show(scenario, found)
    return 0


def document(scenario: Scenario, found: Truth) -> dict[str, Any]:
    """All of it: the right answer by objective, the levers, one object a served request. Seconds; unknown is null."""
    return {
        "scenario": scenario.family,
        "seed": scenario.seed,
        "simulated": True,
        "notes": dict(scenario.notes),
        "objectives": {
            metric: {
                "class": label.cls,
                "cause": label.cause,
                "margin_ratio": _plain(label.margin_ratio),
                "dominant": label.dominant,
                "contended": label.contended,
                "slow_requests": len(label.slow),
                "slower_than_s": _plain(label.limit_s),
                "seconds": _plain(label.metric_s),
                "saved_by_cause_s": {cause: _plain(value) for cause, value in label.by_cause.items()},
                "saved_by_class_s": {name: _plain(value) for name, value in label.by_class.items()},
            }
            for metric, label in found.windows.items()
        },
        "levers": {
            name: {field: _plain(value) for field, value in dataclasses.asdict(lever).items()}
            for name, lever in found.levers.items()
        },
        "requests": [{name: _plain(value) for name, value in row.items()} for row in found.rows().to_dicts()],
    }


def _plain(value: object) -> object:
    """Figures as they are written everywhere; what is no number is null."""
    return rounded(value) if isinstance(value, float) else value


def show(scenario: Scenario, found: Truth) -> None:
    """For people: the answer by objective, then what each change would do."""
    from rich.table import Table

    from phasewise.dashboard import format as fmt
    from phasewise.dashboard.terminal import console
    from phasewise.dashboard.wording import class_title

    screen = console()
    screen.print(f"{scenario.family}, seed {scenario.seed}: {len(found.run.served):,} requests served, simulated")
    for name, note in scenario.notes.items():
        screen.print(f"  {name}: {note}")
    table = Table(
        "objective",
        "bound by",
        "cause",
        "lead over the next",
        "what taking it away would save of the slow tenth's time",
        box=None,
    )
    for metric, label in found.windows.items():
        table.add_row(
            metric,
            class_title(label.cls) if label.cls else "nothing",
            label.cause or "",
            fmt.percent(label.margin_ratio) + ("" if label.dominant else ", ambiguous"),
            _savings(label.by_cause, label.metric_s),
        )
    screen.print()
    screen.print(table)
    levers = Table("without", "TTFT p99", "TPOT p99", "end to end p99", "output tokens/s", "served", box=None)
    for name, lever in found.levers.items():
        figures = (lever.ttft_p99_s, lever.tpot_p99_s, lever.e2e_p99_s)
        levers.add_row(
            "(as it ran)" if name == "factual" else name,
            *(fmt.seconds(value) for value in figures),
            fmt.number(lever.throughput_tok_per_s),
            fmt.count(lever.served),
        )
    screen.print()
    screen.print(levers)


def _savings(by_cause: Mapping[str, float], of_s: float) -> str:
    """The largest causes with their share."""
    from phasewise.dashboard import format as fmt

    ordered = sorted(by_cause.items(), key=lambda item: -item[1])[:SHOWN_CAUSES]
    return ", ".join(f"{cause} {fmt.percent(seconds / of_s)}" for cause, seconds in ordered if of_s > 0 and seconds > 0)
