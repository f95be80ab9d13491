"""What has to be attributed, and when: new rows before they are written, their neighbours and rows of new samples soon, all once more
by the blocks in which they become final.

Rows are seen soon even where attribution is slow or fails: beyond its time in a pass they are written without it and get it later. What
is attributed in the store rests three times as long as it took, over all instances together. So a busy store gets fresher answers
less often instead of a growing backlog; neighbours, which become final anyway, are left alone where they are many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import polars as pl

from phasewise.collector.answers import Answers
from phasewise.collector.attribution import Question
from phasewise.collector.blocks import LATE_BEFORE_NS, Block, slot_start, span_end, span_start
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.finisher import Finisher
from phasewise.collector.first_answers import FirstAnswers
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.late_times import note_late, read_late
from phasewise.collector.registry import Registry
from phasewise.collector.request_table import replace_rows
from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.scope import load_near, portions
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction
from phasewise.collector.watermarks import Watermarks
from phasewise.collector.work import NONE, PORTION_ROWS, REST_RATIO, Turn, Work, around, is_some

NEIGHBOURS_NS = 500_000_000  # least time between two refreshes of rows already attributed
MANY_ROWS = 100  # of one instance at once: their neighbours, many as well, are left as they are until they become final
FINAL_NS = 20 * 10**9  # least time between two looks for blocks that have ended
# Rows that took as long as the watermark waits, in a batch that was on its way, reach back into no block that ended before this.
MARGIN_NS = 30 * 10**9
TURN_S = 0.2  # no further instance is begun in a pass after that: rows that come meanwhile wait to be stored
BEHIND_NS = 2 * 10**9  # while more rows wait to be seen than a pass takes, what is stored waits for its attribution
TOGETHER = 16  # instances of one look at the clock
_TARGETS = {
    "of": pl.String,
    "row": pl.Int64,
    "request_key": pl.String,
    "arrival_unix_ns": pl.Int64,
    "finished_unix_ns": pl.Int64,
}
_ASKED = {
    "of": pl.String,
    "first_raw": pl.Int64,
    "last_raw": pl.Int64,
    "first_touched": pl.Int64,
    "last_touched": pl.Int64,
}


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
        self._registry = registry
        self._watermarks = watermarks
        self._dirty = dirty
        self._answers = Answers(attribute, registry, counters, dirty)
        self._work: dict[str, Work] = {}
        self._first = FirstAnswers(registry, self._answers)
        self._finisher = Finisher(registry, self._answers, self._work)
        self._rest_until_ns = 0
        self._behind_until_ns = 0
        self._late_stored: dict[str, tuple[int, int]] = {}
        self._sealed_until_unix_ns = 0

    @property
    def last_error(self) -> str:
        return self._answers.last_error

    @property
    def waiting(self) -> int:
        """Instances with rows that wait for their first attribution."""
        return sum(is_some(work.raw) for work in self._work.values())

    @property
    def provisional_from_unix_ns(self) -> int:
        """When the first row that is not final finished; far ahead when all are."""
        return min((work.oldest_provisional_unix_ns for work in self._work.values()), default=NONE[0])

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
        self._late_stored = read_late(store)
        for instance, (low, high) in self._late_stored.items():
            self.touch(instance, low, high)

    def store(self, transaction: Transaction) -> None:
        """What final rows are to be attributed anew, where that changed."""
        late = {name: span for name, work in self._work.items() if is_some(span := self._late(work))}
        if late != self._late_stored:
            note_late(transaction, late)
            self._late_stored = late

    @staticmethod
    def _late(work: Work) -> tuple[int, int]:
        late = work.late
        if work.failed:
            start, end = work.failed.extent
            late = around(late, start, end - 1)
        touched = work.touched[0] <= work.final_until_unix_ns
        return around(late, *work.touched) if touched else late

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
        if behind and not ended:
            self._behind_until_ns = now_ns + BEHIND_NS
        self._answers.count(rows.filter(pl.col("revision").is_not_null())["request_key"])
        rows = rows.with_columns(pl.col("revision") + 1)
        rows = rows if ended else self._first.told(transaction, rows, now_ns)
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
                work.raw = around(work.raw, first_raw, last_raw)
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
        work.touched = around(work.touched, low_unix_ns, high_unix_ns)

    def _touch_final(self, instance: str, low_unix_ns: int, high_unix_ns: int) -> None:
        """The same for its final rows alone."""
        work = self._of(instance)
        if low_unix_ns <= work.final_until_unix_ns:
            work.late = around(work.late, low_unix_ns, high_unix_ns)
            work.late_done_unix_ns = min(work.late_done_unix_ns, span_start(low_unix_ns - LATE_BEFORE_NS))

    def rests(self, now_ns: int) -> bool:
        """Whether `refresh` would do nothing now."""
        return now_ns < self._rest_until_ns or not any(self._due(name, now_ns, False) for name in self._work)

    def refresh(self, transaction: Transaction, now_ns: int, force: bool = False) -> int:
        """Attribute what is due, what was served longest ago first, and write it; the number of rows written."""
        started = time.monotonic()
        written = 0
        until_s = None if force else started + TURN_S
        served = sorted((work.served_ns, name) for name, work in self._work.items())
        due = [(name, turn) for _, name in served if (turn := self._due(name, now_ns, force)) is not None]
        for first in range(0, len(due), TOGETHER):
            written += self._refresh_some(transaction, dict(due[first : first + TOGETHER]), now_ns, until_s)
            if until_s is not None and time.monotonic() > until_s:
                break
        if not force:  # an import is waited for, and what comes live owes it nothing
            self._rest_until_ns = now_ns + int(REST_RATIO * (time.monotonic() - started) * 1e9)
        self._first.is_proven = True
        return written

    def _due(self, instance: str, now_ns: int, force: bool) -> Turn | None:
        work = self._work[instance]
        until = self._until(instance, now_ns)
        ripe = is_some(work.late) or bool(work.failed) or work.oldest_provisional_unix_ns < until
        if not force:
            ripe = ripe and until != work.looked_unix_ns and now_ns - work.finished_ns >= FINAL_NS
        calm = force or now_ns >= self._behind_until_ns
        raw = calm and is_some(work.raw)
        soon = calm and (force or now_ns - work.refreshed_ns >= NEIGHBOURS_NS)
        if ripe or raw or (soon and is_some(work.touched)):
            return Turn(until, raw, soon, ripe)
        return None

    def _until(self, instance: str, now_ns: int) -> int:
        """Blocks that end by then are final."""
        # A peer without a watermark has nothing here but sealed rows.
        peers = [self._watermarks.of(name, now_ns) for name in self._peers(instance)]
        watermark = min((one for one in peers if one is not None), default=None)
        if watermark is None:
            return NONE[1]
        if watermark > now_ns:  # nothing is on its way: the block that would go on is whole
            return span_end(watermark)
        return slot_start(watermark - MARGIN_NS)

    def _peers(self, name: str) -> list[str]:
        """Instances that are one replica with this one, itself included."""
        return self._registry.peers(name) if name else [name]

    def _of(self, instance: str) -> Work:
        if instance not in self._work:
            self._work[instance] = Work(final_until_unix_ns=self._sealed_until_unix_ns)
        return self._work[instance]

    def _refresh_some(
        self, transaction: Transaction, turns: Mapping[str, Turn], now_ns: int, until_s: float | None
    ) -> int:
        """The number of rows written."""
        for name, turn in turns.items():
            touched = self._work[name].touched
            if turn.soon and is_some(touched):
                self._touch_final(name, *touched)
        written, done = self._finisher.finish(transaction, turns, now_ns, until_s)
        targets = self._targets(transaction, turns, done)
        left: set[str] = set()
        for n, portion in enumerate(portions(targets, PORTION_ROWS)):
            if n and until_s is not None and time.monotonic() > until_s:
                left.update(portion["of"])  # what was asked for of these is asked for as before
            else:
                written += self._refresh_rows(transaction, portion, now_ns)
        for name, turn in turns.items():
            work = self._work[name]
            if name in left:  # of the touched time its final rows are looked after already
                if turn.soon and is_some(work.touched):
                    work.touched = max(work.touched[0], turn.until_unix_ns), work.touched[1]
                continue
            work.served_ns = now_ns
            if turn.raw:
                work.raw = NONE
            if turn.soon:  # else nobody has looked into the touched time yet
                work.touched, work.refreshed_ns = NONE, now_ns
        return written

    def _refresh_rows(self, transaction: Transaction, targets: pl.DataFrame, now_ns: int) -> int:
        scopes = load_near(transaction, self._registry, targets)
        keys = {str(name): own["request_key"] for (name,), own in targets.group_by("of")}
        questions = [Question(name, scope, keys[name]) for name, scope in scopes.items()]
        places = {one.instance: n for n, one in enumerate(questions)}
        asked = targets.with_columns(pl.col("of").replace_strict(places, return_dtype=pl.Int64).alias("n"))
        return self._answers.write(transaction, questions, asked, now_ns, final=False)[0]

    def _targets(
        self, transaction: Transaction, turns: Mapping[str, Turn], done: Mapping[str, Sequence[Block]]
    ) -> pl.DataFrame:
        """Instance (`of`), place, key, arrival and end of the rows to attribute while they are provisional: those without attribution,
        those that overlap the touched time. What was made final just now is left out."""
        asked = []
        for name, turn in turns.items():
            work = self._work[name]
            raw = work.raw if turn.raw else NONE
            touched = (max(work.touched[0], turn.until_unix_ns), work.touched[1])
            touched = touched if turn.soon and is_some(work.touched) else NONE
            if is_some(raw) or touched != NONE:
                asked.append((name, *raw, *touched))
        if not asked:
            return pl.DataFrame(schema=_TARGETS)
        wanted = pl.DataFrame(asked, schema=_ASKED, orient="row")
        found = transaction.query(
            "SELECT w.of, r.rowid AS row, r.request_key, r.arrival_unix_ns, r.finished_unix_ns FROM requests r "
            "JOIN wanted w ON coalesce(r.instance, '') = w.of WHERE r.finished_unix_ns >= ? AND ((r.revision IS NULL "
            "AND r.finished_unix_ns BETWEEN w.first_raw AND w.last_raw) "
            "OR (r.finished_unix_ns >= w.first_touched AND r.arrival_unix_ns <= w.last_touched))",
            [min(min(one[1], one[3]) for one in asked)],
            wanted=wanted,
        )
        for name, blocks in done.items():
            for block in blocks:
                inside = pl.col("finished_unix_ns").is_between(block.start_unix_ns, block.end_unix_ns, closed="left")
                found = found.filter(~(inside & (pl.col("of") == name)))
        return found
