"""Which changes act on what was found, which do not and why: the technique files against one situation.

Used for telemetry and for summaries alike; it must work with all signals and with hardly any. A technique is offered only if
it acts on the bound that was found, is not in force, and nothing known speaks against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from phasewise.analyzer.conditions import (
    Checked,
    Situation,
    Value,
    applies,
    check,
    complete_signals,
    in_force,
)
from phasewise.analyzer.gains import DIRECT, INDUCED, GainInputs
from phasewise.rules.load import Rulebook
from phasewise.rules.schema import Flag, Technique
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

__all__ = ["Assessment", "Matched", "Situation", "assess", "match"]

FALLBACK = "collect_missing_signals"
# Smallest ceiling worth an experiment: share of the affected seconds, or of the seconds of the cause where those are few.
LEAST_CEILING = 0.03
LEAST_OF_CAUSE = 0.3
# A cause of the same class counts as found too when it holds at least this part of the main cause's seconds.
COMPANION = 0.5
RISK_WEIGHT: Mapping[str, float] = {"low": 1.0, "medium": 1.5, "high": 3.0}
EFFORT_WEIGHT: Mapping[str, float] = {"setting": 1.0, "change": 1.3, "hardware": 2.0}
UNKNOWN_WEIGHT = 0.7  # per condition whose signal is unknown
# Where no shares are known: a nominal ceiling, for the order alone; never shown.
NOMINAL_CAUSE, NOMINAL_CLASS = 0.3, 0.1
# Part of a ceiling that trials of such changes reach: our estimate, and labelled so wherever it is shown. The low end is
# that of a change that is sure to deliver, times the technique's likelihood and what unknown conditions leave of it.
EXPECTED_LOW, EXPECTED_HIGH = 0.5, 0.9
LEDGER_LIMIT = 8
OVERLOAD: frozenset[str] = frozenset({"queueing", "kv"})


@dataclass(frozen=True, slots=True)
class Matched:
    """recommend and will_not_help in the shape of the verdict JSON (architecture section 8).

    withheld: techniques that act on the bound but need a signal nobody sent, with how to read it.
    """

    recommend: list[dict[str, object]]
    will_not_help: list[dict[str, object]]
    withheld: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Assessment:
    """One technique against one situation. outcome: offered, refused (a known number speaks against it), in_force, withheld
    (a required signal is unknown) or not_applicable (it does not act on what was found)."""

    technique: Technique
    outcome: str
    acts_on_cause: bool
    direct: float | None
    induced: float | None
    against: Checked | None
    unknown: tuple[str, ...]  # how to read what is missing
    state_unknown: bool
    score: float


def match(situation: Situation, rulebook: Rulebook, limit: int = 3, candidates: Sequence[str] = ()) -> Matched:
    """At most `limit` changes, the best first, and the ledger of tempting ones that will not help.

    candidates: techniques that the caller has its own evidence for, in order of preference: they come first unless
    something known speaks against them, and an unknown required signal does not withhold them.
    """
    signals = complete_signals(situation)
    assessed = [assess(t, situation, signals, trusted=t.id in candidates) for t in rulebook.techniques.values()]
    if situation.primary == "inconclusive":
        offered = _ordered([a for a in assessed if a.outcome == "offered"], candidates)
        return Matched([_recommendation(a, situation) for a in offered[:limit]], [])
    offered = _ordered([a for a in assessed if a.outcome == "offered" and a.technique.id != FALLBACK], candidates)
    chosen = _choose(offered, situation, limit)
    withheld = [a for a in assessed if a.outcome == "withheld"]
    recommend = [_recommendation(a, situation) for a in chosen]
    if not recommend and withheld and FALLBACK in rulebook.techniques:
        fallback = assess(rulebook.techniques[FALLBACK], situation, signals, trusted=True)
        recommend = [_recommendation(fallback, situation) | {"read_first": _all_unknown(withheld)}]
    return Matched(
        recommend=recommend,
        will_not_help=_ledger([a for a in assessed if a not in chosen], situation),
        withheld=[
            {"technique": a.technique.id, "title": a.technique.title, "read_first": list(a.unknown)} for a in withheld
        ],
    )


def assess(
    technique: Technique, situation: Situation, signals: Mapping[str, Value], trusted: bool = False
) -> Assessment:
    """What becomes of one technique. signals: completed by `complete_signals`."""
    found = found_causes(situation)
    acts = acts_on(technique, situation, found) or trusted
    direct, induced = ceilings(technique, situation, signals)
    contra = [check(c, situation, signals) for c in technique.contraindications if applies(c, situation)]
    needed = [check(c, situation, signals) for c in technique.preconditions if applies(c, situation)]
    against = next((c for c in contra if c.holds), None) or next((c for c in needed if c.holds is False), None)
    state = in_force(technique.in_force, situation, signals)
    missing = [c for c in needed if c.holds is None]
    unknown = [c.read for c in missing]
    if state is None and technique.in_force is not None:
        unknown.insert(0, technique.in_force.read)
    outcome = "offered"
    if state:
        outcome = "in_force"
    elif against is not None:
        outcome = "refused"
    elif not acts and not _drains_enough(technique, situation, induced, unknown):
        outcome = "not_applicable"
    elif not trusted and any(c.condition.required for c in missing):
        outcome = "withheld"
    elif not _worth_it(situation, direct, induced):
        outcome = "not_applicable"
    return Assessment(
        technique=technique,
        outcome=outcome,
        acts_on_cause=acts,
        direct=direct,
        induced=induced,
        against=against,
        unknown=tuple(dict.fromkeys(unknown)),
        state_unknown=state is None or any(c.condition.ranks_last for c in missing),
        score=_score(technique, situation, direct, induced, len(missing)),
    )


def found_causes(situation: Situation) -> frozenset[str]:
    """The verdict's cause, and causes of the same class that hold about as much; all of the class when no cause is named."""
    if situation.cause is None:
        held = {c: s for c, s in situation.shares.items() if CLASS_OF_CAUSE.get(c) == situation.primary and s > 0}
        if not held:
            return frozenset(c for c, group in CLASS_OF_CAUSE.items() if group == situation.primary)
        return frozenset(c for c, share in held.items() if share >= COMPANION * max(held.values()))
    least = COMPANION * situation.shares.get(situation.cause, 0.0)
    return frozenset({situation.cause}) | {
        cause
        for cause, share in situation.shares.items()
        if CLASS_OF_CAUSE.get(cause) == situation.primary and share >= least > 0
    }


