"""How well the data support a verdict: the worst of its checks (ux.md 3.3). Words, not decimals; it changes no status."""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.analyzer.coverage import UNKNOWN, Sampling
from phasewise.analyzer.evidence import ENGINE, Evidence
from phasewise.analyzer.statistics import rounded

LEVELS = ("insufficient", "low", "medium", "high")


def graded(value: float | None, low: float, medium: float, high: float) -> str:
    """Level of a value by its lower limits; unknown is low."""
    if value is None:
        return "low"
    return LEVELS[sum(value >= limit for limit in (low, medium, high))]


def confidence(
    primary: str,
    evidence: Sequence[Evidence],
    matching: int,
    phase_ratio: float | None,
    margin_ratio: float | None,
    live_samples: int = 0,
    sampling: Sampling = UNKNOWN,
) -> dict[str, object]:
    """matching: affected requests whose largest class is `primary` (a live verdict counts samples instead).

    sampling: told where not all requests sent spans; phase_ratio: requests with phase data; margin_ratio: lead over the next class as a share of the seconds compared.
    """
    for_it = [one for one in evidence if primary in one.supports]
    against = [one for one in evidence if primary in one.opposes]
    sides = {one.side == ENGINE for one in for_it}
    signals = LEVELS[min(len(for_it), 3)] if len(sides) > 1 else LEVELS[min(len(for_it), 2)]
    opposed = ("high", "low", "insufficient")[min(len(against), 2)]
    checks = [
        ("affected requests that match", max(matching, live_samples), graded(max(matching, live_samples), 10, 50, 200)),
        ("requests with phase data", rounded(phase_ratio), graded(phase_ratio, 0.4, 0.7, 0.9)),
        ("independent signals for", len(for_it), signals),
        ("signals against", len(against), opposed),
        (
            "margin over the next class",
            rounded(margin_ratio),
            max("low", graded(margin_ratio, 0.0, 0.1, 0.25), key=LEVELS.index),
        ),
    ]
    if sampling.is_partial:
        checks.append(
            ("finished requests with spans", rounded(sampling.ratio), "medium" if sampling.is_fair else "low")
        )
    worst = min((level for _, _, level in checks), key=LEVELS.index)
    if primary == "inconclusive":
        worst = "insufficient"
    return {
        "level": worst,
        "checks": [{"check": name, "value": value, "level": level} for name, value, level in checks],
    }
