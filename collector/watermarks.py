"""Until when an instance's rows are final: engines report a request when it ends, so its neighbours are known only later.

A row is final once the newest end seen lies W past its own end (W: the longest end-to-end of the last hour, at least 60 s), or
nothing came from its instance for W, or the import it came with has ended; one that claims to end in the future, when that has come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

LEAST_NS = 60 * 10**9
HOUR_NS = 3600 * 10**9
MINUTE_NS = 60 * 10**9
FUTURE_NS = 600 * 10**9  # times that lie further ahead of our own clock are wrong: kept, and never taken for now
NEVER = -(2**62)


@dataclass(slots=True)
class _Clock:
    newest_end_unix_ns: int = NEVER
    longest_ns_by_minute: dict[int, int] = field(default_factory=dict)
    last_news_ns: int = 0  # by the writer's own clock
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
        self._see_past(rows.filter(pl.col("finished_unix_ns") <= now_ns + FUTURE_NS))

    def _see_past(self, rows: pl.DataFrame) -> None:
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
            clock.newest_end_unix_ns = max(clock.newest_end_unix_ns, newest)
            clock.longest_ns_by_minute[minute] = max(clock.longest_ns_by_minute.get(minute, 0), e2e_ns)
        for instance in longest["instance"].unique():
            self._forget_old(self._clocks[instance])

    def settle_wait_ns(self, instance: str) -> int:
        """W of an instance."""
        clock = self._clocks.get(instance)
        return max(LEAST_NS, *clock.longest_ns_by_minute.values()) if clock and clock.longest_ns_by_minute else LEAST_NS

    def of(self, instance: str, now_ns: int) -> int:
        """Rows that finished at or before this are final."""
        clock = self._clocks.get(instance)
        if clock is None:
            return NEVER
        wait = self.settle_wait_ns(instance)
        if clock.ended or now_ns - clock.last_news_ns > wait:
            return now_ns + FUTURE_NS
        return clock.newest_end_unix_ns - wait

    def all(self, now_ns: int) -> dict[str, int]:
        return {instance: self.of(instance, now_ns) for instance in self._clocks}

    @staticmethod
    def _forget_old(clock: _Clock) -> None:
        oldest = (clock.newest_end_unix_ns - HOUR_NS) // MINUTE_NS
        for minute in [m for m in clock.longest_ns_by_minute if m < oldest]:
            del clock.longest_ns_by_minute[minute]
