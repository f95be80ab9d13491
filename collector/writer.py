"""The one writer of the store: journal to rows, attribution, commit.

A pass reads what the receiver acknowledged, leaves out what came before, settles traces and makes rows, and commits rows and journal
position in one transaction: a crash replays exactly once. What is new or changed is attributed in a transaction of its own, so that
rows are seen before that. Whatever fails is rolled back, and the next pass starts from what is committed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from phasewise.collector.buffer import SETTLE_NS
from phasewise.collector.context import Attribute
from phasewise.collector.imports import Imports
from phasewise.collector.journal import Position
from phasewise.collector.journal_writer import room_error
from phasewise.collector.kept_segments import KeptSegments
from phasewise.collector.ledger import prune
from phasewise.collector.sidecar import Committed
from phasewise.collector.store import Store
from phasewise.rules.load import Rulebook

READ_ENTRIES = 256
READ_ROWS = 32_768
HOUSEKEEPING_NS = 5 * 10**9
ARCHIVE_S = 0.1  # of a pass
# A checkpoint costs by the log that it moves, and what was written or changed since the last one lies unpacked in memory, up to four times
# as much: so it is made often, between two passes, where one of this length takes less than the pause is long.
LOG_BYTES = 32 << 20
_REMEDY = "free space on the disk of --data, or see the server's log; what was received waits in the journal and is stored then"


class Writer(Imports):
    """See the module. Methods may be called from several threads; they take turns.

    attribute: the analyzer's function (collector/context.py). clock: Unix nanoseconds. stated: settings that the operator
    states for every engine.
    """

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        rulebook: Rulebook,
        attribute: Attribute,
        clock: Callable[[], int] = time.time_ns,
        stated: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        super().__init__(store, data_dir, rulebook, attribute, clock, stated)
        self._kept = KeptSegments(store, self._archive, self._journal, clock)
        self._housekept_ns = 0
        self._shorten_again_ns = 0  # not before, where it could not be done
        self._cutting: Iterator[bool] | None = None  # of closed segments that are being archived
        self._idle = False
        self.behind = False  # whether the last pass left something unread
        self._scrapes: Callable[[], list[dict[str, object]]] = list
        self._sources: list[Callable[[], list[dict[str, object]]]] = []
        self._answers: Callable[[], list[dict[str, object]]] = list
        self._told: dict[str, Callable[[], object]] = {}

    # --- what others call -------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One pass over the journal; the number of rows written. Raises MachineError while the store does not answer."""
        with self._lock:
            settled = self._guarded(self._pass)
            for text in self._reader.take_damage():
                self.report_loss(text)
            attributed = self._guarded(self._attribution)
            self._guarded(self._rollups)
            if self._clock() - self._housekept_ns > HOUSEKEEPING_NS:
                self._guarded(self._housekeeping)
            if self._cutting is not None:
                self._guarded(self._archiving)
            self._commits.catch_up()
            return max(settled, attributed)

    def shorten_log(self) -> bool:
        """Between two passes: move the log of the store into its file where it has become long; whether it was moved."""
        with self._lock:
            now = self._clock()
            if self._store.log_bytes < LOG_BYTES or now < self._shorten_again_ns:
                return False
            moved = self._store.checkpoint()
            self._shorten_again_ns = 0 if moved else now + HOUSEKEEPING_NS
            return moved

    @contextlib.contextmanager
    def paused(self) -> Iterator[Committed]:
        """Nothing is written inside, and memory is read anew after; gives the state that is committed."""
        with self._lock:
            self._cutting = None  # whoever asks for this may rewrite what is being archived
            try:
                yield self._commits.committed
            finally:
                self._around.ledger.forget()
                self._stale = True

    def watch(
        self,
        scrapes: Callable[[], list[dict[str, object]]] | None = None,
        sources: Callable[[], list[dict[str, object]]] | None = None,
        answers: Callable[[], list[dict[str, object]]] | None = None,
    ) -> None:
        """Where health reads how scraping goes (Scraper.status), where its targets come from (Scraper.sources), and how asking
        engines about themselves goes (FactReader.status)."""
        self._scrapes = scrapes or self._scrapes
        self._answers = answers or self._answers
        if sources:
            self.watch_also(sources)

    def watch_also(self, sources: Callable[[], list[dict[str, object]]]) -> None:
        """One more place that samples come from."""
        self._sources.append(sources)

    def tell(self, name: str, told: Callable[[], object]) -> None:
        """Where health reads how something else goes, under that name."""
        self._told[name] = told

    def health(self) -> dict[str, object]:
        """What data health shows: counters, unmapped spans, watermarks, unjoined samples, journal position and lag."""
        with self._lock:
            now = self._clock()
            memory = self._memory
            write_error = self._write_error or room_error(self._journal)
            return {
                "write_error": write_error,
                "remedy": _REMEDY if write_error else "",
                "scrapes": self._scrapes(),
                "scrape_sources": [one for sources in self._sources for one in sources()],
                "engine_answers": self._answers(),
                "losses": list(self._losses),
                **{name: told() for name, told in self._told.items()},
                "counters": memory.counters.named(),
                "unmapped": memory.counters.labels("unmapped_spans"),
                "watermarks": {k: min(v, now) for k, v in memory.watermarks.all(now).items()},
                "clock_skews": memory.skews.told(),
                "instances": len(memory.registry),
                "unjoined_samples": self._unjoined_samples(),
                "journal": {
                    "position": str(memory.position) if memory.position else None,
                    "lag_bytes": self._reader.lag_bytes(memory.position),
                    "archived_segment": self._archive.archived_segment(),
                    **self._reader.counters,
                    **self._kept.facts(),
                },
                "open_spans": memory.assembly.buffer.open.height,
                "evicted_traces": memory.assembly.buffer.evicted,
                "waiting_for_attribution": memory.refresher.waiting,
                "attribution_error": memory.refresher.last_error,
                "store": self._store.broken or "ok",
            }

    def _unjoined_samples(self) -> int:
        return int(self._store.query("SELECT count(*) AS n FROM main.engine_samples WHERE NOT joined")["n"].item())

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _pass(self) -> int:
        entries = self._reader.read(self._memory.position, READ_ENTRIES, READ_ROWS)
        now = self._clock()
        self._idle = not entries
        with self._writing() as (transaction, rows):
            newest = rows.take(entries)
            drained = len(entries) < READ_ENTRIES and sum(e.rows.num_rows for e in entries) < READ_ROWS
            settled_before = now - SETTLE_NS if drained or not newest else newest - SETTLE_NS
            due = self._memory.assembly.buffer.take_due(settled_before, now)
            changes = rows.settle(due, now, behind=not drained)
            self.behind = not drained
            if rows.rejoin(now) or entries or not due.is_empty() or self._write_error:
                self._commit_state(transaction)
        return changes

    def _attribution(self) -> int:
        now = self._clock()
        if self._memory.refresher.rests(now):
            return 0
        with self._store.write() as transaction:
            changes = self._memory.refresher.refresh(transaction, now)
            self._commit_state(transaction)
        return changes

    def _rollups(self) -> None:
        now, dirty, refresher = self._clock(), self._memory.dirty, self._memory.refresher
        idle = self._idle and not refresher.waiting  # rows without causes would be counted once more soon
        provisional_from_unix_ns = refresher.provisional_from_unix_ns
        if dirty.is_due(now, idle, provisional_from_unix_ns):
            with self._store.write() as transaction:
                dirty.rebuild(transaction, now, idle, provisional_from_unix_ns)
                dirty.store(transaction)

    def _housekeeping(self) -> None:
        self._housekept_ns = self._clock()
        with self._writing() as (transaction, rows):
            prune(transaction)
            if rows.give_up_waiting(self._housekept_ns):
                self._commit_state(transaction)
        if self._cutting is None and self._memory.position is not None:
            self._cutting = self._archive.cut(self._memory.position)

    def _archiving(self) -> None:
        """A segment takes a second or more: rows that come meanwhile are stored between its parts."""
        cutting, self._cutting = self._cutting, None  # what fails is begun anew
        until_s = time.monotonic() + ARCHIVE_S
        for _ in cutting or ():
            if time.monotonic() > until_s:
                self._cutting = cutting
                break
        open_from = self._store.query("SELECT position FROM positions WHERE name = 'open_from'")
        self._kept.release(Position.parse(open_from["position"].item()))