def acts_on(technique: Technique, situation: Situation, found: frozenset[str]) -> bool:
    """It acts on what was found, and answers verdicts of this class."""
    if situation.primary == "inconclusive":
        return "inconclusive" in technique.categories
    return situation.primary in technique.categories and not found.isdisjoint(technique.acts_on)


def ceilings(
    technique: Technique, situation: Situation, signals: Mapping[str, Value]
) -> tuple[float | None, float | None]:
    """Direct and induced share of the affected seconds it can take at most; None where unknown."""
    if not situation.shares or technique.gain.direct is None:
        return None, None
    inputs = GainInputs(situation.shares, signals, technique.acts_on, technique.gain.parameters)
    direct = DIRECT[technique.gain.direct](inputs)
    if direct is None or technique.gain.induced is None:
        return direct, None if direct is None else 0.0
    induced = INDUCED[technique.gain.induced](inputs, direct)
    return direct, None if induced is None else min(induced, max(0.0, 1 - direct))


def _worth_it(situation: Situation, direct: float | None, induced: float | None) -> bool:
    if direct is None:
        return True
    total = direct + (induced or 0.0)
    cause = situation.shares.get(situation.cause or "", 0.0)
    return total >= LEAST_CEILING or (cause > 0 and total >= LEAST_OF_CAUSE * cause)


