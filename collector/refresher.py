"""What has to be attributed, and when: new rows at once, their neighbours and rows of new samples soon, all once more at the end.

Attribution of an instance waits at least as long as its last run took three times, so that a busy instance gets fresher answers
less often instead of a growing backlog.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import polars as pl

from phasewise.collector.attribution import attributed, load_scope
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.registry import Registry
from phasewise.collector.request_table import replace_rows
from phasewise.collector.requests import FULL_SCHEMA
from phasewise.collector.rollups import minutes_of
from phasewise.collector.store import Store, Transaction
from phasewise.collector.watermarks import FUTURE_NS, Watermarks

log = logging.getLogger(__name__)
NEIGHBOURS_NS = 500_000_000  # least time between two refreshes of rows already attributed
FINAL_NS = 5 * 10**9  # least time between two runs that make rows final
RATIO = 3.0


@dataclass(slots=True)
class _Work:
    """fresh: rows not in the store; low, high: the range whose rows are to be attributed anew (empty when low > high)."""

    fresh: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=FULL_SCHEMA))
    low_unix_ns: int = 2**62
    high_unix_ns: int = -(2**62)
    oldest_provisional_unix_ns: int = 2**62
    refreshed_ns: int = 0
    finished_ns: int = 0  # when rows were made final last
    rest_until_ns: int = 0

    @property
    def is_touched(self) -> bool:
        return self.low_unix_ns <= self.high_unix_ns


class Refresher:
    """Work to do, by instance; rows without an instance are those of the empty name."""

    def __init__(self, attribute: Attribute, registry: Registry, watermarks: Watermarks, counters: Counters) -> None:
        self._attribute = attribute
        self._registry = registry
        self._watermarks = watermarks
        self._counters = counters
        self._work: dict[str, _Work] = {}
        self._minutes: set[int] = set()
        self.last_error = ""

    @property
    def waiting(self) -> int:
        """Rows that are stored only after the next attribution."""
        return sum(work.fresh.height for work in self._work.values())

    def recall(self, store: Store) -> None:
        """What the store holds that is not final, and what was written before its attribution."""
        found = store.query(
            "SELECT coalesce(instance, '') AS instance, min(finished_unix_ns) AS oldest FROM requests WHERE NOT final GROUP BY 1"
        )
        for instance, oldest in found.iter_rows():
            self._of(instance).oldest_provisional_unix_ns = oldest
        raw = store.query(
            "SELECT coalesce(instance, '') AS instance, min(arrival_unix_ns), max(finished_unix_ns) FROM requests "
            "WHERE revision IS NULL GROUP BY 1"
        )
        for instance, low, high in raw.iter_rows():
            self.touch(instance, low, high)

    def take(self, rows: pl.DataFrame) -> None:
        """New or changed whole rows; their neighbours are touched."""
        for (name,), own in rows.group_by(pl.col("instance").fill_null("").alias("_name")):
            work = self._of(str(name))
            kept = work.fresh.join(own.select("request_key"), on="request_key", how="anti")
            work.fresh = pl.concat([kept, own.select(list(FULL_SCHEMA))])
            for peer in self._peers(str(name)):
                self.touch(peer, _int(own["arrival_unix_ns"].min()), _int(own["finished_unix_ns"].max()))

    def touch(self, instance: str, low_unix_ns: int, high_unix_ns: int) -> None:
        """Rows of an instance that overlap this time have to be attributed anew."""
        work = self._of(instance)
        work.low_unix_ns = min(work.low_unix_ns, low_unix_ns)
        work.high_unix_ns = max(work.high_unix_ns, high_unix_ns)

    def forget(self, keys: list[str]) -> None:
        """Rows that have no place in the table after all."""
        for work in self._work.values():
            work.fresh = work.fresh.filter(~pl.col("request_key").is_in(keys))

    def fresh(self, instance: str) -> pl.DataFrame:
        work = self._work.get(instance)
        return work.fresh if work else pl.DataFrame(schema=FULL_SCHEMA)

    def take_minutes(self, now_ns: int) -> set[int]:
        """Minutes that rows were written into since the last call; none of the future, which no rollup shows: their rows are
        written once more when their time has come."""
        minutes, self._minutes = self._minutes, set()
        return {minute for minute in minutes if minute <= now_ns + FUTURE_NS}

    def refresh(self, transaction: Transaction, now_ns: int, force: bool = False) -> int:
        """Attribute what is due and write it; the number of rows written."""
        return sum(self._refresh_one(transaction, name, work, now_ns, force) for name, work in list(self._work.items()))

    def _peers(self, instance: str) -> list[str]:
        """Instances that are one replica with this one, itself included."""
        return self._registry.peers(instance) if instance else [instance]

    def _of(self, instance: str) -> _Work:
        return self._work.setdefault(instance, _Work())

    def _refresh_one(self, transaction: Transaction, instance: str, work: _Work, now_ns: int, force: bool) -> int:
        watermark = min(self._watermarks.of(name, now_ns) for name in self._peers(instance))
        ripe = work.oldest_provisional_unix_ns <= watermark and (force or now_ns - work.finished_ns >= FINAL_NS)
        rested = force or now_ns >= work.rest_until_ns
        if not rested or not (not work.fresh.is_empty() or work.is_touched or ripe):
            written = work.fresh.height
            self._write_raw(transaction, work)
            return written
        soon = force or ripe or now_ns - work.refreshed_ns >= NEIGHBOURS_NS
        targets = self._targets(transaction, instance, work, watermark, neighbours=soon, ripe=ripe)
        if targets.is_empty():
            if soon:  # else nobody has looked into the range yet, and rows written raw wait in it
                self._clear_range(work)
            work.oldest_provisional_unix_ns = 2**62 if ripe else work.oldest_provisional_unix_ns
            return 0
        started = time.monotonic()
        rows = self._answered(transaction, instance, work, targets, watermark, final=ripe)
        work.finished_ns = now_ns if ripe else work.finished_ns
        work.rest_until_ns = now_ns + int(RATIO * (time.monotonic() - started) * 1e9)
        replace_rows(transaction, rows)
        self._minutes |= minutes_of(rows) if not rows.is_empty() else set()
        work.fresh = work.fresh.clear()
        if soon:
            work.refreshed_ns = now_ns
            self._clear_range(work)
        self._note_provisional(transaction, instance, work)
        return rows.height

    @staticmethod
    def _clear_range(work: _Work) -> None:
        work.low_unix_ns, work.high_unix_ns = 2**62, -(2**62)

    def _write_raw(self, transaction: Transaction, work: _Work) -> None:
        """Rows are visible within a second or two also where their attribution has to wait."""
        if work.fresh.is_empty():
            return
        replace_rows(transaction, work.fresh)
        self._minutes |= minutes_of(work.fresh)
        work.oldest_provisional_unix_ns = min(
            work.oldest_provisional_unix_ns, _int(work.fresh["finished_unix_ns"].min())
        )
        work.fresh = work.fresh.clear()

    def _targets(
        self, transaction: Transaction, instance: str, work: _Work, watermark: int, neighbours: bool, ripe: bool
    ) -> pl.DataFrame:
        """Key, arrival and end of the rows to attribute: new ones, those that overlap the touched range, those now final."""
        columns = ["request_key", "arrival_unix_ns", "finished_unix_ns"]
        found = [work.fresh.select(columns)]
        select = f"SELECT {', '.join(columns)} FROM requests WHERE coalesce(instance, '') = ? AND "
        if neighbours and work.is_touched:
            overlap = "finished_unix_ns >= ? AND arrival_unix_ns <= ?"
            found.append(transaction.query(select + overlap, [instance, work.low_unix_ns, work.high_unix_ns]))
        if ripe:
            found.append(transaction.query(select + "NOT final AND finished_unix_ns <= ?", [instance, watermark]))
        return pl.concat(found).unique("request_key")

    def _answered(
        self, transaction: Transaction, instance: str, work: _Work, targets: pl.DataFrame, watermark: int, final: bool
    ) -> pl.DataFrame:
        """Rows with their attribution; where attribution fails, the new rows as they are: a fault there loses no data."""
        others = [self.fresh(name) for name in self._peers(instance) if name != instance]
        peers_fresh = pl.concat([work.fresh.clear(), *others])
        scope = load_scope(transaction, self._registry, instance, targets, work.fresh, final, peers_fresh)
        keys = targets["request_key"].to_list()
        try:
            answered = attributed(self._attribute, self._registry, instance, scope, keys, watermark)
            self.last_error = ""
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"[:300]
            self._counters.add("attribution_failed", 1)
            log.exception(
                "attribution of %s failed; its rows are stored without causes", instance or "calls without engine"
            )
            return work.fresh
        return answered

    def _note_provisional(self, transaction: Transaction, instance: str, work: _Work) -> None:
        oldest = transaction.query(
            "SELECT min(finished_unix_ns) AS oldest FROM requests WHERE coalesce(instance, '') = ? AND NOT final",
            [instance],
        )["oldest"].item()
        work.oldest_provisional_unix_ns = 2**62 if oldest is None else int(oldest)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
