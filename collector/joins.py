"""Which scrape is which replica, and when: joining the names that spans and scrapes give one engine process.

In this order: the same name in both; the only instance of that engine family alive in the overlapping time, on both sides; the
finished counter against the spans that finished; that counter against several instances together (the API server processes of
one engine). Otherwise unjoined, and said so: a wrong join is worse than none. Each life of a scrape is joined by itself, so an
engine that is restarted under another name keeps what was scraped before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from phasewise.collector.lives import Life
from phasewise.collector.records import Instance

SLACK_NS = 120 * 10**9  # scrapes may stop before the last request, and begin after the first
COUNTER_ERROR = 0.2  # mean deviation of the two cumulative counts, as a share of their total
COUNTER_LEAD = 2.0  # the second best must be that much worse
COUNTER_LEAST = 5  # finished requests
ALWAYS = (-(2**62), 2**62)
SUM = "counters_sum"


@dataclass(frozen=True, slots=True)
class Join:
    """`spans` and `scrape` are names of one replica from `from_unix_ns` to `to_unix_ns`, both included.

    by: resource, only_instance, counters, counters_sum (several span instances together), user.
    """

    spans: str
    scrape: str
    by: str
    from_unix_ns: int = ALWAYS[0]
    to_unix_ns: int = ALWAYS[1]


# Mean deviation between the finished counter of a scrape from one time to another and the finished spans of some instances
# together, None where it cannot be told.
Deviation = Callable[[tuple[str, ...], str, int, int], float | None]
Family = Callable[[str | None], str | None]


def joins_of(spans: Iterable[Instance], lives: Iterable[Life], family: Family, deviation: Deviation) -> list[Join]:
    """Joins of every span instance that has one. `family` maps an engine id to its family."""
    known = [one for one in spans if one.engine]
    engines = list(lives)
    claims: dict[Life, list[tuple[Instance, str]]] = {}
    for one in known:
        same = [life for life in engines if family(life.engine) == family(one.engine)]
        rivals = [o for o in known if o is not one and family(o.engine) == family(one.engine) and _overlap(one, o, 0)]
        scrape, by = _match(one, _candidates(one, same), rivals, deviation)
        for life in _candidates(one, same):
            if life.scrape == scrape:
                claims.setdefault(life, []).append((one, by))
    joined = {one.instance for claimed in claims.values() for one, _ in claimed}
    for life, group in _groups([one for one in known if one.instance not in joined], engines, family, deviation):
        claims.setdefault(life, []).extend((one, SUM) for one in group)
    return [join for life in engines for join in _divided(life, claims.get(life, []), until(life, engines))]


def until(life: Life, lives: Iterable[Life]) -> int:
    """When the next process answers at the address of a life; without one, never."""
    later = (o.first_unix_ns for o in lives if o.scrape == life.scrape and o.first_unix_ns > life.first_unix_ns)
    return min(later, default=ALWAYS[1] + 1) - 1


def _candidates(one: Instance, lives: Sequence[Life]) -> list[Life]:
    """Lives in the time of an instance, else near it; a process that began after its last request is another one."""
    possible = [life for life in lives if not (life.can_date and _start_ns(life) > one.last_seen_unix_ns)]
    return [life for life in possible if _meets(one, life, 0)] or [
        life for life in possible if _meets(one, life, SLACK_NS)
    ]


def _match(
    one: Instance, candidates: Sequence[Life], rivals: Sequence[Instance], deviation: Deviation
) -> tuple[str | None, str]:
    """The scrape that is this instance, and how that is known."""
    names = list(dict.fromkeys(life.scrape for life in candidates))
    if one.joined_by == "user" and one.joined_to in names:
        return one.joined_to, "user"
    if one.instance in names:  # set by an import, by a pod label, or by the sender of OTLP metrics
        return one.instance, "resource"
    if len(names) == 1 and not rivals:
        return names[0], "only_instance"
    return _by_counters(one, candidates, names, rivals, deviation), "counters"


def _by_counters(
    one: Instance,
    candidates: Sequence[Life],
    names: Sequence[str],
    rivals: Sequence[Instance],
    deviation: Deviation,
) -> str | None:
    """The candidate whose counter follows this instance's spans, clearly better than any other pairing of either."""

    def deviates(spans: str, scrape: str) -> float | None:
        own = [life for life in candidates if life.scrape == scrape]
        return deviation((spans,), scrape, own[0].first_unix_ns, own[-1].last_unix_ns)

    own = {name: d for name in names if (d := deviates(one.instance, name)) is not None}
    if not own:
        return None
    best = min(own, key=lambda name: own[name])
    others = [d for name, d in own.items() if name != best]
    others += [d for r in rivals if (d := deviates(r.instance, best)) is not None]
    if own[best] > COUNTER_ERROR or any(d < max(own[best] * COUNTER_LEAD, COUNTER_ERROR) for d in others):
        return None
    return best


