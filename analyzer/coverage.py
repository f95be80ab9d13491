"""How many of the finished requests sent spans: sampled spans told from whole ones, by the engines' own counters and histograms.

A counter counts every request. Spans thinned evenly (head sampling) are a fair sample; spans kept by latency (tail sampling), or
lost for a while, are not, and what is said of them holds for all requests only with weights: in each stratum of latency or time,
requests that were counted over requests that were seen.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, sub

import numpy as np
import polars as pl

from phasewise.analyzer.ended import Ended, EndedRows, Stretch, Whose
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.replicas import Replica
from phasewise.analyzer.statistics import floats, rounded
from phasewise.analyzer.window import Window
from phasewise.collector.histogram_shapes import Shape, merged_shapes

PARTIAL_RATIO = 0.95  # below, the spans of one replica do not tell how many requests ran together
LEAST_COUNTED = 20  # finished requests, before a share of them says anything
LEAST_MISSING = 5  # fewer may be those that were on their way
MORE_RATIO = 1.05  # more spans than the counters count: these counters are not of all that sends the spans
UNSEEN_RATIO = 0.05  # of the requests in strata without a span: from here on no weight makes up for them
UNEVEN_Z = 4.0  # standard deviations from an even sample
TAIL_RATIO = 1.5  # slow requests kept that much more often than fast ones
ARRIVING_NS = 10 * 10**9  # senders hold spans back for some seconds
TIME_PARTS = 10
LEAST_EXPECTED = 5.0  # a stratum with fewer expected spans is tested together with its neighbour


@dataclass(frozen=True, slots=True)
class Stratum:
    """Requests up to an upper edge (seconds of end-to-end time, or Unix nanoseconds): counted by the engine, and seen as spans."""

    upper: float
    counted: float
    seen: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """kind: unknown (nothing counts them), whole, head (an even sample), tail (the slow ones are kept), gaps (lost for a while),
    uneven (neither); by: what `strata` divide, latency or time."""

    kind: str
    counted: float = 0.0
    seen: int = 0
    by: str = ""
    strata: tuple[Stratum, ...] = ()
    joined: bool = True  # False: spans and counters are of one deployment, and nothing tells which replica is which

    @property
    def ratio(self) -> float | None:
        """Requests seen over requests counted; None where it is not known."""
        return None if self.kind == "unknown" else min(1.0, self.seen / self.counted)

    @property
    def is_partial(self) -> bool:
        return self.kind not in ("unknown", "whole")

    @property
    def unseen_ratio(self) -> float:
        """Share of the requests in strata that sent no span at all."""
        if self.kind not in ("tail", "gaps", "uneven"):
            return 0.0
        return sum(one.counted for one in self.strata if not one.seen) / max(self.counted, 1.0)

    @property
    def is_fair(self) -> bool:
        """Whether the spans, weighted, speak for all requests."""
        return self.kind in ("whole", "head") or (self.is_partial and self.unseen_ratio <= UNSEEN_RATIO)

    def weights(self, rows: pl.DataFrame) -> Floats:
        """For how many requests each row stands; 1 where nothing is known of it."""
        if not self.is_partial:
            return np.ones(len(rows))
        even = 1.0 / max(self.ratio or 1.0, 1e-9)
        if self.kind == "head" or not self.strata:
            return np.full(len(rows), even)
        edges = np.array([one.upper for one in self.strata])
        own = np.array([one.counted / one.seen if one.seen else even for one in self.strata])
        values = floats(rows, "e2e_s" if self.by == "latency" else "finished_unix_ns")
        place = np.minimum(np.searchsorted(edges, np.nan_to_num(values), side="left"), len(edges) - 1)
        return np.maximum(np.where(np.isfinite(values), own[place], even), 1.0)

    def row_weights(self, rows: pl.DataFrame) -> Floats | None:
        """The same where they differ from row to row and speak for all requests, else None."""
        return self.weights(rows) if self.strata and self.is_fair else None

    def known_ratio(self, phase_ratio: float | None) -> float | None:
        """Share of the finished requests whose phases are known: those that sent spans, and of these those with phases."""
        return phase_ratio if phase_ratio is None or not self.is_partial else phase_ratio * (self.ratio or 0.0)

    def share(self, chosen: pl.DataFrame, rows: pl.DataFrame) -> float:
        """The chosen rows as a share of all requests: of the rows where they are whole, else of the requests they stand for."""
        if not self.is_partial:
            return len(chosen) / len(rows) if len(rows) else 0.0
        # Requests that nothing stands for are taken for requests that were not chosen: the fast ones, in a sample of slow ones.
        population = max(float(self.weights(rows).sum()), self.counted * len(rows) / max(self.seen, 1))
        return float(self.weights(chosen).sum()) / population if population else 0.0

    def json(self) -> dict[str, object] | None:
        """What the verdict and data health say of it; None where nothing is known."""
        if self.kind == "unknown":
            return None
        shown = self.strata if self.kind in ("tail", "gaps", "uneven") else ()
        return {
            "kind": self.kind,
            "coverage_ratio": rounded(self.ratio),
            "counted": round(self.counted),
            "seen": self.seen,
            "weighted_by": (self.by or "even") if self.is_partial and self.is_fair else None,
            "unseen_ratio": rounded(self.unseen_ratio) if shown else None,
            "joined": self.joined,
            "source": "finished counter",
            "strata": [
                {
                    "upper": one.upper if math.isfinite(one.upper) else None,
                    "counted": round(one.counted),
                    "seen": one.seen,
                }
                for one in shown
            ],
        }


UNKNOWN = Sampling("unknown")


def sampling_of(ended: Ended, replicas: Sequence[Replica], window: Window, now_unix_ns: int) -> Sampling:
    """Coverage of a window by spans. ended: calls of the window that were answered; replicas: those of the window, also scraped ones
    without spans."""
    parts = [
        part
        for replica in replicas
        if replica.has_spans and (part := _part(ended, _of(replica), replica.counters, window, now_unix_ns)) is not None
    ]
    joined = bool(parts)
    if not parts:
        parts = _of_deployments(ended, replicas, window, now_unix_ns)
    return replace_joined(_judged(parts, ended), joined)


def _of(replica: Replica) -> Whose:
    return Whose("instance", (replica.instance, *replica.members))


def replace_joined(found: Sampling, joined: bool) -> Sampling:
    return found if joined else Sampling(found.kind, found.counted, found.seen, found.by, found.strata, joined=False)


def partly_seen(rows: pl.DataFrame, samples: pl.DataFrame) -> bool:
    """Whether clearly fewer requests of one replica sent spans than its counter finished; False where nothing counts them."""
    if "finished" not in samples.columns or len(samples) - samples["finished"].null_count() < 2:
        return False
    ended = EndedRows(rows)
    first, newest = ended.oldest_unix_ns(), ended.newest_unix_ns(None)
    if first is None or newest is None:
        return False
    part = _part(ended, None, samples, Window(first, newest + 1), newest, shapes=False)
    return part is not None and _judged([part], ended).is_partial


@dataclass(frozen=True, slots=True)
class _Part:
    """One replica between two of its scrapes: requests it counted, and which rows ended in between (None: those of another part)."""

    stretch: Stretch | None
    times: Floats  # of the scrapes
    finished: Floats  # counted since the first of them
    edges: tuple[float, ...]
    by_latency: Floats  # counted up to each edge, not cumulative; empty without a histogram


def _part(
    ended: Ended, whose: Whose | None, samples: pl.DataFrame, window: Window, now_unix_ns: int, *, shapes: bool = True
) -> _Part | None:
    """whose: None where all requests are of one replica; shapes: whether histograms are wanted."""
    newest = ended.newest_unix_ns(whose)
    if newest is None:
        return None
    until = min(window.to_unix_ns - 1, newest, now_unix_ns - ARRIVING_NS)
    inside = samples.filter(
        pl.col("finished").is_not_null() & pl.col("unix_ns").is_between(window.from_unix_ns, until)
    ).sort("unix_ns")
    if len(inside) < 2:
        return None
    times = inside["unix_ns"].cast(pl.Float64).to_numpy()
    values = floats(inside, "finished")
    steps = np.diff(values, prepend=values[0])
    steps = np.where(steps < 0, values, steps)  # a counter that falls began again
    stretch = Stretch(whose, inside["unix_ns"][0], inside["unix_ns"][-1])
    restarts = np.flatnonzero(np.diff(values) < 0) + 1
    edges, counted = _histogram(inside, restarts) if shapes else ((), np.empty(0))
    return _Part(stretch, times, np.cumsum(steps), edges, counted)


def _histogram(
    samples: pl.DataFrame, restarts: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> tuple[tuple[float, ...], Floats]:
    """Requests by end-to-end time between the first and the last sample, over restarts; nothing where no histogram tells."""
    nothing: tuple[tuple[float, ...], Floats] = ((), np.empty(0))
    bounds = [0, *restarts.tolist(), len(samples)]
    total: Shape | None = None
    for low, high in itertools.pairwise(bounds):
        begin, end = _shape(samples["histograms"][low]), _shape(samples["histograms"][high - 1])
        if end is None or (begin is None and low == 0):
            return nothing
        # An exponential one has further edges once it counted something further off.
        grown = merged_shapes((end, begin), sub) if low == 0 and begin is not None else end
        total = grown if total is None else merged_shapes((total, grown), add)
    edges = tuple(sorted(total or {}))
    if total is None or len(edges) < 2:
        return nothing
    return edges, np.diff([total[edge] for edge in edges], prepend=0.0)


def _shape(text: str | None) -> Shape | None:
    told = json.loads(text).get("e2e") if text else None
    if not told:
        return None
    edges = (math.inf if one == "+Inf" else float(one) for one in told["le"])
    return dict(zip(edges, told["count"], strict=True))


def _of_deployments(ended: Ended, replicas: Sequence[Replica], window: Window, now_unix_ns: int) -> list[_Part]:
    """Where no replica's spans are joined to counters: all spans of an engine against all of its scraped processes together."""
    parts = []
    for engine in ended.engines():
        own = Whose("engine", (engine,))
        scraped = [replica for replica in replicas if not replica.has_spans and replica.engine == engine]
        for place, replica in enumerate(scraped):
            part = _part(ended, own, replica.counters, window, now_unix_ns)
            if part is None:
                return []  # one that cannot be counted: the sum would be too small
            parts.append(part if place == 0 else replace(part, stretch=None))
    return parts


