"""From hypotheses to one verdict: the strongest consistent explanation, or the honest statement that none is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from phasewise.analyzer.conditions import Situation
from phasewise.analyzer.matching import match
from phasewise.analyzer.summary.hypothesis import Evidence, Hypothesis, either
from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.missing import missing_numbers
from phasewise.analyzer.summary.points import Summary
from phasewise.analyzer.summary.shares import shares_of, winner_share
from phasewise.analyzer.summary.signals import settings_of, signals_of
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import CLASSES, CONTENTION

# Below this strength nothing is named; a class must lead the next by this much.
LEAST_STRENGTH = 0.45
LEAST_LEAD = 0.08
_SYMPTOM_DISCOUNT = 0.8
_COMPANION_WEIGHT = 0.35
_LEVELS = ("insufficient", "low", "medium", "high")
_EVIDENCE_LIMIT = 12
# Requests from which on numbers are believed at all, and from which on fully.
_SAMPLES = (3, 10)
_LEDGER_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """winner None: inconclusive. rival: the strongest of another class; reason: why nothing was named."""

    winner: Hypothesis | None
    supporting: tuple[Hypothesis, ...]
    rival: Hypothesis | None
    strength: float
    lead: float
    reason: str


def decide(hypotheses: Sequence[Hypothesis]) -> Decision:
    """The class whose mechanisms explain the numbers best, after discounting what a stronger one produces as a symptom."""
    weighed = _without_symptoms(hypotheses)
    by_class: dict[str, list[Hypothesis]] = {}
    for one in weighed:
        by_class.setdefault(one.category, []).append(one)
    scores = {name: _together([h.strength for h in group]) for name, group in by_class.items()}
    order = sorted(scores, key=lambda name: (-scores[name], CLASSES.index(name)))
    if not order:
        return Decision(None, (), None, 0.0, 0.0, "no number in the summary speaks for any cause")
    best = order[0]
    lead = scores[best] - (scores[order[1]] if len(order) > 1 else 0.0)
    group = sorted(by_class[best], key=lambda h: -h.strength)
    rival = max(by_class[order[1]], key=lambda h: h.strength) if len(order) > 1 else None
    winner, strength = group[0], scores[best]
    against = sum(e.stance == "against" for e in winner.evidence)
    if best == "inconclusive":
        return Decision(None, tuple(group), rival, strength, lead, winner.sentence)
    if strength < LEAST_STRENGTH:
        return Decision(None, tuple(group), rival, strength, lead, "the signs are too weak to name a cause")
    if lead < LEAST_LEAD and rival is not None:
        said = f"{winner.category} and {rival.category} explain the numbers about equally well"
        return Decision(None, tuple(group), rival, strength, lead, said)
    if against >= 2 and winner.strength < 0.6:
        return Decision(
            None,
            tuple(group),
            rival,
            strength,
            lead,
            f"{winner.category} is most likely, but two signals speak against it",
        )
    return Decision(winner, tuple(group), rival, strength, lead, winner.sentence)


def _without_symptoms(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """A full pool makes a queue: where the pool is the stronger explanation, the queue counts little beside it."""
    left = sorted(hypotheses, key=lambda h: (-h.strength, CLASSES.index(h.category), h.mechanism))
    for index, explainer in enumerate(left):
        if explainer.strength < LEAST_STRENGTH:
            break
        for other, hypothesis in enumerate(left):
            if (
                other > index
                and hypothesis.category in explainer.symptoms
                and hypothesis.strength <= explainer.strength
            ):
                left[other] = replace(
                    hypothesis, strength=hypothesis.strength * (1 - _SYMPTOM_DISCOUNT * explainer.strength)
                )
        left[index + 1 :] = sorted(
            left[index + 1 :], key=lambda h: (-h.strength, CLASSES.index(h.category), h.mechanism)
        )
    return left


def _together(strengths: Sequence[float]) -> float:
    first, *others = sorted(strengths, reverse=True)
    return either(first, *(_COMPANION_WEIGHT * s for s in others))


def verdict_json(
    summary: Summary, machine: Machine, hypotheses: Sequence[Hypothesis], rulebook: Rulebook
) -> dict[str, object]:
    """The verdict object of architecture section 8 for one summary."""
    decision = decide(hypotheses)
    winner = decision.winner
    primary = winner.category if winner else "inconclusive"
    shares = shares_of(summary, winner)
    samples = summary.number("samples_count") or summary.count("workload.num_requests")
    confidence = _confidence(decision, samples, summary.measured)
    situation = Situation(
        primary=primary,
        cause=winner.cause if winner else None,
        shares=shares if winner_share(summary, winner) else {},
        signals=signals_of(summary, machine, hypotheses) | {"status": _status(summary, decision)},
        engine=summary.text("engine.name"),
        engine_version=summary.text("engine.version"),
        settings=settings_of(summary),
    )
    recommend, refused = _changes(situation, decision, rulebook)
    first = recommend[0] if recommend and winner else None
    verdict: dict[str, object] = {
        "id": summary.id,
        "status": _status(summary, decision),
        "objective": {
            "metric": summary.text("workload.objective") or "e2e",
            "limit_s": None,
            "boundary": None,
            "text": None,
        },
        "window": {"from_unix_ns": None, "to_unix_ns": None},
        "requests": None if samples is None else int(samples),
        "affected": {"count": None, "of": None if samples is None else int(samples), "slo": None},
        "baseline": None if summary.baseline is None else {"from": None, "to": None, "matched": None},
        "primary": primary,
        "cause": winner.cause if winner else None,
        "mechanism": winner.mechanism if winner else None,
        "headline": decision.reason if winner is None else winner.sentence,
        "shares": shares,
        "explained_ratio": round(1 - shares.get("unexplained", 0.0), 6),
        "confidence": confidence,
        "evidence": _evidence(decision),
        "recommend": recommend,
        "will_not_help": refused,
        "missing": missing_numbers(summary, machine)
        if winner is None or confidence["level"] in ("low", "insufficient")
        else [],
        "verify": _verify(first),
        "stage": "measured" if winner is None else "chosen" if recommend else "caused",
        "examples": [],
        "signals": {name: rounded(v) if isinstance(v, float) else v for name, v in sorted(situation.signals.items())},
        "provenance": {"rules": rulebook.version, "analyzer": _analyzer_version(), "coverage": None},
    }
    return verdict


def rounded(value: float) -> float | None:
    """Six significant digits; None for what is no finite number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _analyzer_version() -> str:
    try:
        return version("phasewise")
    except PackageNotFoundError:
        return "unknown"


