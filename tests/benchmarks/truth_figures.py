"""Figures of the scoreboard out of its per-scenario records: confusion matrices, and the shares of the last line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phasewise.rules.vocabulary import CAUSES, CLASSES

OBJECTIVES = ("ttft", "itl", "e2e")
VIEWS = ("steps", "spans")
ABSTAINED = "inconclusive"  # no primary class: the verdict names none
CLEAR_MARGIN = 0.2  # of a request: a smaller lead over the next class is ambiguous
WHOLE_RUN = "e2e"  # the objective that a run as a whole is asked for
NONE = "-"


@dataclass(frozen=True, slots=True)
class Answer:
    """The class and the cause that a verdict names; ABSTAINED where it names none."""

    kind: str
    cause: str | None
    status: str = ""
    confidence: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """The truth of a window. is_dominant: its lead is large enough to call any other answer wrong."""

    kind: str
    cause: str | None
    margin_ratio: float = 1.0
    is_dominant: bool = True
    contention_ratio: float | None = None


Pair = tuple[Label, Answer]


@dataclass(frozen=True, slots=True)
class Requests:
    """Of the requests whose truth has a margin over CLEAR_MARGIN: how many there are, of how many their own attribution names the true
    class, the true cause, and no class at all."""

    of: int = 0
    right_class: int = 0
    right_cause: int = 0
    abstained: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One scenario through both views.

    truth: objective -> label, without those that have none; verdicts: view -> objective -> verdict. dominant: requests whose
    own attribution (with steps) names the class, and the cause, of their truth, and how many have a truth. clear: view -> those of a clear truth.
    unexplained_ratio: of end to end, over requests, with steps. seconds: what the parts of the work took.
    """

    family: str
    seed: int
    facts: Mapping[str, Any]
    requests: int
    truth: Mapping[str, Label]
    verdicts: Mapping[str, Mapping[str, Answer]]
    dominant_class: int
    dominant_cause: int
    dominant_of: int
    unexplained_ratio_p50: float
    unexplained_ratio_p95: float
    clear: Mapping[str, Requests] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As one JSON line."""
        return asdict(self)


def pairs(judged: Iterable[Judged], view: str, objectives: Sequence[str] = OBJECTIVES) -> list[Pair]:
    """(truth, verdict) of every scenario and objective that has a truth."""
    return [
        (one.truth[objective], one.verdicts[view][objective])
        for one in judged
        for objective in objectives
        if objective in one.truth
    ]


def class_accuracy(compared: Sequence[Pair]) -> float | None:
    """Share of all windows whose class is the true one; an abstention is not right."""
    return _share([truth.kind == verdict.kind for truth, verdict in compared])


def answered_accuracy(compared: Sequence[Pair]) -> float | None:
    """The same among the windows whose verdict names a class."""
    return _share([truth.kind == verdict.kind for truth, verdict in compared if verdict.kind != ABSTAINED])


def cause_accuracy(compared: Sequence[Pair]) -> float | None:
    return _share([truth.cause == verdict.cause for truth, verdict in compared])


def dominant(compared: Sequence[Pair]) -> list[Pair]:
    """Those whose truth is not close."""
    return [(truth, verdict) for truth, verdict in compared if truth.is_dominant]


def abstained(compared: Sequence[Pair]) -> float | None:
    return _share([verdict.kind == ABSTAINED for _, verdict in compared])


def clear_share(judged: Iterable[Judged], view: str, what: str) -> float | None:
    """Of all requests with a clear truth the share that is right_class, right_cause or abstained."""
    counts = [one.clear[view] for one in judged if view in one.clear]
    of = sum(one.of for one in counts)
    return sum(getattr(one, what) for one in counts) / of if of else None


def runs(judged: Iterable[Judged], view: str) -> list[Pair]:
    """One pair a scenario: the run as a whole."""
    return pairs(judged, view, [WHOLE_RUN])


def sure_and_wrong(compared: Sequence[Pair]) -> int:
    """Windows with a clear truth for which another class is named at high confidence."""
    return sum(
        answer.confidence == "high" and answer.kind not in (ABSTAINED, truth.kind)
        for truth, answer in dominant(compared)
    )


def summary(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    """What the last line tells. Accuracies are of all windows (scenario and objective) that have a truth, abstentions counted
    as wrong; `_dominant`: of those whose truth is not close. dominant_right: of requests. unexplained: of the worst scenario."""
    steps, spans = pairs(judged, "steps"), pairs(judged, "spans")
    of = sum(one.dominant_of for one in judged)
    return {
        "scenarios": len(judged),
        "class_accuracy_steps": _rounded(class_accuracy(steps)),
        "class_accuracy_spans": _rounded(class_accuracy(spans)),
        "dominant_right": _rounded(sum(one.dominant_class for one in judged) / of if of else None),
        "abstained": _rounded(abstained(spans)),
        "seed": seed,
        "windows": len(steps),
        "windows_dominant": len(dominant(steps)),
        "class_accuracy_steps_dominant": _rounded(class_accuracy(dominant(steps))),
        "class_accuracy_spans_dominant": _rounded(class_accuracy(dominant(spans))),
        "clear_requests": sum(one.clear["steps"].of for one in judged if one.clear),
        "clear_requests_right_steps": _rounded(clear_share(judged, "steps", "right_class")),
        "clear_requests_right_spans": _rounded(clear_share(judged, "spans", "right_class")),
        "runs_right_class_steps": sum(truth.kind == said.kind for truth, said in runs(judged, "steps")),
        "runs_right_cause_steps": sum(truth.cause == said.cause for truth, said in runs(judged, "steps")),
        "runs_abstained_spans": _rounded(abstained(runs(judged, "spans"))),
        "sure_and_wrong_steps": sure_and_wrong(steps),
        "sure_and_wrong_spans": sure_and_wrong(spans),
        "unexplained_ratio_p95": _rounded(max((one.unexplained_ratio_p95 for one in judged), default=None)),
    }


def confusion(compared: Sequence[tuple[str, str]], order: Sequence[str]) -> list[str]:
    """Lines of a matrix: a row a true label, a column a label of a verdict; labels that nobody uses are left out."""
    counts = Counter(compared)
    rows = [name for name in order if any(truth == name for truth, _ in counts)]
    columns = [name for name in order if any(verdict == name for _, verdict in counts)]
    if not rows:
        return ["  (no scenario has this label)"]
    left = max(len(name) for name in rows)
    width = [max(len(name), 4) for name in columns]
    lines = [" " * (left + 4) + " ".join(f"{name:>{w}}" for name, w in zip(columns, width, strict=True))]
    for truth in rows:
        cells = [counts[truth, verdict] for verdict in columns]
        numbers = " ".join(f"{cell or '.':>{w}}" for cell, w in zip(cells, width, strict=True))
        lines.append(f"  {truth:<{left}}  {numbers}")
    return lines


def report(judged: Sequence[Judged]) -> list[str]:
    """The readable part: matrices by class and by cause for each view and objective, then by family."""
    lines = ["rows: truth, columns: verdict; counts of scenarios", ""]
    for view in VIEWS:
        for objective in OBJECTIVES:
            compared = pairs(judged, view, [objective])
            right = f"{_percent(class_accuracy(compared))} of classes and {_percent(cause_accuracy(compared))} of causes right"
            lines.append(f"{_VIEW[view]}, {objective}: {right}, {_percent(abstained(compared))} abstained")
            lines += confusion([(truth.kind, verdict.kind) for truth, verdict in compared], CLASSES)
            lines += confusion(
                [(truth.cause or NONE, verdict.cause or NONE) for truth, verdict in compared], (*CAUSES, NONE)
            )
            lines.append("")
    return [*lines, *_by_family(judged), "", *_totals(judged)]


_VIEW = {"steps": "engine with steps", "spans": "vLLM's spans and scrapes"}


def _by_family(judged: Sequence[Judged]) -> list[str]:
    families = list(dict.fromkeys(one.family for one in judged))
    width = max((len(name) for name in families), default=6)
    lines = [
        f"{'family':<{width}}  right with steps  right from spans  dominant  clear, steps  clear, spans  unexplained p95"
    ]
    for family in families:
        own = [one for one in judged if one.family == family]
        of = sum(one.dominant_of for one in own)
        dominant = sum(one.dominant_class for one in own) / of if of else None
        worst = max(one.unexplained_ratio_p95 for one in own)
        lines.append(
            f"{family:<{width}}  {_counted(own, 'steps'):>16}  {_counted(own, 'spans'):>16}  {_percent(dominant):>8}"
            f"  {_percent(clear_share(own, 'steps', 'right_class')):>12}  {_percent(clear_share(own, 'spans', 'right_class')):>12}"
            f"  {worst:>14.1%}"
        )
    return lines


def _counted(judged: Sequence[Judged], view: str) -> str:
    compared = pairs(judged, view)
    return f"{sum(truth.kind == verdict.kind for truth, verdict in compared)}/{len(compared)}"


def _totals(judged: Sequence[Judged]) -> list[str]:
    steps, spans = pairs(judged, "steps"), pairs(judged, "spans")
    of = sum(one.dominant_of for one in judged)
    causes = sum(one.dominant_cause for one in judged) / of if of else None
    lines = [
        f"{len(steps)} windows have a truth, for {len(dominant(steps))} of them it is not close; there classes are right: "
        f"{_percent(class_accuracy(dominant(steps)))} with steps, {_percent(class_accuracy(dominant(spans)))} from spans",
        f"causes right: {_percent(cause_accuracy(steps))} with steps, {_percent(cause_accuracy(spans))} from spans",
        f"classes right where spans gave an answer: {_percent(answered_accuracy(spans))}; with steps: "
        f"{_percent(answered_accuracy(steps))} ({_percent(abstained(steps))} abstained)",
        f"requests whose truth has a margin over {CLEAR_MARGIN:.0%}: class right for {_percent(clear_share(judged, 'steps', 'right_class'))} with "
        f"steps, {_percent(clear_share(judged, 'spans', 'right_class'))} from spans (none named for "
        f"{_percent(clear_share(judged, 'spans', 'abstained'))})",
        f"wrong at high confidence where the truth is not close: {sure_and_wrong(steps)} windows with steps, {sure_and_wrong(spans)} from spans",
        f"requests whose dominant cause is the true one (with steps): {_percent(causes)} of {of:,}",
    ]
    spent: Counter[str] = Counter()
    for one in judged:
        spent.update(one.seconds)
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
    return [*lines, f"work of all processes: {parts}"]


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"
