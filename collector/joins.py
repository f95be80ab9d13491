"""Which scrape is which replica, and when: joining the names that spans and scrapes give one engine process.

In this order: the same name in both; the only instance of that engine family alive in the overlapping time, on both sides; the
finished counter against the spans that finished, then the seconds they took (`fingerprints`); that counter against several instances
together (the API server processes of one engine). Otherwise unjoined, and said so: a wrong join is worse than none. Each life of a scrape is joined by itself, so an
engine that is restarted under another name keeps what was scraped before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from phasewise.collector.fingerprints import Fit, Part
from phasewise.collector.lives import Life
from phasewise.collector.records import Instance

SLACK_NS = 120 * 10**9  # scrapes may stop before the last request, and begin after the first
COUNTER_ERROR = 0.2  # a counter off by more than this share of its requests is another engine's
COUNTER_LEAD = 2.0  # the second best must be that much worse,
COUNTER_MARGIN = 0.05  # and by this share of the requests,
COUNTER_DIFFERENCE = 5  # and by as many of them: fewer may be where a scrape happened to fall
EVIDENCE_NS = 4 * 3600 * 10**9  # the last hours that both sides tell of are looked at
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


# How the counters of a scrape from one time to another fit the finished spans of some instances together, None where it cannot
# be told.
Deviation = Callable[[tuple[str, ...], str, int, int], Fit | None]
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
    """The candidate whose counters follow this instance's spans, clearly better than any other pairing of either: by requests,
    else, where load is spread too evenly for that, by the seconds that these took."""

    def fits(spans: str, scrape: str) -> Fit | None:
        own = [life for life in candidates if life.scrape == scrape]
        end = min(own[-1].last_unix_ns, one.last_seen_unix_ns + SLACK_NS)
        return deviation((spans,), scrape, max(own[0].first_unix_ns, end - EVIDENCE_NS), end)

    own = {name: fit for name in names if (fit := fits(one.instance, name)) is not None}
    others = {name: [fit for rival in rivals if (fit := fits(rival.instance, name)) is not None] for name in own}
    for kind in ("requests", "seconds"):
        known = {name: part for name, fit in own.items() if (part := fit.part(kind)) is not None}
        if not known:
            continue
        best = min(known, key=lambda name: (known[name].ratio, name))
        beside = [part for name, part in known.items() if name != best]
        beside += [part for fit in others[best] if (part := fit.part(kind)) is not None]
        if known[best].ratio <= COUNTER_ERROR and all(_is_clearly_worse(part, known[best]) for part in beside):
            return best
    return None


def _is_clearly_worse(other: Part, best: Part) -> bool:
    return (
        other.ratio >= max(best.ratio * COUNTER_LEAD, best.ratio + COUNTER_MARGIN)
        and other.off - best.off >= COUNTER_DIFFERENCE * best.each
    )


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
            together = _ratio(deviation(names, life.scrape, *reach))
            single = [d for name in names if (d := _ratio(deviation((name,), life.scrape, *reach))) is not None]
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


def _ratio(fit: Fit | None) -> float | None:
    return None if fit is None else fit.requests.ratio


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
