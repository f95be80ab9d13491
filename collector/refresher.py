"""What has to be attributed, and when: new rows before they are written, their neighbours and rows of new samples soon, all once more
by the blocks in which they become final.

Rows are seen soon even where attribution is slow or fails: beyond its time in a pass they are written without it and get it later. What
is attributed in the store rests three times as long as it took, over all instances together. So a busy store gets fresher answers
less often instead of a growing backlog; neighbours, which become final anyway, are left alone where they are many.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from phasewise.collector.answers import Answers
from phasewise.collector.attribution import Answer, Question, attributed_first
from phasewise.collector.block_rows import load_blocks, read_blocks
from phasewise.collector.blocks import (
    BLOCK_ROWS,
    LATE_AFTER_NS,
    LATE_BEFORE_NS,
    Block,
    concerns,
    slot_start,
    span_end,
    span_start,
)
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.failed_blocks import FailedBlocks
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.newest_rows import NewestRows
from phasewise.collector.registry import Registry
from phasewise.collector.request_table import replace_rows
from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.scope import CONTEXT_SCHEMA, OF, load_near, near_new, stepped
from phasewise.collector.store import Store, Transaction
from phasewise.collector.watermarks import Watermarks

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
TOGETHER = 16  # instances of one look at the clock
PORTION_ROWS = 8_192  # attributed at once: what is asked of Polars costs as much for few as for many
_NONE = (2**62, -(2**62))
_ASKED = {
    "of": pl.String,
    "first_raw": pl.Int64,
    "last_raw": pl.Int64,
    "first_touched": pl.Int64,
    "last_touched": pl.Int64,
}
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
    failed: FailedBlocks = field(default_factory=FailedBlocks)


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
        self._registry = registry
        self._watermarks = watermarks
        self._dirty = dirty
        self._answers = Answers(attribute, registry, counters, dirty)
        self._work: dict[str, _Work] = {}
        self._newest = NewestRows()
        self._rest_until_ns = 0
        self._first_rest_until_ns = 0
        self._behind_until_ns = 0
        # A statement of attribution that breaks the transaction would take new rows with it, again and again: after every start, and
        # so after every such fault, they are written raw until a pass of their attribution alone has succeeded.
        self._proven = False
        self._late_stored = ""
        self._sealed_until_unix_ns = 0

    @property
    def last_error(self) -> str:
        return self._answers.last_error

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
        start, end = work.failed.extent
        late = _around(work.late, start, end - 1)
        touched = work.touched[0] <= work.final_until_unix_ns
        return _around(late, *work.touched) if touched else late

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
        rows = rows if ended else self._with_first(transaction, rows, now_ns)
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
            self._rest_until_ns = now_ns + int(RATIO * (time.monotonic() - started) * 1e9)
        self._proven = True
        return written

    def _with_first(self, transaction: Transaction, rows: pl.DataFrame, now_ns: int) -> pl.DataFrame:
        """New rows with their first attribution, as many instances as there is time for; the others as they are."""
        started = time.monotonic()
        may = self._proven and now_ns >= self._first_rest_until_ns
        new = rows.filter(pl.col("revision").is_null()).select(list(CONTEXT_SCHEMA))
        stepping = stepped(transaction, new) if may and not new.is_empty() else frozenset()
        answers: list[Answer] = []
        told = 0
        for own in _portions(new) if may else ():
            if time.monotonic() - started > FIRST_S:
                break
            scopes = near_new(transaction, self._registry, own, self._newest.rows, stepping)
            keys = own.select(OF, "request_key").partition_by("of", as_dict=True)
            questions = [Question(name, scope, keys[name,]["request_key"]) for name, scope in scopes.items()]
            answers += self._answers.ask(questions)[0]
            told += own.height
        if not new.is_empty():
            self._newest.add(new)
        rows = attributed_first(rows, answers)
        spent_s = time.monotonic() - started
        if told and spent_s > CHEAP_S * told + FIRST_S / 10:
            self._first_rest_until_ns = now_ns + int(RATIO * spent_s * 1e9)
        return rows

    def _due(self, instance: str, now_ns: int, force: bool) -> _Turn | None:
        work = self._work[instance]
        until = self._until(instance, now_ns)
        ripe = _is_some(work.late) or work.oldest_provisional_unix_ns < until
        ripe = bool(work.failed) or (ripe and (force or until != work.looked_unix_ns))
        ripe = ripe and (force or now_ns - work.finished_ns >= FINAL_NS)
        calm = force or now_ns >= self._behind_until_ns
        raw = calm and _is_some(work.raw)
        soon = calm and (force or now_ns - work.refreshed_ns >= NEIGHBOURS_NS)
        if ripe or raw or (soon and _is_some(work.touched)):
            return _Turn(until, raw, soon, ripe)
        return None

    def _until(self, instance: str, now_ns: int) -> int:
        """Blocks that end by then are final."""
        peers = [self._watermarks.of(name, now_ns) for name in self._peers(instance)]
        watermark = min(
            (one for one in peers if one is not None), default=None
        )  # others have nothing here but sealed rows
        if watermark is None:
            return _NONE[1]
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

    def _refresh_some(
        self, transaction: Transaction, turns: Mapping[str, _Turn], now_ns: int, until_s: float | None
    ) -> int:
        """The number of rows written."""
        for name, turn in turns.items():
            touched = self._work[name].touched
            if turn.soon and _is_some(touched):
                self._touch_final(name, *touched)
        written, done = self._finish(transaction, turns, now_ns, until_s)
        targets = self._targets(transaction, turns, done)
        if not targets.is_empty():
            scopes = load_near(transaction, self._registry, targets)
            keys = {str(name): own["request_key"] for (name,), own in targets.group_by("of")}
            questions = [Question(name, scope, keys[name]) for name, scope in scopes.items()]
            places = {one.instance: n for n, one in enumerate(questions)}
            asked = targets.with_columns(pl.col("of").replace_strict(places, return_dtype=pl.Int64).alias("n"))
            written += self._answers.write(transaction, questions, asked, now_ns, final=False)[0]
        for name, turn in turns.items():
            work = self._work[name]
            work.served_ns = now_ns
            if turn.raw:
                work.raw = _NONE
            if turn.soon:  # else nobody has looked into the touched time yet
                work.touched, work.refreshed_ns = _NONE, now_ns
        return written

    def _finish(
        self, transaction: Transaction, turns: Mapping[str, _Turn], now_ns: int, until_s: float | None
    ) -> tuple[int, Mapping[str, Sequence[Block]]]:
        """Blocks that have ended and have rows that are not final, and blocks of final rows that something late concerns or whose
        attribution failed, those of an instance in order of time; the number of rows written, and the blocks by instance."""
        looked = [name for name, turn in turns.items() if turn.ripe or (turn.soon and _is_some(self._work[name].late))]
        if not looked:
            return 0, {}
        spans = {name: self._span_to_look_at(name, turns[name], now_ns, at_once=until_s is None) for name in looked}
        found = read_blocks(transaction, self._registry, spans)
        due = [
            (name, block)
            for name in looked
            for block in found[name]
            if self._is_due(block, self._work[name], turns[name].until_unix_ns)
        ]
        due.sort(key=lambda one: one[1].start_unix_ns)
        written = 0
        done: dict[str, list[Block]] = {name: [] for name in looked}
        for portion in _portions_of_blocks(due):
            if any(done.values()) and until_s is not None and time.monotonic() > until_s:
                break
            written += self._finish_blocks(transaction, portion, now_ns)
            for name, block in portion:
                done[name].append(block)
        for name in looked:
            work = self._work[name]
            left = [block for of, block in due if of == name][len(done[name]) :]
            if not left:
                work.finished_ns, work.looked_unix_ns = now_ns, turns[name].until_unix_ns
                work.late, work.late_done_unix_ns = _NONE, 0
                work.failed.forget_waiting()
            else:  # they come next: what was done is not done again, and what is late concerns them as before
                work.looked_unix_ns = 0
                if done[name]:
                    work.late_done_unix_ns = left[0].start_unix_ns
        self._look_for_provisional(transaction, looked)
        return written, done

    def _span_to_look_at(self, name: str, turn: _Turn, now_ns: int, *, at_once: bool) -> tuple[int, int]:
        work = self._work[name]
        work.failed.look(now_ns, at_once=at_once)
        failed_start, failed_end = work.failed.extent
        low = min(work.oldest_provisional_unix_ns, work.late[0] - LATE_BEFORE_NS, failed_start)
        return low, max(turn.until_unix_ns, work.late[1] + LATE_AFTER_NS, failed_end - 1)

    @staticmethod
    def _is_due(block: Block, work: _Work, until_unix_ns: int) -> bool:
        if work.failed.rests(block):
            return False
        if block.open_rows:  # and what is late for some of its rows is so for all of them
            return block.end_unix_ns <= until_unix_ns
        is_late = block.start_unix_ns >= work.late_done_unix_ns and concerns(block, *work.late)
        return is_late or work.failed.is_due(block)

    def _finish_blocks(self, transaction: Transaction, blocks: Sequence[tuple[str, Block]], now_ns: int) -> int:
        for name, block in blocks:
            self._work[name].failed.begin(block)
        scopes, targets = load_blocks(transaction, self._registry, blocks)
        keys = {
            int(n): own["request_key"] for (n,), own in targets.group_by("n")
        }  # none of some: the rows are those of peers
        asked = sorted(keys)
        questions = [Question(blocks[n][0], scopes[n], keys[n]) for n in asked]
        if not questions:
            return 0
        placed = targets.with_columns(
            pl.col("n").replace_strict({n: place for place, n in enumerate(asked)}, return_dtype=pl.Int64)
        )
        written, failed = self._answers.write(transaction, questions, placed, now_ns, final=True)
        newest = dict(targets.group_by("n").agg(pl.col("finished_unix_ns").max()).iter_rows())
        for place, n in enumerate(asked):
            name, block = blocks[n]
            work = self._work[name]
            if place in failed:
                work.failed.add(block)
            else:
                work.final_until_unix_ns = max(work.final_until_unix_ns, newest[n])
        return written

    def _targets(
        self, transaction: Transaction, turns: Mapping[str, _Turn], done: Mapping[str, Sequence[Block]]
    ) -> pl.DataFrame:
        """Instance (`of`), place, key, arrival and end of the rows to attribute while they are provisional: those without attribution,
        those that overlap the touched time. What was made final just now is left out."""
        asked = []
        for name, turn in turns.items():
            work = self._work[name]
            raw = work.raw if turn.raw else _NONE
            touched = (max(work.touched[0], turn.until_unix_ns), work.touched[1])
            touched = touched if turn.soon and _is_some(work.touched) else _NONE
            if _is_some(raw) or touched != _NONE:
                asked.append((name, *raw, *touched))
        if not asked:
            return pl.DataFrame()
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

    def _look_for_provisional(self, transaction: Transaction, names: Sequence[str]) -> None:
        """Since when these instances have rows that are not final."""
        since = {name: self._work[name].oldest_provisional_unix_ns for name in names}
        found = transaction.query(
            "SELECT w.of, min(r.finished_unix_ns) AS oldest FROM requests r JOIN wanted w ON coalesce(r.instance, '') = w.of "
            "AND r.finished_unix_ns >= w.low WHERE NOT r.final AND r.finished_unix_ns >= ? GROUP BY 1",
            [min(since.values())],
            wanted=pl.DataFrame(list(since.items()), schema={"of": pl.String, "low": pl.Int64}, orient="row"),
        )
        oldest = dict(found.iter_rows())
        for name in names:
            self._work[name].oldest_provisional_unix_ns = oldest.get(name, 2**62)


def _portions_of_blocks(due: Sequence[tuple[str, Block]]) -> Iterator[Sequence[tuple[str, Block]]]:
    """As many blocks at once as have about the rows of a large one."""
    portion, rows = list[tuple[str, Block]](), 0
    for name, block in due:
        if portion and rows + block.rows > BLOCK_ROWS:
            yield portion
            portion, rows = [], 0
        portion.append((name, block))
        rows += block.rows
    if portion:
        yield portion


def _portions(new: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Rows of whole instances, a portion at a time."""
    if len(new) <= PORTION_ROWS:
        yield from [new] if len(new) else []
        return
    names, rows = list[str](), 0
    for name, n in new.group_by(OF, maintain_order=True).len().iter_rows():
        names.append(name)
        rows += n
        if rows >= PORTION_ROWS:
            yield new.filter(OF.is_in(names))
            names, rows = [], 0
    if names:
        yield new.filter(OF.is_in(names))


def _is_some(span: tuple[int, int]) -> bool:
    return span[0] <= span[1]


def _around(span: tuple[int, int], low: int, high: int) -> tuple[int, int]:
    return min(span[0], low), max(span[1], high)
