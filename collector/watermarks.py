"""Until when an instance's rows are final: engines report a request when it ends, so its neighbours are known only later.

A row is final once the newest end seen lies W past its own end (W: the longest end-to-end of the last hour, at least 60 s), or
nothing came from its instance for W, or the import it came with has ended; one that claims to end in the future, when that has come.
A clock that is ahead of ours is not believed: while rows come, what ends within W of now is not final.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

LEAST_NS = 60 * 10**9
HOUR_NS = 3600 * 10**9
MINUTE_NS = 60 * 10**9
FUTURE_NS = 600 * 10**9  # times that lie further ahead of our own clock are wrong: kept, and never taken for now
_NEVER = -(2**62)


@dataclass(slots=True)
class _Clock:
    newest_end_unix_ns: int = _NEVER
    longest_ns_by_minute: dict[int, int] = field(default_factory=dict)
    last_news_ns: int = 0  # by the writer's own clock
    last_past_ns: int = 0  # the same of rows that do not end in the future
    ended: bool = False


class Watermarks:
    """One watermark an instance; instances are named as in `requests`, rows without one by the empty text."""

    def __init__(self) -> None:
        self._clocks: dict[str, _Clock] = {}

    def see(self, rows: pl.DataFrame, now_ns: int, ended: bool = False) -> None:
        """Take note of rows (instance, finished_unix_ns, e2e_s); ended: they are the whole of an import."""
        for instance in rows["instance"].unique():
            clock = self._clocks.setdefault(instance or "", _Clock())
            clock.last_news_ns = now_ns
            clock.ended = ended
        self._see_past(rows.filter(pl.col("finished_unix_ns") <= now_ns + FUTURE_NS), now_ns)

    def _see_past(self, rows: pl.DataFrame, now_ns: int) -> None:
        minutes = rows.select(
            pl.col("instance").fill_null(""),
            "finished_unix_ns",
            (pl.col("finished_unix_ns") // MINUTE_NS).alias("minute"),
            (pl.col("e2e_s").fill_null(0.0) * 1e9).cast(pl.Int64).alias("e2e_ns"),
        )
        longest = minutes.group_by("instance", "minute").agg(
            pl.col("e2e_ns").max(), pl.col("finished_unix_ns").max().alias("newest")
        )
        for instance, minute, e2e_ns, newest in longest.iter_rows():
            clock = self._clocks[instance]
            clock.last_past_ns = now_ns
            clock.newest_end_unix_ns = max(clock.newest_end_unix_ns, newest)
            clock.longest_ns_by_minute[minute] = max(clock.longest_ns_by_minute.get(minute, 0), e2e_ns)
        for instance in longest["instance"].unique():
            self._forget_old(self._clocks[instance])

    def of(self, instance: str, now_ns: int) -> int | None:
        """Rows that finished at or before this are final; later than `now_ns` only where nothing is on its way. None: no row was seen."""
        clock = self._clocks.get(instance)
        return None if clock is None else self._of(clock, now_ns)

    def all(self, now_ns: int) -> dict[str, int]:
        """The same of all instances with rows."""
        return {instance: self._of(clock, now_ns) for instance, clock in self._clocks.items()}

    @staticmethod
    def _of(clock: _Clock, now_ns: int) -> int:
        wait = max(LEAST_NS, *clock.longest_ns_by_minute.values()) if clock.longest_ns_by_minute else LEAST_NS
        if clock.ended or now_ns - clock.last_news_ns > wait:
            return now_ns + FUTURE_NS
        if now_ns - clock.last_past_ns > wait:  # it lives, and its clock says nothing of use
            return now_ns - wait
        return min(clock.newest_end_unix_ns, now_ns) - wait

    @staticmethod
    def _forget_old(clock: _Clock) -> None:
        oldest = (clock.newest_end_unix_ns - HOUR_NS) // MINUTE_NS
        for minute in [m for m in clock.longest_ns_by_minute if m < oldest]:
            del clock.longest_ns_by_minute[minute]