def _judged(parts: Sequence[_Part], ended: Ended) -> Sampling:
    counted = float(sum(part.finished[-1] for part in parts))
    if counted < LEAST_COUNTED:
        return UNKNOWN
    stretches = [part.stretch for part in parts if part.stretch is not None]
    seen = ended.count(stretches)
    if seen > counted * MORE_RATIO + LEAST_MISSING:
        return UNKNOWN
    if seen >= PARTIAL_RATIO * counted or counted - seen < LEAST_MISSING:
        return Sampling("whole", counted, seen)
    latency, time = _latency_strata(parts, ended, stretches), _time_strata(parts, ended, stretches)
    if _uneven_z(latency) > UNEVEN_Z:
        return Sampling("tail" if _keeps_slow(latency) else "uneven", counted, seen, "latency", latency)
    if _uneven_z(time) > UNEVEN_Z:
        return Sampling("gaps", counted, seen, "time", time)
    return Sampling("head", counted, seen)


def _latency_strata(parts: Sequence[_Part], ended: Ended, stretches: Sequence[Stretch]) -> tuple[Stratum, ...]:
    edges = parts[0].edges
    if not edges or any(part.edges != edges for part in parts):
        return ()
    seen = ended.up_to("e2e_s", stretches, np.array(edges))
    counted = sum((part.by_latency for part in parts), start=np.zeros(len(edges)))
    return tuple(Stratum(*one) for one in zip(edges, counted.tolist(), seen, strict=True))


