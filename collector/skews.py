"""How far the clocks of hosts stand apart, as the spans of calls between them tell. It is shown, and corrects nothing: raw times stay.

A call that one host makes and another serves lasts on the server's host at most as long as on the caller's, and within it. Their two
clocks tell between which bounds the difference lies then, as in NTP: the shorter the way there and back, the closer. Of the newest
calls of two hosts the one with the closest bounds is believed. A call that goes on after its caller stopped waiting tells nothing, and
calls that are fetched from a queue some time later give bounds that do not agree: then nothing is certain.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import polars as pl

CALLS = 32  # of two hosts, the newest
DRIFT_RATIO = 200e-6  # by which a bound widens as it grows old: no crystal is worse
FEWEST = 4  # calls that anything certain rests on
AGREEING_RATIO = 0.75  # of them
PAIRS = 256  # of hosts; those that were silent longest are forgotten
TOLD = 32  # of them, the furthest apart first
STORED = 32  # of them, those with the newest calls
STORED_EVERY_NS = 5 * 10**9
OLD_NS = 86_400 * 10**9  # what was measured a day before a start is known no more: clocks are set right meanwhile
POSITION = "clock_skews"  # among the positions
Bound = tuple[int, int, int]  # when, and the least and the most that the other clock is ahead; all in nanoseconds
SCHEMA = {"host": pl.String, "other_host": pl.String, "unix_ns": pl.Int64, "low_ns": pl.Int64, "high_ns": pl.Int64}


def bounds_of(pairs: pl.DataFrame) -> pl.DataFrame:
    """Of calls (a row each: host, start_unix_ns and end_unix_ns of the caller's span, the same with `_own` of the server's) the bounds of
    what the server's clock is ahead by: columns of SCHEMA. Calls inside one host, or longer than their caller's span, are left out."""
    low = pl.col("end_unix_ns_own") - pl.col("end_unix_ns")
    high = pl.col("start_unix_ns_own") - pl.col("start_unix_ns")
    across = pl.col("host") != pl.col("host_own")
    return pairs.filter(across & (low <= high)).select(
        "host",
        pl.col("host_own").alias("other_host"),
        pl.col("end_unix_ns").alias("unix_ns"),
        low.alias("low_ns"),
        high.alias("high_ns"),
    )


@dataclass(frozen=True, slots=True)
class Skew:
    """other_host's clock is ahead of host's by ahead_s, give or take within_s; of so many calls. is_certain: whether the clocks cannot
    stand together, by most of the newest calls."""

    host: str
    other_host: str
    ahead_s: float
    within_s: float
    calls: int
    is_certain: bool


def skew_of(pair: tuple[str, str], bounds: Sequence[Bound], calls: int) -> Skew:
    """What the newest calls of two hosts tell together of the moment of the last of them."""
    now = max(unix_ns for unix_ns, _, _ in bounds)
    wider = [round((now - unix_ns) * DRIFT_RATIO) for unix_ns, _, _ in bounds]
    grown = [(low - more, high + more) for (_, low, high), more in zip(bounds, wider, strict=True)]
    low, high = min(grown, key=lambda one: one[1] - one[0])
    ahead_ns, within_ns = (low + high) / 2, (high - low) / 2
    agreeing = sum(own_low - within_ns <= ahead_ns <= own_high + within_ns for own_low, own_high in grown)
    is_certain = calls >= FEWEST and abs(ahead_ns) > within_ns and agreeing >= AGREEING_RATIO * len(bounds)
    return Skew(*pair, ahead_ns / 1e9, within_ns / 1e9, calls, is_certain)


@dataclass(slots=True)
class Skews:
    """The bounds of the newest calls by pair of hosts."""

    _bounds: OrderedDict[tuple[str, str], deque[Bound]] = field(default_factory=OrderedDict)
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)
    _changed: bool = False
    _stored_unix_ns: int | None = None

    @classmethod
    def recalled(cls, text: str, now_unix_ns: int) -> Skews:
        """What was stored, as far as it is not old."""
        skews = cls()
        for host, other, calls, bounds in json.loads(text or "[]"):
            kept = [(unix_ns, low, high) for unix_ns, low, high in bounds]
            if max(unix_ns for unix_ns, _, _ in kept) > now_unix_ns - OLD_NS:
                skews._bounds[host, other] = deque(kept, maxlen=CALLS)
                skews._calls[host, other] = calls
        return skews

    def to_store(self, now_unix_ns: int) -> str | None:
        """The text for `recalled` where it has something new and the last one was some time ago, or the clock was set back since."""
        if not self._changed:
            return None
        if self._stored_unix_ns is not None and 0 <= now_unix_ns - self._stored_unix_ns < STORED_EVERY_NS:
            return None
        self._changed, self._stored_unix_ns = False, now_unix_ns
        newest = list(self._bounds.items())[-STORED:]
        told = [[*pair, self._calls[pair], list(kept)] for pair, kept in newest]
        return json.dumps(told, separators=(",", ":"))

    def see(self, bounds: pl.DataFrame) -> None:
        """Bounds of calls, the newest last (SCHEMA). A call is seen again whenever its trace goes on, and counts once."""
        for (host, other), own in bounds.group_by("host", "other_host", maintain_order=True):
            pair = (str(host), str(other))
            kept = self._bounds.setdefault(pair, deque(maxlen=CALLS))
            self._bounds.move_to_end(pair)
            newest = list(own.tail(CALLS).select("unix_ns", "low_ns", "high_ns").iter_rows())
            new = [one for one in dict.fromkeys(newest) if one not in kept]
            kept.extend(new)
            self._calls[pair] = self._calls.get(pair, 0) + own.height - len(newest) + len(new)
            self._changed |= bool(new)
        while len(self._bounds) > PAIRS:
            pair, _ = self._bounds.popitem(last=False)
            del self._calls[pair]

    def __iter__(self) -> Iterator[Skew]:
        for pair, kept in self._bounds.items():
            yield skew_of(pair, kept, self._calls[pair])

    def told(self) -> list[dict[str, object]]:
        """What health shows: the pairs that stand furthest apart."""
        furthest = sorted(self, key=lambda skew: (-abs(skew.ahead_s), skew.host, skew.other_host))
        return [
            {
                "host": skew.host,
                "other_host": skew.other_host,
                "ahead_s": round(skew.ahead_s, 6),
                "within_s": round(skew.within_s, 6),
                "calls": skew.calls,
                "certain": skew.is_certain,
            }
            for skew in furthest[:TOLD]
        ]
