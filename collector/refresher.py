"""What has to be attributed, and when: new rows before they are written, their neighbours and rows of new samples soon, all once more
by the blocks in which they become final.

Rows are seen soon even where attribution is slow or fails: beyond its time in a pass they are written without it and get it later. What
is attributed in the store rests three times as long as it took, over all instances together. So a busy store gets fresher answers
less often instead of a growing backlog; neighbours, which become final anyway, are left alone where they are many.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.attribution import Answer, ask, attributed, attributed_first, finished, names_models
from phasewise.collector.blocks import AFTER_NS, BEFORE_NS, Block, concerns, slot_start, span_end, span_start
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.newest_rows import NewestRows
from phasewise.collector.registry import Registry
from phasewise.collector.request_table import finish_rows, replace_rows, update_rows
from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.scope import CONTEXT_SCHEMA, Scope, load_block, load_near, near_new, read_blocks, stepped
from phasewise.collector.store import Store, Transaction
from phasewise.collector.watermarks import Watermarks

log = logging.getLogger(__name__)
NEIGHBOURS_NS = 500_000_000  # least time between two refreshes of rows already attributed
MANY_ROWS = 100  # of one instance at once: their neighbours, many as well, are left as they are until they become final
FINAL_NS = 20 * 10**9  # least time between two looks for blocks that have ended
# Rows that took as long as the watermark waits, in a batch that was on its way, reach back into no block that ended before this.
MARGIN_NS = 30 * 10**9
RATIO = 3.0
TURN_S = 0.5  # no further instance is begun in a pass after that: rows that come meanwhile wait to be stored
FIRST_S = 0.5  # the same for rows not yet written
BEHIND_NS = 2 * 10**9  # while more rows wait to be seen than a pass takes, what is stored waits for its attribution
CHEAP_S = 200e-6  # a row's first attribution may take so long; what it takes beyond is rested for
_NONE = (2**62, -(2**62))
LATE = "late"  # among the positions: touched time of final rows, by instance


@dataclass(slots=True)
class _Work:
    """raw: when the rows without attribution finished; touched: the time whose rows are to be attributed anew; late: that of touched
    rows which are final; all as (low, high), empty where low > high."""

    raw: tuple[int, int] = _NONE
    touched: tuple[int, int] = _NONE
    late: tuple[int, int] = _NONE
    oldest_provisional_unix_ns: int = 2**62
    served_ns: int = 0
    refreshed_ns: int = 0
    finished_ns: int = 0  # when blocks were looked for last
    looked_unix_ns: int = 0  # and until when
    late_done_unix_ns: int = 0  # blocks of final rows that begin before this have seen what is late
    final_until_unix_ns: int = 0  # the newest end of a row made final, or of a sealed hour


@dataclass(frozen=True, slots=True)
class _Turn:
    """Why an instance is due. raw: rows without attribution; soon: neighbours as well; ripe: rows become final, by blocks that have
    ended before until_unix_ns."""

    until_unix_ns: int
    raw: bool
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
        self._newest = NewestRows()
        self._rest_until_ns = 0
        self._first_rest_until_ns = 0
        self._behind_until_ns = 0
        # A statement of attribution that breaks the transaction would take new rows with it, again and again: after every start, and
        # so after every such fault, they are written raw until a pass of their attribution alone has succeeded.
        self._proven = False
        self._late_stored = ""
        self._sealed_until_unix_ns = 0
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
        sealed = store.query("SELECT max(hour) FROM main.sealed_hours").item()
        self._sealed_until_unix_ns = 0 if sealed is None else (int(sealed) + 1) * HOUR_NS
        found = store.query(
            "SELECT coalesce(instance, '') AS instance, min(finished_unix_ns) FILTER (NOT final) AS oldest, "
            "max(finished_unix_ns) FILTER (final) AS newest FROM main.requests GROUP BY 1"
        )
        for instance, oldest, newest in found.iter_rows():
            work = self._of(instance)
            work.oldest_provisional_unix_ns = 2**62 if oldest is None else oldest
            work.final_until_unix_ns = max(newest or 0, self._sealed_until_unix_ns)
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
        """What final rows are to be attributed anew, where that changed: nothing else would say so after a crash."""
        late = {name: span for name, work in self._work.items() if _is_some(span := self._late(work))}
        told = json.dumps(late, sort_keys=True) if late else ""
        if told != self._late_stored:
            transaction.execute("DELETE FROM positions WHERE name = ?", [LATE])
            if told:
                transaction.execute("INSERT INTO positions VALUES (?, ?)", [LATE, told])
            self._late_stored = told

    @staticmethod
    def _late(work: _Work) -> tuple[int, int]:
        touched = work.touched[0] <= work.final_until_unix_ns
        return _around(work.late, *work.touched) if touched else work.late

    def take(
        self,
        transaction: Transaction,
        rows: pl.DataFrame,
        stored: Sequence[str],
        now_ns: int,
        *,
        ended: bool = False,
        behind: bool = False,
    ) -> None:
        """Write whole rows, new ones and changed ones (keys `stored`), the new ones with their first attribution where there is time;
        the others and all neighbours are to be attributed. ended: they are of an import, and become final at once; behind: more of them wait
        to be seen, so what is stored waits for its attribution."""
        if rows.is_empty():
            return
        self._counted |= set(rows.filter(pl.col("revision").is_not_null())["request_key"])
        rows = rows.with_columns(pl.col("revision") + 1)
        rows = rows if ended else self._with_first(transaction, rows, now_ns, behind)
        replace_rows(transaction, rows, stored)
        self._dirty.add(rows, now_ns)
        finished = pl.col("finished_unix_ns")
        raw = finished.filter(pl.col("revision").is_null())
        facts = rows.group_by(pl.col("instance").fill_null("")).agg(
            pl.col("arrival_unix_ns").min(),
            finished.min().alias("first"),
            finished.max().alias("last"),
            raw.min().alias("first_raw"),
            raw.max().alias("last_raw"),
            pl.len().alias("n"),
        )
        for name, arrival, first, last, first_raw, last_raw, n in facts.iter_rows():
            work = self._of(name)
            if first_raw is not None:
                work.raw = _around(work.raw, first_raw, last_raw)
            work.oldest_provisional_unix_ns = min(work.oldest_provisional_unix_ns, first)
            for peer in self._peers(name):
                if ended:  # what ends in one span of the clock may be cut into blocks in another way now
                    self.touch(peer, arrival, span_end(last) - 1)
                elif n < MANY_ROWS:
                    self.touch(peer, arrival, last)
                else:
                    self._touch_final(peer, arrival, last)

    def touch(self, instance: str, low_unix_ns: int, high_unix_ns: int) -> None:
        """Rows of an instance that overlap this time have to be attributed anew."""
        work = self._of(instance)
        work.touched = _around(work.touched, low_unix_ns, high_unix_ns)

    def _touch_final(self, instance: str, low_unix_ns: int, high_unix_ns: int) -> None:
        """The same for its final rows alone."""
        work = self._of(instance)
        if low_unix_ns <= work.final_until_unix_ns:
            work.late = _around(work.late, low_unix_ns, high_unix_ns)
            work.late_done_unix_ns = min(work.late_done_unix_ns, span_start(low_unix_ns - BEFORE_NS))

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
                until_s = None if force else started + TURN_S
                written += self._refresh_one(transaction, name, turn, now_ns, until_s)
                if not force and time.monotonic() - started > TURN_S:
                    break
        if not force:  # an import is waited for, and what comes live owes it nothing
            self._rest_until_ns = now_ns + int(RATIO * (time.monotonic() - started) * 1e9)
        self._proven = True
        return written

    def _with_first(self, transaction: Transaction, rows: pl.DataFrame, now_ns: int, behind: bool) -> pl.DataFrame:
        """New rows with their first attribution, as many instances as there is time for; the others as they are."""
        started = time.monotonic()
        may = self._proven and now_ns >= self._first_rest_until_ns
        new = rows.filter(pl.col("revision").is_null()).select(list(CONTEXT_SCHEMA))
        stepping = stepped(transaction, new) if may and not new.is_empty() else frozenset()
        answers: dict[str, Answer] = {}
        told = 0
        for (name,), own in new.group_by(pl.col("instance").fill_null("").alias("_of"), maintain_order=True):
            if may and time.monotonic() - started <= FIRST_S:
                answer = self._first(transaction, str(name), own, stepping)
                if answer is not None:
                    answers[str(name)] = answer
                told += own.height
            self._newest.add(str(name), own)
        rows = attributed_first(rows, answers)
        spent_s = time.monotonic() - started
        if told and spent_s > CHEAP_S * told + FIRST_S / 10:
            self._first_rest_until_ns = now_ns + int(RATIO * spent_s * 1e9)
        if behind:
            self._behind_until_ns = now_ns + BEHIND_NS
        return rows

    def _first(
        self, transaction: Transaction, instance: str, rows: pl.DataFrame, stepping: frozenset[str]
    ) -> Answer | None:
        newest = self._newest.of(self._peers(instance))
        scope = near_new(transaction, self._registry, instance, rows, newest, stepping)
        try:
            answer = ask(self._attribute, self._registry, instance, scope, rows["request_key"])
        except Exception as error:
            self._failed(instance, error)
            return None
        return answer

    def _failed(self, instance: str, error: Exception) -> None:
        """A fault of attribution loses no data."""
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        self._counters.add("attribution_failed", 1)
        log.exception(
            "attribution of %s failed; its rows are stored without causes", instance or "calls without engine"
        )

    def _due(self, instance: str, now_ns: int, force: bool) -> _Turn | None:
        work = self._work[instance]
        until = self._until(instance, now_ns)
        ripe = _is_some(work.late) or work.oldest_provisional_unix_ns < until
        if not force:
            ripe = ripe and until != work.looked_unix_ns and now_ns - work.finished_ns >= FINAL_NS
        calm = force or now_ns >= self._behind_until_ns
        raw = calm and _is_some(work.raw)
        soon = calm and (force or now_ns - work.refreshed_ns >= NEIGHBOURS_NS)
        if ripe or raw or (soon and _is_some(work.touched)):
            return _Turn(until, raw, soon, ripe)
        return None

    def _until(self, instance: str, now_ns: int) -> int:
        """Blocks that end by then are final."""
        watermark = min(self._watermarks.of(name, now_ns) for name in self._peers(instance))
        if watermark > now_ns:  # nothing is on its way: the block that would go on is whole
            return span_end(watermark)
        return slot_start(watermark - MARGIN_NS)

    def _peers(self, name: str) -> list[str]:
        """Instances that are one replica with this one, itself included."""
        return self._registry.peers(name) if name else [name]

    def _of(self, instance: str) -> _Work:
        if instance not in self._work:
            self._work[instance] = _Work(final_until_unix_ns=self._sealed_until_unix_ns)
        return self._work[instance]

    def _refresh_one(
        self, transaction: Transaction, instance: str, turn: _Turn, now_ns: int, until_s: float | None
    ) -> int:
        work = self._work[instance]
        if turn.soon and _is_some(work.touched):
            self._touch_final(instance, *work.touched)
        written, done = 0, list[Block]()
        if turn.ripe or (turn.soon and _is_some(work.late)):
            written, done = self._finish(transaction, instance, turn.until_unix_ns, now_ns, until_s)
        targets = self._targets(transaction, instance, work, turn, done)
        if not targets.is_empty():
            scope = load_near(transaction, self._registry, instance, targets)
            written += self._answer(transaction, instance, scope, targets, now_ns, final=False)
        work.served_ns = now_ns
        if turn.raw:
            work.raw = _NONE
        if turn.soon:  # else nobody has looked into the touched time yet
            work.touched, work.refreshed_ns = _NONE, now_ns
        return written

    def _finish(
        self, transaction: Transaction, instance: str, until_unix_ns: int, now_ns: int, until_s: float | None
    ) -> tuple[int, list[Block]]:
        """Blocks that have ended and have rows that are not final, and blocks of final rows that something late concerns, in order of time;
        the number of rows written."""
        work = self._work[instance]
        low = min(work.oldest_provisional_unix_ns, work.late[0] - BEFORE_NS)
        high = max(until_unix_ns, work.late[1] + AFTER_NS) if _is_some(work.late) else until_unix_ns
        due = [
            block
            for block in read_blocks(transaction, self._registry, instance, low, high)
            if (block.end_unix_ns <= until_unix_ns and block.open_rows)
            or (
                (block.end_unix_ns <= until_unix_ns or not block.open_rows)
                and block.start_unix_ns >= work.late_done_unix_ns
                and concerns(block, *work.late)
            )
        ]
        written = 0
        done: list[Block] = []
        for block in due:
            if done and until_s is not None and time.monotonic() > until_s:
                # The others come next: what was done is not done again, and what is late concerns them as before.
                work.late_done_unix_ns, work.looked_unix_ns = block.start_unix_ns, 0
                break
            done.append(block)
            scope, targets = load_block(transaction, self._registry, instance, block)
            if targets.is_empty():  # the rows are those of its peers
                continue
            written += self._answer(transaction, instance, scope, targets, now_ns, final=True)
            newest = int(targets["finished_unix_ns"].max() or 0)  # type: ignore[arg-type]
            work.final_until_unix_ns = max(work.final_until_unix_ns, newest)
        else:
            work.finished_ns, work.looked_unix_ns = now_ns, until_unix_ns
            work.late, work.late_done_unix_ns = _NONE, 0
        work.oldest_provisional_unix_ns = self._oldest_provisional(transaction, instance, work)
        return written, done

    def _targets(
        self, transaction: Transaction, instance: str, work: _Work, turn: _Turn, done: Sequence[Block]
    ) -> pl.DataFrame:
        """Place, key, arrival and end of the rows to attribute while they are provisional: those without attribution, those that overlap
        the touched time. What was made final just now is left out."""
        tests: list[tuple[str, tuple[int, ...], int]] = []
        if turn.raw:
            tests.append(("revision IS NULL AND finished_unix_ns BETWEEN ? AND ?", work.raw, work.raw[0]))
        if turn.soon and _is_some(work.touched):
            least = (max(work.touched[0], turn.until_unix_ns), work.touched[1])
            tests.append(("finished_unix_ns >= ? AND arrival_unix_ns <= ?", least, least[0]))
        if not tests:
            return pl.DataFrame()
        found = transaction.query(
            "SELECT rowid AS row, request_key, arrival_unix_ns, finished_unix_ns FROM requests WHERE coalesce(instance, '') = ? "
            f"AND finished_unix_ns >= ? AND ({' OR '.join(f'({sql})' for sql, _, _ in tests)})",
            [instance, min(least for _, _, least in tests), *(v for _, own, _ in tests for v in own)],
        )
        for block in done:
            inside = pl.col("finished_unix_ns").is_between(block.start_unix_ns, block.end_unix_ns, closed="left")
            found = found.filter(~inside)
        return found

    def _answer(
        self,
        transaction: Transaction,
        instance: str,
        scope: Scope,
        targets: pl.DataFrame,
        now_ns: int,
        *,
        final: bool,
    ) -> int:
        """Attribute stored rows and write what is said anew; where attribution fails, nothing."""
        try:
            answer = ask(self._attribute, self._registry, instance, scope, targets["request_key"])
            self.last_error = ""
        except Exception as error:
            self._failed(instance, error)
            return 0
        if final and self._are_plain(targets, answer, scope):
            rows = finished(transaction, instance, answer, targets)
            finish_rows(transaction, rows)
            self._dirty.add(rows, now_ns)
            return rows.height
        written = 0
        for rows in attributed(transaction, instance, answer, targets, final, self._counted):
            update_rows(transaction, rows)
            self._dirty.add(rows, now_ns)
            written += rows.height
        self._counted -= self._counted.intersection(targets["request_key"]) if self._counted else set()
        return written

    def _are_plain(self, targets: pl.DataFrame, answer: Answer, scope: Scope) -> bool:
        """Whether all of them become final now, each changed by that once."""
        if targets["final"].any() or names_models(answer, scope.rows):
            return False
        return not self._counted or self._counted.isdisjoint(targets["request_key"])

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
