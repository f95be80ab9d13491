"""What has to be attributed, and when: new rows at once, their neighbours and rows of new samples soon, all once more at the end.

Rows are stored first and attributed then, so that they are seen even where attribution has to wait: it rests three times as long
as it took, over all instances together. So a busy store gets fresher answers less often instead of a growing backlog.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.attribution import attributed, load_scope
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.registry import Registry
from phasewise.collector.request_table import replace_rows, update_rows
from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.store import Store, Transaction
from phasewise.collector.watermarks import Watermarks

log = logging.getLogger(__name__)
NEIGHBOURS_NS = 500_000_000  # least time between two refreshes of rows already attributed
FINAL_NS = 5 * 10**9  # least time between two runs that make rows final
RATIO = 3.0
TURN_S = 0.5  # no further instance is begun in a pass after that: rows that come meanwhile wait to be stored
_NONE = (2**62, -(2**62))
LATE = "late"  # among the positions: touched time of final rows, by instance


@dataclass(slots=True)
class _Work:
    """raw: when the rows without attribution finished; touched: the time whose rows are to be attributed anew, both as (low, high),
    empty where low > high."""

    raw: tuple[int, int] = _NONE
    touched: tuple[int, int] = _NONE
    oldest_provisional_unix_ns: int = 2**62
    served_ns: int = 0
    final_unix_ns: int = 2**62  # rows that ended by then may be final; unknown after a start
    refreshed_ns: int = 0
    finished_ns: int = 0  # when rows were made final last


@dataclass(frozen=True, slots=True)
class _Turn:
    """Why an instance is due. soon: neighbours as well; ripe: rows become final."""

    watermark_unix_ns: int
    soon: bool
    ripe: bool


class Refresher:
    """Work to do, by instance; rows without an instance are those of the empty name."""

    def __init__(
        self,
        attribute: Attribute,
        registry: Registry,
        watermarks: Watermarks,
        counters: Counters,
        dirty: DirtyRollups,
    ) -> None:
        self._attribute = attribute
        self._registry = registry
        self._watermarks = watermarks
        self._counters = counters
        self._dirty = dirty
        self._work: dict[str, _Work] = {}
        self._counted: set[str] = set()  # keys of rows whose revision was counted when they were written
        self._rest_until_ns = 0
        # Touched time of rows that are final: nothing else would say that they wait.
        self._late: dict[str, tuple[int, int]] = {}
        self._late_stored = ""
        self.last_error = ""

    @property
    def waiting(self) -> int:
        """Instances with rows that wait for their first attribution."""
        return sum(_is_some(work.raw) for work in self._work.values())

    @property
    def provisional_from_unix_ns(self) -> int:
        """When the first row that is not final finished; far ahead when all are."""
        return min((work.oldest_provisional_unix_ns for work in self._work.values()), default=_NONE[0])

    def recall(self, store: Store) -> None:
        """What the store holds that is not final, and what was written before its attribution."""
        found = store.query(
            "SELECT coalesce(instance, '') AS instance, min(finished_unix_ns) AS oldest FROM main.requests WHERE NOT final GROUP BY 1"
        )
        for instance, oldest in found.iter_rows():
            self._of(instance).oldest_provisional_unix_ns = oldest
        raw = store.query(
            "SELECT coalesce(instance, '') AS instance, min(arrival_unix_ns), min(finished_unix_ns), max(finished_unix_ns) "
            "FROM main.requests WHERE revision IS NULL GROUP BY 1"
        )
        for instance, arrival, low, high in raw.iter_rows():
            self._of(instance).raw = (low, high)
            self.touch(instance, arrival, high)
        late = store.query("SELECT position FROM positions WHERE name = ?", [LATE])["position"]
        self._late_stored = str(late[0]) if len(late) else ""
        for instance, (low, high) in json.loads(self._late_stored or "{}").items():
            self.touch(instance, low, high)

    def store(self, transaction: Transaction) -> None:
        """What final rows are to be attributed anew, where that changed: it must outlive a crash."""
        told = json.dumps(self._late, sort_keys=True) if self._late else ""
        if told != self._late_stored:
            transaction.execute("DELETE FROM positions WHERE name = ?", [LATE])
            if told:
                transaction.execute("INSERT INTO positions VALUES (?, ?)", [LATE, told])
            self._late_stored = told

    def take(self, transaction: Transaction, rows: pl.DataFrame, stored: Sequence[str], now_ns: int) -> None:
        """Write whole rows, new ones and changed ones (keys `stored`); they and their neighbours are to be attributed."""
        if rows.is_empty():
            return
        replace_rows(transaction, rows.with_columns(pl.col("revision") + 1), stored)
        self._counted |= set(rows.filter(pl.col("revision").is_not_null())["request_key"])
        self._dirty.add(rows, now_ns)
        facts = rows.group_by(pl.col("instance").fill_null("")).agg(
            pl.col("arrival_unix_ns").min(),
            pl.col("finished_unix_ns").min().alias("first"),
            pl.col("finished_unix_ns").max().alias("last"),
        )
        for name, arrival, first, last in facts.iter_rows():
            work = self._of(name)
            work.raw = _around(work.raw, first, last)
            work.oldest_provisional_unix_ns = min(work.oldest_provisional_unix_ns, first)
            for peer in self._peers(name):
                self.touch(peer, arrival, last)

    def touch(self, instance: str, low_unix_ns: int, high_unix_ns: int) -> None:
        """Rows of an instance that overlap this time have to be attributed anew."""
        work = self._of(instance)
        work.touched = _around(work.touched, low_unix_ns, high_unix_ns)
        if low_unix_ns <= work.final_unix_ns:
            self._late[instance] = work.touched

    def rests(self, now_ns: int) -> bool:
        """Whether `refresh` would do nothing now."""
        return now_ns < self._rest_until_ns or not any(self._due(name, now_ns, False) for name in self._work)

    def refresh(self, transaction: Transaction, now_ns: int, force: bool = False) -> int:
        """Attribute what is due, what was served longest ago first, and write it; the number of rows written."""
        started = time.monotonic()
        written = 0
        for _, name in sorted((work.served_ns, name) for name, work in self._work.items()):
            turn = self._due(name, now_ns, force)
            if turn is not None:
                written += self._refresh_one(transaction, name, turn, now_ns)
                if not force and time.monotonic() - started > TURN_S:
                    break
        if not force:  # an import is waited for, and what comes live owes it nothing
            self._rest_until_ns = now_ns + int(RATIO * (time.monotonic() - started) * 1e9)
        return written

    def _due(self, instance: str, now_ns: int, force: bool) -> _Turn | None:
        work = self._work[instance]
        watermark = min(self._watermarks.of(name, now_ns) for name in self._peers(instance))
        ripe = work.oldest_provisional_unix_ns <= watermark and (force or now_ns - work.finished_ns >= FINAL_NS)
        soon = force or ripe or now_ns - work.refreshed_ns >= NEIGHBOURS_NS
        if ripe or _is_some(work.raw) or (soon and _is_some(work.touched)):
            return _Turn(watermark, soon, ripe)
        return None

    def _peers(self, instance: str) -> list[str]:
        """Instances that are one replica with this one, itself included."""
        return self._registry.peers(instance) if instance else [instance]

    def _of(self, instance: str) -> _Work:
        return self._work.setdefault(instance, _Work())

    def _refresh_one(self, transaction: Transaction, instance: str, turn: _Turn, now_ns: int) -> int:
        work = self._work[instance]
        targets = self._targets(transaction, instance, work, turn)
        rows = targets.clear()
        if not targets.is_empty():
            rows = self._answered(transaction, instance, targets, turn)
            update_rows(transaction, rows)
            self._dirty.add(rows, now_ns)
            self._counted -= self._counted.intersection(targets["request_key"]) if self._counted else set()
        work.raw, work.served_ns = _NONE, now_ns
        if turn.soon:  # else nobody has looked into the touched time yet
            work.touched, work.refreshed_ns = _NONE, now_ns
            self._late.pop(instance, None)
        if turn.ripe:
            work.finished_ns = now_ns
            work.final_unix_ns = min(turn.watermark_unix_ns, now_ns)
            work.oldest_provisional_unix_ns = self._oldest_provisional(transaction, instance, work)
        return rows.height

    def _targets(self, transaction: Transaction, instance: str, work: _Work, turn: _Turn) -> pl.DataFrame:
        """Place, key, arrival and end of the rows to attribute: new ones, those that overlap the touched time, those now final."""
        tests: list[tuple[str, tuple[int, ...], int]] = []
        if _is_some(work.raw):
            tests.append(("revision IS NULL AND finished_unix_ns BETWEEN ? AND ?", work.raw, work.raw[0]))
        if turn.soon and _is_some(work.touched):
            tests.append(("finished_unix_ns >= ? AND arrival_unix_ns <= ?", work.touched, work.touched[0]))
        if turn.ripe:
            ripe = (turn.watermark_unix_ns,)
            tests.append(("NOT final AND finished_unix_ns <= ?", ripe, work.oldest_provisional_unix_ns))
        return transaction.query(
            "SELECT rowid AS row, request_key, arrival_unix_ns, finished_unix_ns FROM requests WHERE coalesce(instance, '') = ? "
            f"AND finished_unix_ns >= ? AND ({' OR '.join(f'({sql})' for sql, _, _ in tests)})",
            [instance, min(least for _, _, least in tests), *(value for _, own, _ in tests for value in own)],
        )

    def _answered(self, transaction: Transaction, instance: str, targets: pl.DataFrame, turn: _Turn) -> pl.DataFrame:
        """What attribution says of the targets; where it fails, nothing: a fault there loses no data."""
        scope = load_scope(transaction, self._registry, instance, targets, turn.ripe)
        try:
            answered = attributed(
                transaction,
                self._attribute,
                self._registry,
                instance,
                scope,
                targets,
                turn.watermark_unix_ns,
                self._counted,
            )
            self.last_error = ""
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"[:300]
            self._counters.add("attribution_failed", 1)
            log.exception(
                "attribution of %s failed; its rows are stored without causes", instance or "calls without engine"
            )
            return targets.clear()
        return answered

    @staticmethod
    def _oldest_provisional(transaction: Transaction, instance: str, work: _Work) -> int:
        oldest = transaction.query(
            "SELECT min(finished_unix_ns) AS oldest FROM requests WHERE coalesce(instance, '') = ? AND NOT final "
            "AND finished_unix_ns >= ?",
            [instance, work.oldest_provisional_unix_ns],
        )["oldest"].item()
        return 2**62 if oldest is None else int(oldest)


def _is_some(span: tuple[int, int]) -> bool:
    return span[0] <= span[1]


def _around(span: tuple[int, int], low: int, high: int) -> tuple[int, int]:
    return min(span[0], low), max(span[1], high)
