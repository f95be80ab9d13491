"""What comes by another way than the journal: files, uploads, scrapes, and what engines answer of themselves. When a call returns, what it
brought is committed, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl
import pyarrow as pa

from phasewise.collector import exchange
from phasewise.collector.attribution import typed
from phasewise.collector.client_records import match_records
from phasewise.collector.cold import hours_touched
from phasewise.collector.committed_work import CommittedWork
from phasewise.collector.completion import NEAR_NS
from phasewise.collector.exposition import Exposition, samples_of_points
from phasewise.collector.facts import Statement
from phasewise.collector.frames import SeenSettings, frame_of, samples_frame
from phasewise.collector.identity import identities
from phasewise.collector.import_marks import Mark, position_of, write_mark
from phasewise.collector.importers import Imported
from phasewise.collector.lake import KINDS
from phasewise.collector.phases import told_within
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.registry import facts_names
from phasewise.collector.transaction import Transaction


class Imports(CommittedWork):
    """Inherits, because an import and a pass over the journal are work of one writer on one memory, and take turns."""

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

    def add_requests(self, rows: pa.Table | pl.DataFrame) -> dict[str, int]:
        """Client records as rows of `requests`: they complete the rows of the calls they saw, or become rows themselves.

        Returns counts: matched, added.
        """
        frame = told_within(typed(frame_of(rows)))
        with self._lock:
            return self._guarded(lambda: self._import_requests(frame))

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

    def _finish_import(self, transaction: Transaction) -> None:
        self._memory.dirty.rebuild_all(transaction)
        self._commit_state(transaction)