def _status(summary: Summary, decision: Decision) -> str:
    """A summary is sent because something is asked about. Healthy is said only of a deployment at what its hardware gives."""
    winner = decision.winner
    if winner is None or not summary.measured:
        return "unknown"
    at_its_roof = winner.mechanism in (
        "memory_roof",
        "room_in_the_batch",
        "clock_does_not_matter",
        "clock_matters",
        "one_device_is_slow",
    )
    wanted, reached = (
        summary.count("workload.target_output_throughput_tok_per_s"),
        summary.number("output_throughput_tok_per_s"),
    )
    missed = wanted is not None and reached is not None and reached < wanted
    return "healthy" if at_its_roof and winner.cause not in CONTENTION and not missed else "slow"


def _confidence(decision: Decision, samples: float | None, measured: bool) -> dict[str, object]:
    """The worst of its checks; words, and it changes no status. samples: requests behind the numbers, where it is told."""
    winner = decision.winner
    supporting = [e for h in decision.supporting for e in h.evidence if e.stance == "for"] if winner else []
    opposing = [e for e in winner.evidence if e.stance == "against"] if winner else []
    count = len({(e.name, e.source) for e in supporting})
    strength = winner.strength if winner else decision.strength
    signals = (
        "high"
        if count >= 3 or (count == 2 and strength >= 0.85)
        else "medium"
        if count == 2 or strength >= 0.75
        else "low"
    )
    checks = [
        (
            "strength of the best explanation",
            rounded(decision.strength),
            _graded(decision.strength, LEAST_STRENGTH, 0.68, 0.85),
        ),
        ("independent signals for", count, signals),
        ("signals against", len(opposing), ("high", "medium", "low")[min(len(opposing), 2)]),
        ("margin over the next class", rounded(decision.lead), _graded(decision.lead, 0.0, 0.2, 0.4)),
    ]
    if samples is not None:
        checks.append(("requests behind the numbers", samples, _LEVELS[1 + sum(samples >= n for n in _SAMPLES)]))
    if not measured:
        checks.append(("only settings were told, nothing was measured", 0, "low"))
    if winner is not None and winner.caveat is not None:
        checks.append((f"not told: {winner.caveat}", 1, "low"))
    level = min((one for _, _, one in checks), key=_LEVELS.index)
    return {
        "level": "insufficient" if winner is None else max("low", level, key=_LEVELS.index),
        "checks": [{"check": name, "value": value, "level": one} for name, value, one in checks],
    }


