"""Which scrape is which replica: joining the names that spans and scrapes give one engine process.

In this order: the same name in both; the only instance of that engine family alive in the overlapping time, on both sides; the
finished counter against the spans that finished. Otherwise unjoined, and said so: a wrong join is worse than none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phasewise.collector.records import Instance

SLACK_NS = 120 * 10**9  # scrapes may stop before the last request, and begin after the first
COUNTER_ERROR = 0.2  # mean deviation of the two cumulative counts, as a share of their total
COUNTER_LEAD = 2.0  # the second best must be that much worse
COUNTER_LEAST = 5  # finished requests


@dataclass(frozen=True, slots=True)
class Join:
    """`spans` and `scrape` are names of one replica; `by`: resource, only_instance, counters, user."""

    spans: str
    scrape: str
    by: str


# Mean deviation between the finished counter of a scrape and the finished spans of an instance, None where it cannot be told.
Deviation = Callable[[str, str], float | None]


def joins_of(
    instances: Sequence[Instance], family: Callable[[str | None], str | None], deviation: Deviation
) -> list[Join]:
    """Joins for every span instance that has one. `family` maps an engine id to its family."""
    spans = [i for i in instances if i.kind == "spans" and i.engine]
    scrapes = [i for i in instances if i.kind == "scrape"]
    found: list[Join] = []
    for one in spans:
        same = [s for s in scrapes if family(s.engine) == family(one.engine)]
        candidates = [s for s in same if _overlap(one, s, 0)] or [s for s in same if _overlap(one, s)]
        fixed = _by_user(one, candidates) or _by_name(one, candidates)
        if fixed:
            found.append(fixed)
            continue
        rivals = [o for o in spans if o is not one and family(o.engine) == family(one.engine) and _overlap(one, o, 0)]
        if len(candidates) == 1 and not rivals:
            found.append(Join(one.instance, candidates[0].instance, "only_instance"))
        elif candidates and (best := _by_counters(one, candidates, rivals, deviation)):
            found.append(best)
    return found


def _overlap(one: Instance, other: Instance, slack_ns: int = SLACK_NS) -> bool:
    return (
        one.first_seen_unix_ns - slack_ns <= other.last_seen_unix_ns
        and other.first_seen_unix_ns - slack_ns <= one.last_seen_unix_ns
    )


def _by_user(one: Instance, candidates: Sequence[Instance]) -> Join | None:
    if one.joined_by == "user" and any(c.instance == one.joined_to for c in candidates):
        return Join(one.instance, str(one.joined_to), "user")
    return None


def _by_name(one: Instance, candidates: Sequence[Instance]) -> Join | None:
    """The scrape carries the resource's own name: set by an import, by a pod label, or by the sender of OTLP metrics."""
    for candidate in candidates:
        if candidate.instance == one.instance:
            return Join(one.instance, candidate.instance, "resource")
    return None


def _by_counters(
    one: Instance, candidates: Sequence[Instance], rivals: Sequence[Instance], deviation: Deviation
) -> Join | None:
    """The candidate whose counter follows this instance's spans, clearly better than any other pairing of either."""
    own = {c.instance: d for c in candidates if (d := deviation(one.instance, c.instance)) is not None}
    if not own:
        return None
    best = min(own, key=lambda name: own[name])
    others = [d for name, d in own.items() if name != best]
    others += [d for r in rivals if (d := deviation(r.instance, best)) is not None]
    if own[best] > COUNTER_ERROR or any(d < max(own[best] * COUNTER_LEAD, COUNTER_ERROR) for d in others):
        return None
    return Join(one.instance, best, "counters")


def counter_deviation(counts: Sequence[tuple[int, float]], finished_unix_ns: Sequence[int]) -> float | None:
    """How far a finished counter, as (time, count) in order, runs from the times at which spans finished, both ascending.

    Mean absolute difference of the two cumulative counts over the scrapes, as a share of the larger total; None below
    COUNTER_LEAST on either side. A counter that falls (a restart) begins again.
    """
    if len(counts) < 2:
        return None
    steps = [0.0]
    for (_, before), (_, after) in itertools.pairwise(counts):
        steps.append(steps[-1] + (after - before if after >= before else after))
    start, end = counts[0][0], counts[-1][0]
    inside = [t for t in finished_unix_ns if start < t <= end]
    total = max(steps[-1], float(len(inside)))
    if min(steps[-1], len(inside)) < COUNTER_LEAST:
        return 1.0 if total >= COUNTER_LEAST else None
    at, difference = 0, 0.0
    for (time, _), value in zip(counts, steps, strict=True):
        while at < len(inside) and inside[at] <= time:
            at += 1
        difference += abs(value - at)
    return difference / len(counts) / total


def joined_names(instances: Mapping[tuple[str, str], Instance], spans_instance: str) -> list[str]:
    """Names under which scrapes of this span instance are stored; its own name is one of them (OTLP metrics)."""
    own = instances.get((spans_instance, "spans"))
    names = [spans_instance]
    if own is not None and own.joined_to:
        names.append(own.joined_to)
    names += [i.instance for i in instances.values() if i.kind == "scrape" and i.joined_to == spans_instance]
    return list(dict.fromkeys(names))