def _groups(
    free: Sequence[Instance], lives: Sequence[Life], family: Family, deviation: Deviation
) -> list[tuple[Life, list[Instance]]]:
    """Instances of one service and model that overlap in time, each group with the one life whose counter follows their sum."""
    matched: list[tuple[Life, list[Instance]]] = []
    for group in _clusters(free, family):
        names = tuple(sorted(one.instance for one in group))
        found: list[tuple[float, Life]] = []
        for life in lives:
            if family(life.engine) != family(group[0].engine) or not all(_candidates(one, [life]) for one in group):
                continue
            reach = (
                max(life.first_unix_ns, min(one.first_seen_unix_ns for one in group) - SLACK_NS),
                min(life.last_unix_ns, max(one.last_seen_unix_ns for one in group) + SLACK_NS),
            )
            together = deviation(names, life.scrape, *reach)
            single = [d for name in names if (d := deviation((name,), life.scrape, *reach)) is not None]
            if together is not None and all(d > max(COUNTER_ERROR, COUNTER_LEAD * together) for d in single):
                found.append((together, life))
        found.sort(key=lambda pair: pair[0])
        best = found[0] if found else None
        if best is None or best[0] > COUNTER_ERROR:
            continue
        if all(d >= max(COUNTER_ERROR, COUNTER_LEAD * best[0]) for d, _ in found[1:]):
            matched.append((best[1], group))
    taken = [life for life, _ in matched]
    return [
        (life, group)
        for life, group in matched
        if all(other is group or taken.count(life) == 1 or _disjoint(group, other) for _, other in matched)
    ]


def _clusters(free: Sequence[Instance], family: Family) -> list[list[Instance]]:
    """Groups of at least two that overlap in time, by engine family, service and model."""
    kinds: dict[tuple[str | None, ...], list[Instance]] = {}
    for one in sorted(free, key=lambda i: i.first_seen_unix_ns):
        kinds.setdefault((family(one.engine), one.service, one.model), []).append(one)
    found: list[list[Instance]] = []
    for members in kinds.values():
        found.append([])
        for one in members:
            if found[-1] and one.first_seen_unix_ns > max(o.last_seen_unix_ns for o in found[-1]):
                found.append([])
            found[-1].append(one)
    return [group for group in found if len(group) > 1]


def _disjoint(one: Sequence[Instance], other: Sequence[Instance]) -> bool:
    return not any(_overlap(a, b, 0) for a in one for b in other)


def _divided(life: Life, claims: Sequence[tuple[Instance, str]], until_unix_ns: int) -> list[Join]:
    """One life among the instances that are it: one after the other where their times tell, half the pause to each."""
    stretches: list[list[tuple[Instance, str]]] = []
    for claim in sorted(claims, key=lambda pair: (pair[0].first_seen_unix_ns, pair[0].instance)):
        last = max((one.last_seen_unix_ns for one, _ in stretches[-1]), default=0) if stretches else 0
        if stretches and claim[0].first_seen_unix_ns <= last:
            stretches[-1].append(claim)
        else:
            stretches.append([claim])
    joins = []
    start = life.first_unix_ns
    for index, stretch in enumerate(stretches):
        end = until_unix_ns
        if index + 1 < len(stretches):
            quiet = max(one.last_seen_unix_ns for one, _ in stretch), stretches[index + 1][0][0].first_seen_unix_ns
            end = sum(quiet) // 2
        joins += [Join(one.instance, life.scrape, by, start, end) for one, by in stretch]
        start = end + 1
    return joins


def _start_ns(life: Life) -> float:
    started = life.started_unix_s
    assert started is not None
    return started * 1e9


def _meets(one: Instance, life: Life, slack_ns: int) -> bool:
    return (
        one.first_seen_unix_ns - slack_ns <= life.last_unix_ns
        and life.first_unix_ns - slack_ns <= one.last_seen_unix_ns
    )


def _overlap(one: Instance, other: Instance, slack_ns: int) -> bool:
    return (
        one.first_seen_unix_ns - slack_ns <= other.last_seen_unix_ns
        and other.first_seen_unix_ns - slack_ns <= one.last_seen_unix_ns
    )


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


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Rows of `engine_samples` under this name from one time to another, both included."""

    scrape: str
    from_unix_ns: int
    to_unix_ns: int


def sample_ranges(instances: Iterable[Mapping[str, object]], spans_instance: str) -> list[SampleRange]:
    """Where the samples of a span instance stand, in order of time. instances: rows of the table `instances`.

    Samples under the instance's own name (OTLP metrics) are its own also where no join has been made yet.
    """
    found = []
    for row in instances:
        own = row["instance"] == spans_instance and row["joined_to"] is None
        if row["kind"] == "scrape" and (row["joined_to"] == spans_instance or own):
            first, last = row["first_seen_unix_ns"], row["last_seen_unix_ns"]
            assert isinstance(first, int) and isinstance(last, int)
            found.append(SampleRange(str(row["instance"]), first, last))
    return sorted(found, key=lambda one: (one.from_unix_ns, one.scrape))


def peers(instances: Iterable[Mapping[str, object]], spans_instance: str) -> list[str]:
    """Span instances that are one replica with this one (processes of one engine, one scrape), itself included, sorted."""
    rows = list(instances)
    own = {
        (row["instance"], row["first_seen_unix_ns"])
        for row in rows
        if row["kind"] == "scrape" and row["joined_to"] == spans_instance and row["joined_by"] == SUM
    }
    same = {
        str(row["joined_to"])
        for row in rows
        if row["joined_by"] == SUM and (row["instance"], row["first_seen_unix_ns"]) in own
    }
    return sorted(same | {spans_instance})