def _graded(value: float, low: float, medium: float, high: float) -> str:
    return _LEVELS[sum(value >= limit for limit in (low, medium, high))]


def _evidence(decision: Decision) -> list[dict[str, object]]:
    """What speaks for the chosen class, then against it, then for its rival."""
    about = decision.winner.category if decision.winner else "inconclusive"
    said = [(e, h.category) for h in decision.supporting for e in h.evidence]
    said.sort(key=lambda entry: entry[0].stance != "for")
    if decision.rival is not None:
        said += [(e, decision.rival.category) for e in decision.rival.evidence]
    said.sort(key=lambda entry: entry[1] != about)
    # two mechanisms of one class may point at the same number: it counts and is shown once
    unique: dict[tuple[str, str, str], dict[str, object]] = {}
    for evidence, category in said:
        unique.setdefault((evidence.name, evidence.source, category), _row(evidence, category))
    return list(unique.values())[:_EVIDENCE_LIMIT]


def _row(evidence: Evidence, about: str) -> dict[str, object]:
    observed = rounded(evidence.observed) if isinstance(evidence.observed, float) else evidence.observed
    expected = rounded(evidence.expected) if isinstance(evidence.expected, float) else evidence.expected
    unit = evidence.unit
    if unit == "ratio" and isinstance(observed, float) and observed > 1.5:
        unit = "times"
    name = evidence.name
    for suffix in ("_ms", "_s", "_count", "_ratio", "_tokens", "_tok_per_s", "_per_s"):
        name = name.removesuffix(suffix)
    return {
        "name": f"{name.replace('_', ' ')}: {evidence.text}",
        "observed": observed,
        "expected": expected,
        "unit": unit,
        "source": evidence.source,
        "status": "measured",
        "says": evidence.stance,
        "about": about,
        "for": [about] if evidence.stance == "for" else [],
        "against": [about] if evidence.stance == "against" else [],
    }


def _changes(
    situation: Situation, decision: Decision, rulebook: Rulebook
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """At most three changes, those of the winning mechanism first, and the ledger of tempting ones with their numbers."""
    if decision.winner is None:
        names = [
            t
            for h in decision.supporting
            for t in h.techniques
            if t in ("check_device_health", "collect_missing_signals")
        ]
        wanted = tuple(dict.fromkeys((*names, "collect_missing_signals")))[:2]
        offered = match(situation, rulebook, limit=2, candidates=wanted).recommend
        return [one for one in offered if one["technique"] in wanted], []
    winner = decision.winner
    candidates = [name for name in winner.techniques if name in rulebook.techniques]
    matched = match(situation, rulebook, limit=8, candidates=candidates)
    if not any(one["technique"] in candidates for one in matched.recommend):
        matched = match(replace(situation, shares={}), rulebook, limit=8, candidates=candidates)
    known = {str(one["technique"]): one for one in matched.recommend}
    recommend = [known[name] for name in candidates if name in known][:3]
    ledger = {str(one["technique"]): one for one in matched.will_not_help}
    for one in winner.tempting:
        technique = rulebook.techniques.get(one.technique)
        ledger[one.technique] = {
            "technique": one.technique,
            "title": technique.title if technique else one.technique,
            "reason": one.reason,
            "number": None if one.number is None else rounded(one.number),
            "starts_to_help_at": one.starts_to_help_at,
        }
    chosen = {str(one["technique"]) for one in recommend}
    ordered = [one.technique for one in winner.tempting] + list(ledger)
    refused = [ledger[name] for name in dict.fromkeys(ordered) if name not in chosen]
    return recommend, refused[:_LEDGER_LIMIT]


def _verify(first: dict[str, object] | None) -> dict[str, object] | None:
    """How to prove the first change: the same load with and without it, sent again as a summary with `baseline`."""
    if first is None:
        return None
    rule = first.get("verify")
    told = dict(rule) if isinstance(rule, dict) else {}
    return {
        "command": "phasewise compare --summary BOTH.jsonl --slo METRIC:LIMIT",
        "arms": ["as now", str(first.get("title"))],
        "minutes": told.get("minutes"),
        "pass": told.get("pass"),
        "refute": told.get("refute"),
        "guard": told.get("guard"),
    }
