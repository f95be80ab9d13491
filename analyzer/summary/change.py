"""One comparison of two runs, and what a changed setting can mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phasewise.analyzer.summary.machine import Machine
from phasewise.analyzer.summary.points import Point, Summary, finite

MATTERS = 1.25  # times better, from which on a difference is not noise


@dataclass(frozen=True, slots=True)
class Lever:
    """What a setting acts on. phases: numbers in which it must show; techniques: the change, as seen from the observed run."""

    cause: str
    mechanism: str
    techniques: tuple[str, ...]
    sentence: str
    phases: tuple[str, ...] = ("ttft", "tpot", "itl", "e2e", "throughput")
    strength: float = 0.65
    symptoms: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Change:
    """One comparison: the setting, its value here and there, and by how much the other run is better, by phase."""

    path: str
    here: object
    there: object
    gains: Mapping[str, float]
    point: Point

    def best(self, phases: tuple[str, ...]) -> tuple[str, float] | None:
        known = [(phase, self.gains[phase]) for phase in phases if phase in self.gains]
        return max(known, key=lambda entry: entry[1], default=None)

    @property
    def raised(self) -> bool:
        a, b = finite(self.here), finite(self.there)
        return a is not None and b is not None and b > a

    @property
    def lowered(self) -> bool:
        a, b = finite(self.here), finite(self.there)
        return a is not None and b is not None and b < a


# What a changed setting acts on; None where that change, in that direction, means nothing.
Choose = Callable[[Summary, Machine, Change], Lever | None]


def switch(
    cause: str,
    mechanism: str,
    techniques: tuple[str, ...],
    sentence: str,
    phases: tuple[str, ...],
    symptoms: frozenset[str] = frozenset(),
) -> Choose:
    """A feature that is on in the better run and off (or unknown) in the observed one."""

    def choose(summary: Summary, machine: Machine, change: Change) -> Lever | None:
        if change.there in (False, "off", "none", None, 0):
            return None
        return Lever(cause, mechanism, techniques, sentence, phases, symptoms=symptoms)

    return choose


def more(
    cause: str,
    mechanism: str,
    techniques: tuple[str, ...],
    sentence: str,
    phases: tuple[str, ...] = ("ttft", "tpot", "itl", "e2e", "throughput"),
    symptoms: frozenset[str] = frozenset(),
) -> Choose:
    """A number that is higher in the better run."""

    def choose(summary: Summary, machine: Machine, change: Change) -> Lever | None:
        if not change.raised and not (finite(change.here) is None and finite(change.there) is not None):
            return None
        return Lever(cause, mechanism, techniques, sentence, phases, symptoms=symptoms)

    return choose
