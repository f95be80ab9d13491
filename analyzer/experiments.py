"""Choosing between strategies that are given as numbers: by their tails against the objective, never by the mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from phasewise.analyzer.summary.document import metric_names, validate_summary
from phasewise.analyzer.summary.points import Point, finite
from phasewise.analyzer.summary.reader import read_summary
from phasewise.rules.errors import InputError

_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})\s*(ms|s|m)?")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}
_PERCENTILE = re.compile(r"_p(\d{2})(?:_|$)")
_THROUGHPUT = (
    "output_throughput_tok_per_s",
    "total_throughput_tok_per_s",
    "request_throughput_per_s",
    "output_throughput_per_gpu_tok_per_s",
    "total_throughput_per_gpu_tok_per_s",
)
# What people compare first, and what hides the tail.
_AVERAGES = ("ttft_mean", "ttft_p50", "tpot_mean", "tpot_p50", "e2e_mean", "e2e_p50")


@dataclass(frozen=True, slots=True)
class Limit:
    """One objective: a field of the metric vocabulary and its bound, in the unit of the field.

    least: the value must reach the bound (rates, where more is better), else it must not exceed it.
    """

    metric: str
    bound: float
    least: bool
    text: str

    def met(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound

    def excess(self, value: float) -> float:
        """How far beyond the bound, as a ratio; 1 is exactly at it."""
        over, under = (self.bound, value) if self.least else (value, self.bound)
        return over / under if under > 0 else float("inf") if over > 0 else 1.0


def parse_limits(text: str) -> tuple[Limit, ...]:
    """`ttft_p99:2s,tpot_p95:60ms`; a time without a unit is in seconds, a rate (`output_throughput_tok_per_s:50`) a minimum.

    Raises InputError naming the part that is wrong and the metric that was probably meant.
    """
    limits = [_limit(part.strip()) for part in text.split(",") if part.strip()]
    if not limits:
        raise InputError("slo", repr(text), "names no limit", "write metric_percentile:limit, as in ttft_p99:2s")
    return tuple(limits)


def _limit(part: str) -> Limit:
    name, colon, bound = part.partition(":")
    name, bound = name.strip(), bound.strip()
    known = metric_names()
    timed, rated = (
        f"{name.removesuffix('_ms')}_ms",
        next((m for m in (name, f"{name}_tok_per_s", f"{name}_per_s") if m in known), None),
    )
    if timed in known:
        found = _DURATION.fullmatch(bound)
        if colon and found:
            seconds = float(found[1]) * _SECONDS[found[2]]
            return Limit(timed, seconds * 1000, False, f"{timed.removesuffix('_ms')} {_seconds(seconds)}")
        raise InputError("slo", repr(part), "is not metric_percentile:limit", "a limit is a time, like 2s or 80ms")
    if rated is not None and rated.endswith("_per_s"):
        if colon and _NUMBER.fullmatch(bound):
            return Limit(rated, float(bound), True, f"{rated} at least {float(bound):g}")
        raise InputError("slo", repr(part), "is not metric:limit", "the limit of a rate is a number")
    choices = sorted(m.removesuffix("_ms") for m in known if m.endswith(("_ms", "_per_s")))
    close = get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = (
        f"did you mean {close[0]!r}?"
        if close
        else "a metric of phasewise-summary/1 with its percentile, as in ttft_p99"
    )
    raise InputError("slo", repr(part), f"{name!r} is no metric", hint)


def compare_summaries(strategies: Sequence[Mapping[str, object]], slo: str) -> dict[str, object]:
    """Which strategy to run: of those that meet every limit the one with most throughput.

    strategies: phasewise-summary/1 documents, `id` is the name; slo as in `parse_limits`. A strategy that does not tell a
    limited metric cannot qualify, nor one whose percentile rests on fewer than 1 / (1 - p) requests.

    Returns {slo, chosen (id or None), closest (id where none qualifies), headline, strategies, faster_on_average}; each of
    `strategies`: id, qualifies, checks (metric, observed_ms or observed, limit, met, note), throughput, ttft, tpot (known
    statistics in seconds), worst_ratio. `faster_on_average`: those that beat the chosen (or closest) one in throughput or
    in a mean or median, and are worse in a limited tail. Raises InputError for documents, names or limits that are wrong.
    """
    limits = parse_limits(slo)
    judged = [_judge(document, limits, index) for index, document in enumerate(strategies)]
    if not judged:
        raise InputError("summary", "", "holds no strategy", "give at least one phasewise-summary/1 object")
    names = [one.name for one in judged]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError("summary", "id", f"{twice!r} names two strategies", "give each strategy its own id")
    fitting = [one for one in judged if one.qualifies]
    pace = next((m for m in _THROUGHPUT if fitting and all(one.number(m) is not None for one in fitting)), None)
    chosen = max(fitting, key=lambda one: _preference(one, pace), default=None)
    known = [one for one in judged if one.worst_ratio is not None]
    closest = None if chosen else min(known, key=lambda one: (one.worst_ratio or 0.0, one.name), default=None)
    reference = chosen or closest
    faster = [told for one in judged if reference and (told := _faster_on_average(one, reference, limits))]
    return {
        "slo": [
            {"metric": limit.metric, "limit": limit.bound, "least": limit.least, "text": limit.text} for limit in limits
        ],
        "chosen": chosen.name if chosen else None,
        "closest": closest.name if closest else None,
        "headline": _headline(chosen, closest, faster, limits),
        "strategies": [one.row(limits) for one in judged],
        "faster_on_average": faster,
    }


@dataclass(frozen=True, slots=True)
class Judged:
    """One strategy against the limits. values: the limited metrics, None where unknown; notes: why one cannot be used."""

    name: str
    points: tuple[Point, ...]
    values: Mapping[str, float | None]
    notes: Mapping[str, str]
    qualifies: bool
    worst_ratio: float | None  # largest excess over a limit; None where one is unknown

    def number(self, metric: str) -> float | None:
        return next((v for p in self.points if (v := p.number(metric)) is not None), None)

    def seconds(self, metric: str) -> float | None:
        value = self.number(f"{metric}_ms")
        return None if value is None else value / 1000

    @property
    def throughput(self) -> tuple[str, float] | None:
        return next(((m, v) for m in _THROUGHPUT if (v := self.number(m)) is not None), None)

    def row(self, limits: Sequence[Limit]) -> dict[str, object]:
        pace = self.throughput
        return {
            "id": self.name,
            "qualifies": self.qualifies,
            "checks": [self._check(limit) for limit in limits],
            "throughput": None if pace is None else {"metric": pace[0], "value": pace[1]},
            "ttft": self._statistics("ttft"),
            "tpot": self._statistics("tpot"),
            "worst_ratio": None if self.worst_ratio is None else _rounded(self.worst_ratio),
        }

    def _check(self, limit: Limit) -> dict[str, object]:
        value = self.values[limit.metric]
        return {
            "metric": limit.metric,
            "observed": value,
            "limit": limit.bound,
            "met": None if value is None else limit.met(value),
            "note": self.notes.get(limit.metric),
        }

    def _statistics(self, phase: str) -> dict[str, float | None]:
        return {
            f"{s}_s": v for s in ("mean", "p50", "p90", "p95", "p99") if (v := self.seconds(f"{phase}_{s}")) is not None
        }


def _judge(document: Mapping[str, object], limits: Sequence[Limit], index: int) -> Judged:
    validate_summary(document, f"strategy {index + 1}")
    summary = read_summary(document)
    points = tuple(p for p in (summary.observed, summary.client, summary.server) if p is not None)
    values: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for limit in limits:
        place = next((p for p in points if p.number(limit.metric) is not None), None)
        values[limit.metric] = place.number(limit.metric) if place else None
        if place is None:
            notes[limit.metric] = "not given: it cannot qualify"
        elif few := _too_few(limit.metric, finite(place.values.get("samples_count"))):
            values[limit.metric], notes[limit.metric] = None, few
    known = [limit.excess(v) for limit in limits if (v := values[limit.metric]) is not None]
    complete = len(known) == len(limits)
    return Judged(
        name=summary.id,
        points=points,
        values=values,
        notes=notes,
        qualifies=complete and all(limit.met(v) for limit in limits if (v := values[limit.metric]) is not None),
        worst_ratio=max(known) if complete and known else None,
    )


def _too_few(metric: str, samples: float | None) -> str | None:
    """A percentile p of fewer than 1 / (1 - p) requests lies above all of them but the largest: no comparison uses it."""
    found = _PERCENTILE.search(metric)
    if found is None or samples is None:
        return None
    needed = 100 / (100 - int(found[1])) if int(found[1]) < 100 else float("inf")
    return f"rests on {samples:g} requests, needs {needed:g}: it cannot qualify" if samples < needed else None


def _preference(one: Judged, pace: str | None) -> tuple[float, float, str]:
    """Most throughput first, by a metric that all tell; where there is none or it is equal, the furthest inside the limits."""
    return ((one.number(pace) or 0.0) if pace else 0.0, -(one.worst_ratio or 0.0), one.name)


def _faster_on_average(one: Judged, reference: Judged, limits: Sequence[Limit]) -> dict[str, object] | None:
    """What makes `one` look better than the reference, and in which limited tail it is worse; None unless both hold."""
    if one is reference:
        return None
    better = []
    mine, theirs = one.throughput, reference.throughput
    if mine and theirs and mine[0] == theirs[0] and mine[1] > theirs[1]:
        better.append({"metric": mine[0], "value": mine[1], "reference": theirs[1]})
    for name in _AVERAGES:
        a, b = one.seconds(name), reference.seconds(name)
        if a is not None and b is not None and a < b:
            better.append({"metric": f"{name}_s", "value": a, "reference": b})
    worse = []
    for limit in limits:
        a, b = one.number(limit.metric), reference.number(limit.metric)
        if a is not None and b is not None and (a < b if limit.least else a > b):
            worse.append(
                {"metric": limit.metric, "value": a, "reference": b, "limit": limit.bound, "met": limit.met(a)}
            )
    if not better or not worse:
        return None
    first, tail = better[0], worse[0]
    sentence = (
        f"{one.name} is faster on average ({_told(first['metric'], first['value'])} against {_told(None, first['reference'], first['metric'])}) "
        f"but worse in the tail ({_told(tail['metric'], tail['value'])} against {_told(None, tail['reference'], tail['metric'])})"
    )
    return {"id": one.name, "than": reference.name, "better": better, "worse": worse, "sentence": sentence}


def _headline(
    chosen: Judged | None, closest: Judged | None, faster: Sequence[Mapping[str, object]], limits: Sequence[Limit]
) -> str:
    wanted = ", ".join(limit.text for limit in limits)
    hidden = "".join(f"; {told['sentence']}" for told in faster)
    if chosen is not None:
        pace = chosen.throughput
        told = [_told(limit.metric, chosen.values[limit.metric]) for limit in limits if not limit.least]
        told += [_told(*pace)] if pace else []
        return f"{chosen.name} meets {wanted} ({', '.join(told)}){hidden}."
    if closest is None:
        return f"No strategy tells all of {wanted}, so none qualifies."
    worst = max(limits, key=lambda limit: limit.excess(closest.values[limit.metric] or 0.0))
    return f"No strategy meets {wanted}; {closest.name} comes closest ({_told(worst.metric, closest.values[worst.metric])}){hidden}."


def _told(name: object, value: object, unit_from: object = None) -> str:
    """`ttft_p99 1.8 s`, `78 tok/s`: a metric and its value as a reader sees them; without a name the value alone."""
    metric = str(name if name is not None else unit_from)
    number = value if isinstance(value, float) else float("nan")
    if metric.endswith("_ms"):
        label, shown = metric.removesuffix("_ms"), _seconds(number / 1000)
    elif metric.endswith("_s") and not metric.endswith("_per_s"):
        label, shown = metric.removesuffix("_s"), _seconds(number)
    else:
        label, shown = "", f"{number:g} {'requests/s' if metric.startswith('request') else 'tok/s'}"
    return f"{label} {shown}".strip() if name is not None else shown


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if value < 1e300 else None
