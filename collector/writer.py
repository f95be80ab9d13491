"""The one writer of the store: journal to rows, attribution, commit.

A pass reads what the receiver acknowledged, leaves out what came before, settles traces and makes rows, and commits rows and journal
position in one transaction: a crash replays exactly once. What is new or changed is attributed in a transaction of its own, so that
rows are seen before that. Whatever fails is rolled back, and the next pass starts from what is committed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import polars as pl
import pyarrow as pa

from phasewise.collector import exchange
from phasewise.collector.archive import SpanArchive
from phasewise.collector.attribution import typed
from phasewise.collector.buffer import SETTLE_NS
from phasewise.collector.client_records import match_records
from phasewise.collector.cold import hours_touched, thaw
from phasewise.collector.completion import NEAR_NS, Identifiers
from phasewise.collector.context import Attribute
from phasewise.collector.exposition import Exposition, samples_of_points
from phasewise.collector.facts import Statement
from phasewise.collector.frames import SeenSettings, frame_of, samples_frame
from phasewise.collector.identity import identities
from phasewise.collector.import_marks import Mark, position_of, write_mark
from phasewise.collector.importers import Imported
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.journal_writer import room_error
from phasewise.collector.kept_segments import KeptSegments
from phasewise.collector.lake import KINDS
from phasewise.collector.ledger import Ledger, prune
from phasewise.collector.phases import told_within
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import SPAN_SCHEMA, Annotation
from phasewise.collector.registry import facts_names
from phasewise.collector.row_writer import RowWriter
from phasewise.collector.sidecar import WITNESS, CommitLog, Committed
from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction
from phasewise.collector.writer_memory import Surroundings, recalled
from phasewise.rules.errors import InputError, MachineError
from phasewise.rules.load import Rulebook

log = logging.getLogger(__name__)
T = TypeVar("T")
READ_ENTRIES = 256
READ_ROWS = 32_768
HOUSEKEEPING_NS = 5 * 10**9
ARCHIVE_S = 0.1  # of a pass
# A checkpoint costs by the log that it moves, and what was written or changed since the last one lies unpacked in memory, up to four times
# as much: so it is made often, between two passes, where one of this length takes less than the pause is long.
LOG_BYTES = 32 << 20
_REMEDY = "free space on the disk of --data, or see the server's log; what was received waits in the journal and is stored then"


class Writer:
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
        self._store = store
        self._clock = clock
        self._profiles = Profiles(rulebook.engines)
        self._identifiers = Identifiers(rulebook.engines.values())
        self._archive = SpanArchive(data_dir)
        self._journal = data_dir / "journal"
        self._reader = JournalReader(self._journal)
        self._kept = KeptSegments(store, self._archive, data_dir / "journal", clock)
        self._around = Surroundings(
            store, self._reader, self._archive, self._profiles, attribute, stated, clock, Ledger()
        )
        self._lock = threading.RLock()
        self._housekept_ns = 0
        self._shorten_again_ns = 0  # not before, where it could not be done
        self._cutting: Iterator[bool] | None = None  # of closed segments that are being archived
        self._idle = False
        self.behind = False  # whether the last pass left something unread
        self._wrote = False
        self._guards = False
        self._write_error = ""
        self._scrapes: Callable[[], list[dict[str, object]]] = list
        self._sources: list[Callable[[], list[dict[str, object]]]] = []
        self._answers: Callable[[], list[dict[str, object]]] = list
        self._told: dict[str, Callable[[], object]] = {}
        self._commits = CommitLog(data_dir / WITNESS)
        self._losses: list[str] = []
        self._recover()
        self.report_loss(self._commits.missing())

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

    def add_spans(self, rows: pa.Table) -> int:
        """Spans of an import (SPAN_SCHEMA): settled, attributed and archived when this returns; how many requests more there
        are now."""
        with self._lock:
            return self._guarded(lambda: self._import_spans(rows))

    def add_samples(
        self,
        samples: pa.Table | pl.DataFrame | Iterable[Exposition],
    ) -> int:
        """Samples of an import (rows of `engine_samples`, or whole expositions with their settings): joined, and the rows of that time
        attributed anew when this returns; the number of new samples."""
        found = [] if isinstance(samples, pa.Table | pl.DataFrame) else list(samples)
        frame, known = samples_frame(found or samples)
        with self._lock:
            return self._guarded(lambda: self._add_samples(frame, known, found))

    def add_scrapes(self, found: Iterable[Exposition]) -> int:
        """What targets and devices say now: the rows of that time are attributed anew by the passes that follow; the number of new
        samples."""
        pages = list(found)
        frame, known = samples_frame(pages)

        def add() -> int:
            with self._writing() as (transaction, rows):
                count = rows.write_devices(pages) + rows.write_samples(frame, known)
                self._commits.add_own_rows(count)
                self._commit_state(transaction)
            return count

        with self._lock:
            return self._guarded(add)

    def add_requests(self, rows: pa.Table | pl.DataFrame) -> dict[str, int]:
        """Client records as rows of `requests`: they complete the rows of the calls they saw, or become rows themselves.

        Returns counts: matched, added.
        """
        frame = told_within(typed(frame_of(rows)))
        with self._lock:
            return self._guarded(lambda: self._import_requests(frame))

    def add_import(self, imported: Imported, mark: Mark | None = None) -> dict[str, int]:
        """Whatever a file held; counts of rows: spans, samples, matched, added, and of its lines: good, bad.

        All or nothing. mark: how far its file is read, stored with the rows.
        """

        def add() -> dict[str, int]:
            with self._store.write() as transaction:
                counts = self._add_import(imported, mark)
                if mark:
                    write_mark(transaction, mark)
            return counts

        with self._lock:
            return self._guarded(add)

    def import_position(self, identity: str) -> str:
        """How far a file is read, as the last mark said; "" for one that was never imported."""
        with self._lock:
            return position_of(self._store, identity)

    def _add_import(self, imported: Imported, mark: Mark | None) -> dict[str, int]:
        counts = dict(imported.counts)
        if imported.rows is not None and imported.rows.num_rows:
            source = f"{mark.identity}-{mark.position}" if mark else str(self._clock())
            counts[imported.table] = self._import_rows(imported.table, imported.rows, source.replace(":", "-"))
        if imported.spans is not None and imported.spans.num_rows:
            counts["requests"] = self.add_spans(imported.spans)
        if imported.metrics is not None and imported.metrics.num_rows:
            counts["samples"] = self.add_points(imported.metrics)
        if imported.samples:
            counts["samples"] = self.add_samples(imported.samples)
        if imported.requests is not None:
            counts |= self.add_requests(imported.requests)
        return counts

    def add_points(self, rows: pa.Table) -> int:
        """OTLP metric points of an import (METRIC_SCHEMA); the number of samples they made."""
        points = frame_of(rows)
        names = dict(identities(points["resource"]).select("resource", "instance").iter_rows())
        found, strange = samples_of_points(points, names, self._profiles)
        frame, settings = samples_frame(found)

        def add() -> int:
            self._memory.counters.add("metric_points", points.height)
            self._memory.counters.add("unmapped_metric_points", strange)
            return self._add_samples(frame, settings, found)

        with self._lock:
            return self._guarded(add)

    def add_facts(self, statements: Sequence[Statement], instance: str | None = None) -> dict[str, int]:
        """What files say of engine processes, kept under `instance`, else under the names that they give, else of the only process of
        that engine. Returns counts: facts (settings), processes. Raises InputError where nothing tells whose they are."""
        with self._lock:
            return self._guarded(lambda: self._add_facts(statements, instance))

    def add_answers(self, scrape: str, unix_ns: int, settings: Mapping[str, object]) -> None:
        """What the server behind a scrape answered about itself at that time."""

        def add() -> None:
            registry = self._memory.registry
            with self._writing() as (transaction, rows):
                if registry.see_scraped_settings(scrape, unix_ns, settings, "server_info"):  # asked once an hour
                    for name in registry.spans_of(scrape, unix_ns, unix_ns):
                        rows.touch_recent(name)
                self._commit_state(transaction)

        with self._lock:
            self._guarded(add)

    def annotate(self, marks: Iterable[Annotation]) -> None:
        """Marks on the time axis; the same mark twice is one."""

        def add() -> None:
            with self._writing() as (_, rows):
                rows.write_events(list(marks))

        with self._lock:
            self._guarded(add)

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

    def report_loss(self, text: str) -> None:
        """Something that was stored is not there any more: said in health and as a mark on the time axis."""
        if text:
            log.error("%s", text)
            self._losses.append(text)
            with contextlib.suppress(MachineError):  # where nothing can be written, health says both
                self.annotate([Annotation(unix_ns=self._clock(), kind="loss", text=text, source="store")])

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

    # --- state ------------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._guards:  # part of a work whose transaction commits at its end
            return work()
        if self._stale:
            self._recover()
        self._wrote = False
        self._guards = True
        try:
            done = work()
        except BaseException as error:
            self._stale = True  # what was rolled back must be neither counted nor taken for read
            if isinstance(error, Exception) and not isinstance(error, InputError):
                self._write_error = f"nothing can be stored: {type(error).__name__}: {error}"[:300]
            self._memory.counters.roll_back()
            with contextlib.suppress(Exception):  # where reading fails too, the next call tries again and says so
                self._recover()
            raise
        finally:
            self._guards = False
        if self._wrote:
            self._write_error = ""
            self._memory.counters.commit()
            self._commits.commit()
        return done

    def _recover(self) -> None:
        """Read memory from what is committed."""
        self._memory = recalled(self._around)
        self._commits.recall(self._memory.commit)
        self._stale = False  # otherwise memory must be read anew from the store

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[Transaction, RowWriter]]:
        with self._store.write() as transaction:
            yield transaction, RowWriter(self._around, self._identifiers, self._memory, transaction)

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

    def _unjoined_samples(self) -> int:
        return int(self._store.query("SELECT count(*) AS n FROM main.engine_samples WHERE NOT joined")["n"].item())

    # --- imports ----------------------------------------------------------------------------------------------------

    def _import_spans(self, received: pa.Table) -> int:
        now = self._clock()
        with self._writing() as (transaction, rows):
            counters = self._memory.counters
            admitted, known = counters.value("spans"), counters.value("requests")
            rows.take_spans(frame_of(received))
            own = pl.DataFrame({"trace_id": received["trace_id"].unique().to_pylist()}, schema={"trace_id": pl.String})
            due = self._memory.assembly.buffer.take_traces(own, now)
            settled = rows.settle(due, now, ended=True)
            rows.rejoin(now, force=True)
            attributed = self._memory.refresher.refresh(transaction, now, force=True)
            self._commits.add_own_rows(max(settled, attributed))
            if counters.value("spans") > admitted:
                self._archive.write(received.cast(SPAN_SCHEMA), f"import-{now}")
            self._finish_import(transaction)
            return counters.value("requests") - known

    def _add_samples(
        self, samples: pl.DataFrame, settings: list[SeenSettings], found: Iterable[Exposition] = ()
    ) -> int:
        now = self._clock()
        with self._writing() as (transaction, rows):
            devices = rows.write_devices(found)
            count = rows.write_samples(samples, settings) + devices
            self._commits.add_own_rows(count)
            if not samples.is_empty():  # a page of devices changes no row of requests
                rows.rejoin(now, force=True)
                parted = rows.apart(samples)
                for name in parted["instance"].unique():
                    rows.touch_sampled(name, parted.filter(pl.col("instance") == name))
                self._memory.refresher.refresh(transaction, now, force=True)
            self._finish_import(transaction)
        return count

    def _add_facts(self, statements: Sequence[Statement], instance: str | None) -> dict[str, int]:
        registry = self._memory.registry
        named = [(name, said) for said in statements for name in facts_names(registry, self._profiles, said, instance)]
        with self._writing() as (transaction, rows):
            for name, said in named:
                for spans in registry.see_statement(name, said):
                    rows.touch_recent(spans)
            self._commit_state(transaction)
        counts = {"facts": sum(len(said.settings) for said in statements), "processes": len(statements)}
        ignored = sum(said.ignored for said in statements)
        return counts | ({"other_arguments": ignored} if ignored else {})

    def _import_rows(self, table: str, rows: pa.Table, source: str) -> int:
        """Rows as another store held them: not judged again. Memory is read anew, since they may be of instances it knows."""
        with self._store.write() as transaction:
            if table in KINDS:
                column = KINDS[table]
                self._thaw(transaction, hours_touched(frame_of(rows), column, column, 0))
            if table == exchange.ROLLUPS:
                self._memory.dirty.rebuild_all(transaction)  # what is compared is up to date
                self._memory.dirty.store(transaction)
                count = exchange.insert_rollups(transaction, rows, self._clock())
            elif table == exchange.SPANS:
                new = self._around.ledger.admit(transaction, frame_of(rows)).spans
                # Only a part of them is new where others came before: that must not take the place of a file with more.
                name = source if new.height == rows.num_rows else f"{source}-{self._clock()}"
                self._archive.write(new.to_arrow().cast(SPAN_SCHEMA), f"import-{name}")
                count = new.height
            else:
                new = exchange.insert(transaction, table, rows)
                count = new.height
            if table == "requests":
                self._memory.dirty.add(new, self._clock())
                self._memory.dirty.rebuild_all(transaction)
                self._memory.dirty.store(transaction)
            self._commits.add_own_rows(count)
            self._number(transaction)
        self._stale = True
        return count

    def _import_requests(self, records: pl.DataFrame) -> dict[str, int]:
        now = self._clock()
        with self._store.write() as transaction:
            matched = match_records(transaction, self._identifiers, records)
            for changed in (matched.completed, matched.added):
                self._thaw(transaction, hours_touched(changed, "arrival_unix_ns", "finished_unix_ns", NEAR_NS))
            self._memory.watermarks.see(matched.added, now, ended=True)
            self._commits.add_own_rows(matched.added.height + matched.completed.height)
            whole = pl.concat([matched.completed, matched.added])
            self._memory.refresher.take(transaction, whole, matched.completed["request_key"].to_list(), now, ended=True)
            self._memory.refresher.refresh(transaction, now, force=True)
            self._finish_import(transaction)
        return {"matched": matched.completed.height, "added": matched.added.height}

    def _finish_import(self, transaction: Transaction) -> None:
        self._memory.dirty.rebuild_all(transaction)
        self._commit_state(transaction)

    # --- commit and upkeep ------------------------------------------------------------------------------------------

    def _commit_state(self, transaction: Transaction) -> None:
        """What memory knows goes with the rows it belongs to."""
        if self._write_error:  # a write of any kind tells whether writing works again
            transaction.execute("DELETE FROM positions WHERE name = 'tried'")
            transaction.execute("INSERT INTO positions VALUES ('tried', ?)", [str(self._clock())])
        self._memory.store(transaction)
        self._number(transaction)

    def _number(self, transaction: Transaction) -> None:
        self._wrote = True
        self._commits.store(transaction, self._clock(), str(self._memory.position or Position(0, 0)))

    def _thaw(self, transaction: Transaction, hours: set[int]) -> None:
        """Sealed hours that something late touches become hot again."""
        thaw(transaction, self._store.cold_directory, hours, self._clock())

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