def _drains_enough(technique: Technique, situation: Situation, induced: float | None, unknown: Sequence[str]) -> bool:
    """Acts on the waiting only through shorter service. Offered for that only if everything it needs is known, and it is
    no technique that people reach for wrongly in such a situation."""
    tempting = situation.cause in technique.tempting_for or situation.primary in technique.tempting_for
    return situation.primary in OVERLOAD and not tempting and not unknown and (induced or 0.0) >= 2 * LEAST_CEILING


def _score(
    technique: Technique, situation: Situation, direct: float | None, induced: float | None, unknown: int
) -> float:
    if direct is None:
        ceiling = NOMINAL_CAUSE if situation.cause in technique.acts_on else NOMINAL_CLASS
    else:
        ceiling = direct + (induced or 0.0)
    cost = RISK_WEIGHT[technique.risk.level] * EFFORT_WEIGHT[technique.effort]
    return ceiling * technique.likelihood * UNKNOWN_WEIGHT**unknown / cost


def _ordered(offered: list[Assessment], candidates: Sequence[str]) -> list[Assessment]:
    """Best first: what the caller has evidence for, then by score; an unknown state ranks last; ties by name."""
    place = {name: index for index, name in enumerate(candidates)}
    return sorted(
        offered,
        key=lambda a: (place.get(a.technique.id, len(place)), a.state_unknown, -a.score, a.technique.id),
    )


def _choose(offered: list[Assessment], situation: Situation, limit: int) -> list[Assessment]:
    """The first `limit`; under overload one of them acts on the waiting itself."""
    chosen = offered[:limit]
    if situation.primary not in OVERLOAD or not limit or any(a.technique.acts_on_waiting for a in chosen):
        return chosen
    waiting = next((a for a in offered[limit:] if a.technique.acts_on_waiting), None)
    return [*chosen[: limit - 1], waiting] if waiting else chosen


# --- what is printed -------------------------------------------------------------------------------------------------


def _recommendation(assessment: Assessment, situation: Situation) -> dict[str, object]:
    technique = assessment.technique
    flags = flags_for(technique, situation.engine, situation.engine_version)
    total = None if assessment.direct is None else min(1.0, assessment.direct + (assessment.induced or 0.0))
    sure = technique.likelihood * UNKNOWN_WEIGHT ** len(assessment.unknown)
    expected = {
        "low": None if total is None else _rounded(EXPECTED_LOW * sure * total),
        "high": None if total is None else _rounded(EXPECTED_HIGH * total),
        "source": "model estimate",
    }
    return {
        "technique": technique.id,
        "title": technique.title,
        "ceiling": {"direct": _rounded(assessment.direct), "induced": _rounded(assessment.induced)},
        "expected": expected,
        "flags": {engine: flag.text for engine, flag in flags.items()},
        "current": _current(flags, technique, situation),
        "risk": {"level": technique.risk.level, "reason": technique.risk.reason},
        "restart": technique.restart,
        "effort": technique.effort,
        "output_effect": technique.output_effect,
        "gate": technique.gate,
        "does_not_change": technique.does_not_change,
        "requires_with": list(technique.requires_with),
        "why": technique.why,
        "read_first": list(assessment.unknown),
        "verify": {
            "pass": technique.verify.pass_rule,
            "refute": technique.verify.refute_rule,
            "guard": technique.verify.guard,
            "minutes": technique.verify.minutes,
        },
    }


def flags_for(technique: Technique, engine: str | None, version: str | None) -> dict[str, Flag]:
    """The flags of this engine that its version has; of all engines where the engine is unknown."""
    name = (engine or "").lower()
    return {
        flag_engine: flag
        for flag_engine, flag in technique.flags.items()
        if (not name or name.startswith(flag_engine)) and _valid(flag, version)
    }


def _valid(flag: Flag, version: str | None) -> bool:
    try:
        seen = Version(version or "")
    except InvalidVersion:
        return True
    return (flag.since is None or seen >= Version(flag.since)) and (flag.until is None or seen < Version(flag.until))