def _time_strata(parts: Sequence[_Part], ended: Ended, stretches: Sequence[Stretch]) -> tuple[Stratum, ...]:
    low, high = max(part.times[0] for part in parts), min(part.times[-1] for part in parts)
    if high <= low:
        return ()
    edges = np.linspace(low, high, TIME_PARTS + 1)
    counted = np.zeros(TIME_PARTS)
    for part in parts:
        # A stratum ends at a scrape: between two of them the counter does not tell when it moved.
        at = np.searchsorted(part.times, edges, side="right") - 1
        counted += np.diff(part.finished[at])
        edges = part.times[at] if len(parts) == 1 else edges
    seen = ended.up_to("finished_unix_ns", stretches, edges[1:], above=float(edges[0]))
    return tuple(
        Stratum(float(upper), count, got) for upper, count, got in zip(edges[1:], counted.tolist(), seen, strict=True)
    )


def _uneven_z(strata: Sequence[Stratum]) -> float:
    """How far the strata are from an even sample, in standard deviations (chi-squared, Wilson and Hilferty 1931)."""
    counted = sum(one.counted for one in strata)
    ratio = sum(one.seen for one in strata) / counted if counted else 0.0
    if not 0 < ratio < 1:
        return 0.0
    groups: list[tuple[float, int]] = []
    expected, seen = 0.0, 0
    for one in strata:
        expected, seen = expected + one.counted * ratio, seen + one.seen
        if expected >= LEAST_EXPECTED:
            groups.append((expected, seen))
            expected, seen = 0.0, 0
    if groups and expected:
        groups[-1] = groups[-1][0] + expected, groups[-1][1] + seen
    freedom = len(groups) - 1
    if freedom < 1:
        return 0.0
    chi2 = sum((got - wanted) ** 2 / (wanted * (1 - ratio)) for wanted, got in groups)
    spread = 2 / (9 * freedom)
    return float(((chi2 / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def _keeps_slow(strata: Sequence[Stratum]) -> bool:
    """Whether the slower half of the requests is seen clearly more often than the faster half."""
    total = sum(one.counted for one in strata)
    below, fast, slow = 0.0, [0.0, 0.0], [0.0, 0.0]
    for one in strata:
        half = fast if below + one.counted / 2 <= total / 2 else slow
        half[0], half[1] = half[0] + one.counted, half[1] + one.seen
        below += one.counted
    return bool(slow[0]) and slow[1] / slow[0] >= TAIL_RATIO * (fast[1] / fast[0] if fast[0] else 0.0)
