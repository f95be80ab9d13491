"""The lives of what answers at one scrape address: an engine that is restarted is another process with other counters.

A life is the time of one process, told by the start time that it exports. An address that answers with several processes in turn
(a balancer in front of replicas) has one life, since its samples cannot be told apart by time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from phasewise.collector.facts import merged


@dataclass(frozen=True, slots=True)
class Life:
    """starts_unix_s: start times that its samples carry, none where they carry none; settings: as `instances` keeps them."""

    scrape: str
    engine: str | None
    first_unix_ns: int
    last_unix_ns: int
    model: str | None = None
    starts_unix_s: frozenset[float] = frozenset()
    settings: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def started_unix_s(self) -> float | None:
        return max(self.starts_unix_s, default=None)

    @property
    def can_date(self) -> bool:
        """Whether its start lies before its samples; in moved recordings it does not, and then it tells nothing."""
        started = self.started_unix_s
        return started is not None and started * 1e9 <= self.last_unix_ns


def with_samples(lives: Sequence[Life], seen: Life) -> list[Life]:
    """The lives of one address after more samples (a life of the same address, with one start or none), in order of time."""
    at = _same(lives, seen)
    if at is None:
        return _apart([*lives, seen])
    return _apart([*lives[:at], _united(lives[at], seen), *lives[at + 1 :]])


def with_settings(lives: Sequence[Life], unix_ns: int, settings: Mapping[str, object]) -> list[Life]:
    """Settings seen at a time (as `facts.noted` makes them), noted with the life of that time."""
    at = _index_at(lives, unix_ns)
    own = lives[at]
    return [*lives[:at], replace(own, settings=merged(own.settings, settings)), *lives[at + 1 :]]


def _same(lives: Sequence[Life], seen: Life) -> int | None:
    """Which life these samples belong to, None where they begin another one."""
    if not lives:
        return None
    if not seen.starts_unix_s:
        return _index_at(lives, seen.first_unix_ns)
    for index, life in enumerate(lives):
        if seen.starts_unix_s & life.starts_unix_s:
            return index
    # Samples without a start time before this: the same process if it ran by then already.
    at = _index_at(lives, seen.first_unix_ns)
    if not lives[at].starts_unix_s and max(seen.starts_unix_s) * 1e9 <= lives[at].last_unix_ns:
        return at
    return None


def _index_at(lives: Sequence[Life], unix_ns: int) -> int:
    """The last life that began by then, else the first."""
    return max((i for i, life in enumerate(lives) if life.first_unix_ns <= unix_ns), default=0)


def _apart(lives: Sequence[Life]) -> list[Life]:
    """In order of time; lives that overlap are made one."""
    found: list[Life] = []
    for life in sorted(lives, key=lambda one: one.first_unix_ns):
        if found and life.first_unix_ns <= found[-1].last_unix_ns:
            found[-1] = _united(found[-1], life)
        else:
            found.append(life)
    return found


def _united(one: Life, other: Life) -> Life:
    return Life(
        scrape=one.scrape,
        engine=other.engine or one.engine,
        model=other.model or one.model,
        first_unix_ns=min(one.first_unix_ns, other.first_unix_ns),
        last_unix_ns=max(one.last_unix_ns, other.last_unix_ns),
        starts_unix_s=one.starts_unix_s | other.starts_unix_s,
        settings=merged(one.settings, other.settings),
    )