def _current(flags: Mapping[str, Flag], technique: Technique, situation: Situation) -> dict[str, object] | None:
    """The present value of the setting the flag changes, with its source; None where nobody saw it."""
    for flag in (*flags.values(), *technique.flags.values()):
        seen = situation.settings.get(flag.setting or "")
        if seen is not None and seen.value is not None:
            told = [{"value": value, "source": source} for value, source in seen.others]
            return {"setting": flag.setting, "value": seen.value, "source": seen.source} | (
                {"others": told} if told else {}
            )
    return None


def _ledger(rest: list[Assessment], situation: Situation) -> list[dict[str, object]]:
    """Tempting techniques with what disqualifies them, the most tempting first."""
    found = found_causes(situation)
    tempting = []
    for assessment in rest:
        technique = assessment.technique
        tempts = situation.cause in technique.tempting_for or situation.primary in technique.tempting_for
        acts = acts_on(technique, situation, found)
        if assessment.outcome in ("refused", "in_force", "not_applicable") and (tempts or acts):
            tempting.append(assessment)
    tempting.sort(key=lambda a: (-_tempting(a), a.technique.id))
    return [_refusal(assessment, situation) for assessment in tempting[:LEDGER_LIMIT]]


def _tempting(assessment: Assessment) -> float:
    """How likely a reader thinks of it here: a change that would act and is in force already comes first."""
    in_place = assessment.acts_on_cause and assessment.outcome == "in_force"
    return assessment.technique.temptation + (1.0 if in_place else 0.0)


def _refusal(assessment: Assessment, situation: Situation) -> dict[str, object]:
    technique, against = assessment.technique, assessment.against
    number: Value = None
    starts = None
    if assessment.outcome == "in_force":
        reason, number = "it is in force already", None
    elif assessment.outcome == "refused" and against is not None:
        reason, number, starts = against.reason, against.observed, against.condition.starts_to_help_at
    elif assessment.acts_on_cause:
        reason, number = _too_little(assessment)
        starts = f"when it could take {100 * LEAST_CEILING:.2g} % of the affected time or more"
    else:
        reason, number = _not_acting(assessment, situation)
        held = sorted(technique.acts_on, key=lambda cause: -situation.shares.get(cause, 0.0))
        others = [cause for cause in held if cause != situation.cause]
        starts = f"when {' or '.join(others[:3])} is what makes requests slow" if others else None
    return {
        "technique": technique.id,
        "title": technique.title,
        "reason": reason,
        "number": _rounded(number) if isinstance(number, float) else number,
        "starts_to_help_at": starts,
    }


def _too_little(assessment: Assessment) -> tuple[str, float | None]:
    """Why a technique that acts on what was found is not worth a trial: its ceiling, never the share it acts on."""
    total = (assessment.direct or 0.0) + (assessment.induced or 0.0)
    return f"it acts on what was found, but could take at most {100 * total:.2g} % of the affected time", total


def _not_acting(assessment: Assessment, situation: Situation) -> tuple[str, float | None]:
    """Why a technique that nothing forbids does not act here, and the share of the time its causes hold."""
    technique = assessment.technique
    held = [cause for cause in technique.acts_on if situation.shares.get(cause, 0.0) >= LEAST_CEILING]
    share = sum(situation.shares.get(cause, 0.0) for cause in technique.acts_on) if situation.shares else None
    text = "an unknown part" if share is None else f"{100 * share:.2g} %"
    reason = technique.not_acting.format(share=text, causes=", ".join(held or technique.acts_on[:2]))
    if not reason:
        reason = f"it could take at most {text} of the affected time"
    if not assessment.acts_on_cause and situation.cause is not None:
        reason += f"; what was found, {situation.cause}, stays as it is"
    return reason, share


def _all_unknown(withheld: list[Assessment]) -> list[str]:
    return list(dict.fromkeys(text for assessment in withheld for text in assessment.unknown))


def _rounded(value: float | None) -> float | None:
    """Six significant digits, so that the same data give the same bytes."""
    return None if value is None else float(f"{value:.6g}")
