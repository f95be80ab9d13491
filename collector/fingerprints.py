"""Whether counters and spans are of one engine process: requests, and the seconds they took, in each stretch between scrapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
STRETCH_NS = 10 * 10**9  # at least: a request near a scrape may stand on either side of it
LEAST_REQUESTS = 10  # on the larger side, before a difference says anything


@dataclass(frozen=True, slots=True)
class Part:
    """off: what one side has in some stretch and the other has not, summed over all; of: the larger side of each stretch, summed;
    each: what one request is worth."""

    off: float
    of: float
    each: float = 1.0

    @property
    def ratio(self) -> float:
        return self.off / self.of if self.of > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one side follows the other, by requests and by seconds of end-to-end time (None where those are not told)."""

    requests: Part
    seconds: Part | None = None

    def part(self, kind: str) -> Part | None:
        return self.requests if kind == "requests" else self.seconds


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative counters of one scrape at its times, in order; seconds: NaN where they are not told."""

    unix_ns: Integers
    finished: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Ends:
    """When requests finished, in order, and how long they took; NaN is unknown."""

    unix_ns: Integers
    seconds: Floats


def together(ends: list[Ends]) -> Ends:
    """The requests of several instances in one order."""
    times = np.concatenate([one.unix_ns for one in ends])
    order = np.argsort(times, kind="stable")
    return Ends(times[order], np.concatenate([one.seconds for one in ends])[order])


def fit(counters: Counters, ends: Ends) -> Fit | None:
    """How the counters follow the requests between the first and the last scrape; None where there is too little of both.

    A counter that falls (a restart) begins again. Requests whose two records fall on either side of a scrape count as off twice.
    """
    if len(counters.unix_ns) < 2:
        return None
    places = _places(counters.unix_ns)
    cuts = counters.unix_ns[places]
    counted = _moved(counters.finished, places)
    at = np.searchsorted(ends.unix_ns, cuts, side="right")
    seen = np.diff(at).astype(np.float64)
    requests = _part(counted, seen, 1.0)
    if requests.of < LEAST_REQUESTS:
        return None
    inside = ends.seconds[at[0] : at[-1]]
    if not np.isfinite(counters.seconds).all() or not np.isfinite(inside).all():
        return Fit(requests)
    sums = np.concatenate(([0.0], np.cumsum(np.nan_to_num(ends.seconds))))
    took = sums[at[1:]] - sums[at[:-1]]
    mean = float(took.sum() / seen.sum()) if seen.sum() else 0.0
    return Fit(requests, _part(_moved(counters.seconds, places), took, mean) if mean > 0 else None)


def _places(times: Integers) -> npt.NDArray[np.intp]:
    """Which scrapes cut the time into stretches that are long enough."""
    number = (times - times[0]) // STRETCH_NS
    places = np.flatnonzero(np.diff(number, prepend=-1) > 0)
    return places if len(places) > 1 else np.array([0, len(times) - 1])


def _moved(values: Floats, places: npt.NDArray[np.intp]) -> Floats:
    steps = np.diff(values, prepend=values[:1])
    total = np.cumsum(np.where(steps < 0, values, steps))
    return np.diff(total[places])


def _part(one: Floats, other: Floats, each: float) -> Part:
    return Part(float(np.abs(one - other).sum()), float(np.maximum(one, other).sum()), each)
