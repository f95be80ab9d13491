"""The one writer of the store: journal to rows, attribution, commit.

A pass reads what the receiver acknowledged, leaves out what came before, settles traces, makes rows, attributes what is new or
changed, and commits rows and journal position in one transaction: a crash replays exactly once. Whatever fails inside a pass is
rolled back, and the next pass starts from what is committed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import polars as pl
import pyarrow as pa

from phasewise.collector import exchange, ledger, rollups
from phasewise.collector.archive import SpanArchive
from phasewise.collector.assembly import Assembly
from phasewise.collector.attribution import typed
from phasewise.collector.buffer import SETTLE_NS
from phasewise.collector.client_records import match_records
from phasewise.collector.completion import NEAR_NS, Identifiers
from phasewise.collector.context import Attribute
from phasewise.collector.counters import Counters
from phasewise.collector.device_table import add_devices, error_marks
from phasewise.collector.exposition import Exposition, samples_of_points
from phasewise.collector.facts import Statement
from phasewise.collector.frames import SeenSettings, devices_frame, frame_of, samples_frame
from phasewise.collector.identity import identities
from phasewise.collector.import_marks import Mark, position_of, write_mark
from phasewise.collector.importers import Imported
from phasewise.collector.journal import Entry, JournalReader, Position
from phasewise.collector.normalize import startup_events
from phasewise.collector.phases import told_within
from phasewise.collector.places import Places
from phasewise.collector.profiles import Profiles
from phasewise.collector.recordings import note_recordings
from phasewise.collector.records import SPAN_SCHEMA, Annotation
from phasewise.collector.refresher import Refresher
from phasewise.collector.registry import Registry, facts_names
from phasewise.collector.request_table import changes_of, delete_rows, replace_turns
from phasewise.collector.restarts import Restarts
from phasewise.collector.sample_table import add_samples, deviations, mark_joined
from phasewise.collector.steps import steps_of
from phasewise.collector.store import Store, Transaction
from phasewise.collector.watermarks import FUTURE_NS, Watermarks
from phasewise.rules.errors import InputError
from phasewise.rules.load import Rulebook

T = TypeVar("T")
READ_ENTRIES = 256
READ_ROWS = 32_768
HOUSEKEEPING_NS = 5 * 10**9
REJOIN_NS = 5 * 10**9
REJOINED_NS = 6 * 3600 * 10**9  # a join that came late is of use for the last hours
SAMPLE_GAP_NS = 30 * 10**9
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
        self._stated = stated
        self._profiles = Profiles(rulebook.engines)
        self._identifiers = Identifiers(rulebook.engines.values())
        self._attribute = attribute
        self._archive = SpanArchive(data_dir)
        self._reader = JournalReader(data_dir / "journal")
        self._lock = threading.RLock()
        self._housekept_ns = 0
        self._stale = True  # memory must be read anew from the store
        self._wrote = False
        self._write_error = ""
        self._scrapes: Callable[[], list[dict[str, object]]] = list
        self._sources: list[Callable[[], list[dict[str, object]]]] = []
        self._answers: Callable[[], list[dict[str, object]]] = list
        self._recover()

    # --- what others call -------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One pass over the journal; the number of rows written. Raises MachineError while the store does not answer."""
        with self._lock:
            changes = self._guarded(self._pass)
            if self._clock() - self._housekept_ns > HOUSEKEEPING_NS:
                self._guarded(self._housekeeping)
            return changes

    def add_spans(self, rows: pa.Table) -> int:
        """Spans of an import (SPAN_SCHEMA): settled, attributed and archived when this returns; rows written."""
        with self._lock:
            return self._guarded(lambda: self._import_spans(rows))

    def add_samples(
        self,
        samples: pa.Table | pl.DataFrame | Iterable[Exposition],
    ) -> int:
        """Samples (rows of `engine_samples`, or whole expositions with their settings): joined, and the rows of that time
        attributed anew when this returns; the number of new samples."""
        found = [] if isinstance(samples, pa.Table | pl.DataFrame) else list(samples)
        frame, known = samples_frame(found or samples)
        with self._lock:
            return self._guarded(lambda: self._add_samples(frame, known, found))

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
            self._counters.add("metric_points", points.height)
            self._counters.add("unmapped_metric_points", strange)
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
            with self._store.write() as transaction:
                self._registry.see_scraped_settings(scrape, unix_ns, settings, "server_info")
                for name in self._registry.spans_of(scrape, unix_ns, unix_ns):
                    self._touch_recent(name)
                self._commit_state(transaction)

        with self._lock:
            self._guarded(add)

    def annotate(self, marks: Iterable[Annotation]) -> None:
        """Marks on the time axis; the same mark twice is one."""

        def add() -> None:
            with self._store.write() as transaction:
                self._write_events(transaction, list(marks))

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

    def health(self) -> dict[str, object]:
        """What data health shows: counters, unmapped spans, watermarks, unjoined samples, journal position and lag."""
        with self._lock:
            now = self._clock()
            return {
                "write_error": self._write_error,
                "remedy": _REMEDY if self._write_error else "",
                "scrapes": self._scrapes(),
                "scrape_sources": [one for sources in self._sources for one in sources()],
                "engine_answers": self._answers(),
                "counters": self._counters.named(),
                "unmapped": self._counters.labels("unmapped_spans"),
                "watermarks": {k: v for k, v in self._watermarks.all(now).items() if abs(v) < 2**61},
                "instances": len(self._registry),
                "unjoined_samples": self._unjoined_samples(),
                "journal": {
                    "position": str(self._position) if self._position else None,
                    "lag_bytes": self._reader.lag_bytes(self._position),
                    "archived_segment": self._archive.archived_segment(),
                    **self._reader.counters,
                },
                "open_spans": self._assembly.buffer.open.height,
                "evicted_traces": self._assembly.buffer.evicted,
                "waiting_for_attribution": self._refresher.waiting,
                "attribution_error": self._refresher.last_error,
                "store": self._store.broken or "ok",
            }

    # --- state ------------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._stale:
            self._recover()
        self._wrote = False
        try:
            done = work()
        except BaseException as error:
            self._stale = True  # what was rolled back must be neither counted nor taken for read
            if isinstance(error, Exception) and not isinstance(error, InputError):
                self._write_error = f"nothing can be stored: {type(error).__name__}: {error}"[:300]
            self._counters.roll_back()
            with contextlib.suppress(Exception):  # where reading fails too, the next call tries again and says so
                self._recover()
            raise
        if self._wrote:
            self._write_error = ""
            self._counters.commit()
        return done

    def _recover(self) -> None:
        """Read memory from what is committed; spans that had not settled are read from the journal again."""
        now = self._clock()
        positions = {
            r["name"]: str(r["position"]) for r in self._store.query("SELECT * FROM positions").iter_rows(named=True)
        }
        self._position = Position.parse(positions["journal"]) if "journal" in positions else None
        self._counters = Counters(self._store.query("SELECT * FROM counters"))
        self._registry = Registry(self._store.query("SELECT * FROM instances"), self._stated)
        self._watermarks = Watermarks()
        hour = self._store.query(
            "SELECT instance, finished_unix_ns, e2e_s FROM requests WHERE finished_unix_ns <= ? AND finished_unix_ns > "
            "(SELECT max(finished_unix_ns) FROM requests WHERE finished_unix_ns <= ?) - ?",
            [now + FUTURE_NS, now + FUTURE_NS, 3600 * 10**9],
        )
        self._watermarks.see(hour, now)
        self._rejoined_ns = 0
        self._restarts, self._places = Restarts(), Places()
        self._refresher = Refresher(self._attribute, self._registry, self._watermarks, self._counters)
        self._refresher.recall(self._store)
        self._assembly = Assembly(self._profiles, self._archive, self._counters, self._clock)
        if "open_from" in positions and self._position is not None:
            self._assembly.reload(self._reader, Position.parse(positions["open_from"]), self._position)
        self._stale = False

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _pass(self) -> int:
        entries = self._reader.read(self._position, READ_ENTRIES, READ_ROWS)
        now = self._clock()
        changes = 0
        with self._store.write() as transaction:
            newest = self._take(transaction, entries)
            drained = len(entries) < READ_ENTRIES and sum(e.rows.num_rows for e in entries) < READ_ROWS
            settled_before = now - SETTLE_NS if drained or not newest else newest - SETTLE_NS
            due = self._assembly.buffer.take_due(settled_before, now)
            self._settle(transaction, due, now)
            self._rejoin(transaction, now)
            changes += self._refresher.refresh(transaction, now)
            if entries or changes or not due.is_empty() or self._write_error:
                self._commit_state(transaction)
        return changes

    def _take(self, transaction: Transaction, entries: list[Entry]) -> int:
        """Spans and metric points of journal entries into memory; the newest time of receipt among them."""
        spans = []
        for entry in entries:
            number = self._assembly.next_entry(self._position)
            self._position = entry.position
            frame = frame_of(entry.rows)
            if entry.kind == "spans":
                spans.append(frame.with_columns(pl.lit(number, dtype=pl.Int64).alias("entry")))
            else:
                self._take_points(transaction, frame)
        if not spans:
            return 0
        received = pl.concat(spans)
        self._take_spans(transaction, received)
        newest = received["received_unix_ns"].max()
        return int(newest) if isinstance(newest, int) else 0

    def _take_spans(self, transaction: Transaction, received: pl.DataFrame) -> None:
        new, named = self._assembly.take(transaction, received)
        note_recordings(transaction, new)
        self._places.see_resources(transaction, new["resource"])
        if not named.is_empty():
            self._write_steps(transaction, named.filter(pl.col("role") == "steps"))
            self._write_events(transaction, startup_events(named))

    def _settle(self, transaction: Transaction, due: pl.DataFrame, now: int, ended: bool = False) -> None:
        """Rows out of whole traces, written and marked for attribution."""
        if due.is_empty():
            return
        made = self._assembly.rows_of(due)
        branched = due.filter(pl.col("parent_span_id").is_not_null()).select("trace_id").unique()
        if not branched.is_empty():
            replace_turns(transaction, branched, made.turns)
        changes = changes_of(transaction, self._identifiers, made.requests, made.supplements, made.superseded)
        if changes.gone:
            self._delete(transaction, changes.gone, due)
        past = changes.rows.filter(pl.col("finished_unix_ns") <= now + FUTURE_NS)
        self._registry.see_requests(past)
        for instance, settings in made.settings:
            self._registry.see_settings(instance, settings, "resource")
        self._watermarks.see(past, now, ended)
        self._refresher.take(changes.rows)
        self._counters.add("requests", changes.rows.filter(pl.col("revision").is_null()).height)

    def _delete(self, transaction: Transaction, keys: list[str], spans: pl.DataFrame) -> None:
        low, high = spans["start_unix_ns"].min(), spans["end_unix_ns"].max()
        assert isinstance(low, int) and isinstance(high, int)
        gone = pl.DataFrame({"request_key": keys}, schema={"request_key": pl.String})
        delete_rows(transaction, gone, low - NEAR_NS, high + NEAR_NS)
        self._refresher.forget(keys)

    def _take_points(self, transaction: Transaction, points: pl.DataFrame) -> None:
        names = dict(identities(points["resource"]).select("resource", "instance").iter_rows())
        found, strange = samples_of_points(points, names, self._profiles)
        self._counters.add("metric_points", points.height)
        self._counters.add("unmapped_metric_points", strange)
        frame, settings = samples_frame(found)
        self._write_samples(transaction, frame, settings)
        self._write_devices(transaction, found)

    def _write_steps(self, transaction: Transaction, spans: pl.DataFrame) -> None:
        steps, broken = steps_of(spans)
        self._counters.add("broken_step_spans", broken)
        self._counters.add("steps", steps.height)
        transaction.insert("engine_steps", steps)

    def _write_events(self, transaction: Transaction, marks: list[Annotation]) -> None:
        if not marks:
            return
        frame = pl.DataFrame(
            [(m.unix_ns, m.kind, m.text, m.source) for m in marks],
            schema={"unix_ns": pl.Int64, "kind": pl.String, "text": pl.String, "source": pl.String},
            orient="row",
        )
        transaction.run(
            "INSERT INTO annotations BY NAME SELECT DISTINCT * FROM marks m WHERE NOT EXISTS (SELECT 1 FROM annotations a "
            "WHERE a.unix_ns = m.unix_ns AND a.kind = m.kind AND a.text = m.text)",
            marks=frame,
        )

    # --- samples ----------------------------------------------------------------------------------------------------

    def _write_samples(self, transaction: Transaction, samples: pl.DataFrame, settings: list[SeenSettings]) -> int:
        parted = self._registry.apart(transaction, samples)
        names = dict(zip(samples.select("instance", "unix_ns").iter_rows(), parted["instance"], strict=True))
        new = add_samples(transaction, parted)
        self._write_events(transaction, self._restarts.marks(transaction, new))
        if new.is_empty() and not settings:
            return 0
        past = new.filter(pl.col("unix_ns") <= self._clock() + FUTURE_NS)
        self._counters.add("future_samples", new.height - past.height)
        self._registry.see_samples(past)
        for instance, unix_ns, values in settings:
            self._registry.see_scraped_settings(names.get((instance, unix_ns), instance), unix_ns, values)
        self._counters.add("samples", new.height)
        for (name,), own in past.group_by("instance"):
            self._touch_sampled(str(name), own)
        return new.height

    def _write_devices(self, transaction: Transaction, found: Iterable[Exposition]) -> int:
        """Readings of devices, and where the targets stand that told them."""
        own = list(found)
        for one in own:
            if not one.samples.is_empty():
                self._places.see_labels(transaction, str(one.samples["instance"][0]), one.labels)
        new = add_devices(transaction, devices_frame(own))
        self._counters.add("device_readings", new.height)
        self._write_events(transaction, error_marks(transaction, new))
        return new.height

    def _touch_sampled(self, name: str, samples: pl.DataFrame) -> None:
        """Rows of the time these samples tell of: since the sample before them, a scrape interval or two."""
        first, last = samples["unix_ns"].min(), samples["unix_ns"].max()
        assert isinstance(first, int) and isinstance(last, int)
        for instance in self._registry.spans_of(name, first - SAMPLE_GAP_NS, last):
            self._refresher.touch(instance, first - SAMPLE_GAP_NS, last)

    def _rejoin(self, transaction: Transaction, now: int, force: bool = False) -> None:
        """Join spans and scrapes anew where instances came, or after a while; rows of new joins are attributed anew."""
        if not (force or self._registry.has_new or now - self._rejoined_ns > REJOIN_NS):
            return
        self._rejoined_ns = now
        changed = self._registry.join(self._profiles.family, deviations(transaction, self._refresher.fresh))
        for instance in changed:
            self._touch_recent(instance)
        mark_joined(transaction, self._registry.unnamed(self._profiles.family))

    def _touch_recent(self, instance: str) -> None:
        """What is known of an engine only now is of use for its last hours."""
        low, high = self._registry.sampled_range(instance)
        self._refresher.touch(instance, max(low, high - REJOINED_NS), high)

    def _add_facts(self, statements: Sequence[Statement], instance: str | None) -> dict[str, int]:
        named = [
            (name, said) for said in statements for name in facts_names(self._registry, self._profiles, said, instance)
        ]
        with self._store.write() as transaction:
            for name, said in named:
                for spans in self._registry.see_statement(name, said):
                    self._touch_recent(spans)
            self._commit_state(transaction)
        counts = {"facts": sum(len(said.settings) for said in statements), "processes": len(statements)}
        ignored = sum(said.ignored for said in statements)
        return counts | ({"other_arguments": ignored} if ignored else {})

    def _unjoined_samples(self) -> int:
        return int(self._store.query("SELECT count(*) AS n FROM engine_samples WHERE NOT joined")["n"].item())

    # --- imports ----------------------------------------------------------------------------------------------------

    def _import_spans(self, rows: pa.Table) -> int:
        now = self._clock()
        with self._store.write() as transaction:
            admitted = self._counters.value("spans")
            self._take_spans(transaction, frame_of(rows))
            own = pl.DataFrame({"trace_id": rows["trace_id"].unique().to_pylist()}, schema={"trace_id": pl.String})
            due = self._assembly.buffer.take_traces(own, now)
            self._settle(transaction, due, now, ended=True)
            self._rejoin(transaction, now, force=True)
            changes = self._refresher.refresh(transaction, now, force=True)
            if self._counters.value("spans") > admitted:
                self._archive.write(rows.cast(SPAN_SCHEMA), f"import-{now}")
            self._commit_state(transaction)
            rollups.rebuild(transaction, self._refresher.take_minutes(self._clock()))
        return changes

    def _import_rows(self, table: str, rows: pa.Table, source: str) -> int:
        """Rows as another store held them: not judged again. Memory is read anew, since they may be of instances it knows."""
        with self._store.write() as transaction:
            if table == exchange.SPANS:
                new = ledger.admit(transaction, frame_of(rows)).spans
                self._archive.write(new.to_arrow().cast(SPAN_SCHEMA), f"import-{source}")
            else:
                new = exchange.insert(transaction, table, rows)
            if table == "requests":
                rollups.rebuild(transaction, rollups.minutes_of(new))
            self._wrote = True
        self._stale = True
        return new.height

    def _add_samples(
        self, samples: pl.DataFrame, settings: list[SeenSettings], found: Iterable[Exposition] = ()
    ) -> int:
        now = self._clock()
        with self._store.write() as transaction:
            devices = self._write_devices(transaction, found)
            count = self._write_samples(transaction, samples, settings) + devices
            if not samples.is_empty():  # a page of devices changes no row of requests
                self._rejoin(transaction, now, force=True)
                parted = self._registry.apart(transaction, samples)
                for name in parted["instance"].unique():
                    self._touch_sampled(name, parted.filter(pl.col("instance") == name))
                self._refresher.refresh(transaction, now, force=True)
            self._commit_state(transaction)
            rollups.rebuild(transaction, self._refresher.take_minutes(self._clock()))
        return count

    def _import_requests(self, records: pl.DataFrame) -> dict[str, int]:
        now = self._clock()
        with self._store.write() as transaction:
            matched = match_records(transaction, self._identifiers, records)
            self._watermarks.see(matched.added, now, ended=True)
            self._refresher.take(pl.concat([matched.completed, matched.added]))
            self._refresher.refresh(transaction, now, force=True)
            self._commit_state(transaction)
            rollups.rebuild(transaction, self._refresher.take_minutes(self._clock()))
        return {"matched": matched.completed.height, "added": matched.added.height}

    # --- commit and upkeep ------------------------------------------------------------------------------------------

    def _commit_state(self, transaction: Transaction) -> None:
        """Positions, counters and instances go with the rows they belong to."""
        if self._write_error:  # a write of any kind tells whether writing works again
            transaction.execute("DELETE FROM positions WHERE name = 'tried'")
            transaction.execute("INSERT INTO positions VALUES ('tried', ?)", [str(self._clock())])
        self._wrote = True
        self._registry.store(transaction)
        self._counters.store(transaction)
        if self._position is None:
            return
        start = self._assembly.open_from(self._position)
        transaction.execute("DELETE FROM positions WHERE name IN ('journal', 'open_from')")
        transaction.execute("INSERT INTO positions VALUES ('journal', ?)", [str(self._position)])
        transaction.execute("INSERT INTO positions VALUES ('open_from', ?)", [str(start)])

    def _housekeeping(self) -> None:
        self._housekept_ns = self._clock()
        with self._store.write() as transaction:
            rollups.rebuild(transaction, self._refresher.take_minutes(self._clock()))
            ledger.prune(transaction)
        if self._position is None:
            return
        self._archive.cut(self._position)
        open_from = self._store.query("SELECT position FROM positions WHERE name = 'open_from'")
        keep = min(Position.parse(open_from["position"].item()), Position(self._archive.archived_segment() + 1, 0))
        self._reader.drop_before(keep)
