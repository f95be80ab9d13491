"""What a detector says: one explanation of the numbers, how strongly they speak for it, and which changes act on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Scalar, Summary, at_most
from phasewise.rules.vocabulary import CLASS_OF_CAUSE


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number and what it says. source: path in the summary; text: the sentence a reader sees."""

    name: str
    observed: Scalar
    expected: Scalar
    unit: str
    source: str
    text: str
    stance: Literal["for", "against"] = "for"


@dataclass(frozen=True, slots=True)
class Tempting:
    """A change people reach for here although it does not act. number: what disqualifies it."""

    technique: str
    reason: str
    number: float | None = None
    starts_to_help_at: str | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One cause by one mechanism. strength: 0 to 1, how likely the numbers would look like this only for this reason.

    techniques: candidates in order of preference; symptoms: classes whose signs this mechanism itself produces (a full KV
    pool makes a queue), so that they do not compete; share: of the affected time, where it can be computed.
    caveat: what was not measured and would refute it; whoever has one is named with low confidence at most.
    """

    cause: str
    mechanism: str
    strength: float
    sentence: str
    evidence: tuple[Evidence, ...]
    techniques: tuple[str, ...] = ()
    tempting: tuple[Tempting, ...] = ()
    symptoms: frozenset[str] = field(default_factory=frozenset)
    share: float | None = None
    phase: str | None = None  # what it delays: ttft, tpot or e2e
    caveat: str | None = None

    @property
    def category(self) -> str:
        return CLASS_OF_CAUSE[self.cause]

    def weakened(self, factor: float, evidence: Iterable[Evidence]) -> Hypothesis:
        """The same with something against it."""
        return replace(self, strength=self.strength * factor, evidence=(*self.evidence, *evidence))


Detector = Callable[[Summary, Machine], Iterator[Hypothesis]]

_UNITS = (
    ("_tok_per_s", "tokens/s"),
    ("_mb_per_s", "MB/s"),
    ("_gb_per_s", "GB/s"),
    ("_per_s", "1/s"),
    ("_ms", "ms"),
    ("_ratio", "ratio"),
    ("_tokens", "tokens"),
    ("_bytes", "bytes"),
    ("_count", "count"),
    ("_mhz", "MHz"),
    ("_gb", "GB"),
    ("_w", "W"),
    ("_cores_used", "cores"),
    ("_cores_limit", "cores"),
)


def unit_of(name: str) -> str:
    """Unit of a field of the summary format, from its name."""
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "count")


def either(*strengths: float) -> float:
    """Strength of independent signs together: one minus the product of what each leaves open."""
    left = 1.0
    for strength in strengths:
        left *= 1 - strength
    return 1 - left


def reading(point: Point | None, metric: str, text: str, expected: Scalar = None) -> tuple[Evidence, ...]:
    """Evidence that is one reported number, empty when it is unknown."""
    return _said(point, metric, text, expected, "for")


def objection(point: Point | None, metric: str, text: str, expected: Scalar = None) -> tuple[Evidence, ...]:
    """The same, against."""
    return _said(point, metric, text, expected, "against")


def _said(
    point: Point | None, metric: str, text: str, expected: Scalar, stance: Literal["for", "against"]
) -> tuple[Evidence, ...]:
    if point is None:
        return ()
    value: Scalar = point.number(metric)
    if value is None:
        value = point.word(metric)
    if value is None:
        return ()
    return (Evidence(metric, value, expected, unit_of(metric), point.source(metric), text, stance),)


def given(summary: Summary, metric: str, text: str, expected: Scalar = None) -> tuple[Evidence, ...]:
    """Evidence that is a number of the observed run, wherever it stands."""
    return reading(summary.place_of(metric) or summary.observed, metric, text, expected)


def configured(point: Point, path: str, text: str, expected: Scalar = None) -> tuple[Evidence, ...]:
    """Evidence that is a setting, empty when it is unknown."""
    value = point.setting(path)
    if isinstance(value, bool | str):
        shown: Scalar = value
    else:
        shown = point.count(path)
        if shown is None:
            return ()
    place = path if point.differs is None or path not in point.differs else f"{point.place}.differs.{path}"
    return (Evidence(path.rpartition(".")[2], shown, expected, unit_of(path), place, text),)


def computed(
    name: str, observed: Scalar, expected: Scalar, unit: str, source: str, text: str, against: bool = False
) -> Evidence:
    """Evidence that is arithmetic over several numbers; `source` names them."""
    return Evidence(name, observed, expected, unit, source, text, "against" if against else "for")


# --- what many mechanisms listen to ----------------------------------------------------------------------------------


def supported(strength: float, evidence: list[Evidence], weight: float, found: Iterable[Evidence]) -> float:
    """The strength with one more independent sign of this weight, whose evidence is added; as it was where there is none."""
    more = tuple(found)
    evidence.extend(more)
    return either(strength, weight) if more else strength


def nothing_waits(summary: Summary, text: str = "nothing waits", most: float = 0.0) -> tuple[Evidence, ...]:
    """The engine's queue is known to be empty (at most `most` requests); empty where requests wait or it is unknown."""
    return given(summary, "requests_waiting", text) if at_most(summary.waiting, most) else ()


def nothing_preempted(summary: Summary) -> tuple[Evidence, ...]:
    """No sequence is known to have been thrown out of the pool."""
    return given(summary, "preemptions_count", "nothing was preempted") if at_most(summary.preemptions, 0) else ()


def memory_is_free(summary: Summary, most: float = 0.85, text: str = "KV memory is free") -> tuple[Evidence, ...]:
    """The KV pool is known to have room."""
    return given(summary, "kv_cache_usage_ratio", text) if at_most(summary.kv_usage, most) else ()
