"""Spans to whole traces: what came before is left out, what is late brings its trace back, what is complete is handed on.

Knows where in the journal reading has to begin again so that no open trace is lost, and turns whole traces into rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import polars as pl
import pyarrow as pa

from phasewise.collector.archive import SpanArchive
from phasewise.collector.buffer import TraceBuffer
from phasewise.collector.counters import Counters
from phasewise.collector.frames import frame_of
from phasewise.collector.identity import identities
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.ledger import Ledger
from phasewise.collector.normalize import Normalized, normalize, unmapped_counts
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.transaction import Transaction

log = logging.getLogger(__name__)
DAY_NS = 86_400 * 10**9
_BY_THEMSELVES = ["steps", "startup"]  # roles of spans that are no part of any trace's rows


class Assembly:
    """Open traces, and the journal entries they came with."""

    def __init__(
        self, profiles: Profiles, archive: SpanArchive, counters: Counters, clock: Callable[[], int], ledger: Ledger
    ) -> None:
        self._profiles = profiles
        self._ledger = ledger
        self._archive = archive
        self._counters = counters
        self._clock = clock
        self.buffer = TraceBuffer()
        self._entry_starts: dict[int, Position | None] = {}
        self._entries = 0

    def next_entry(self, start: Position | None) -> int:
        """Number of the journal entry that is read from `start`."""
        self._entries += 1
        self._entry_starts[self._entries] = start
        return self._entries

    def open_from(self, position: Position) -> Position:
        """Where reading has to begin again to see a span of every open trace; `position` when none is open.

        A trace that goes on after it had settled is open again with its earlier spans, whose entries nobody kept in mind: the
        late span that brought it back stands for it, and `reload` gathers the others from the archive.
        """
        first = min((n for n in self.buffer.open_entries() if n in self._entry_starts), default=None)
        start = self._entry_starts[first] if first is not None else position
        for number in [n for n in self._entry_starts if first is None or n < first]:
            del self._entry_starts[number]
        return start or Position(0, 0)

    def reload(self, reader: JournalReader, start: Position, end: Position) -> None:
        """Traces that were open at the last commit, whole; settling them again gives the rows that are there already."""
        tables, position = [], start
        while position < end and (entries := reader.read(position)):
            tables += [e.rows.select(["trace_id"]) for e in entries if e.kind == "spans" and e.position <= end]
            position = entries[-1].position
        if not tables:
            return
        traces = pa.concat_tables(tables)["trace_id"].unique().to_pylist()
        number = self.next_entry(start)
        spans = self._traced(self._classified(frame_of(self._archive.traces(traces)), number))
        self.buffer.add(spans, spans.select("trace_id").clear())

    def take(self, transaction: Transaction, received: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Take spans in; `received` has the number of its journal entry as `entry` (imports have none).

        Returns the new spans among them, and of these the engine steps and start-up spans, with their instance.
        """
        admitted = self._ledger.admit(transaction, received)
        self._counters.add("spans", admitted.spans.height)
        self._counters.add("duplicate_spans", admitted.duplicates)
        self._counters.add("conflicting_duplicate", admitted.conflicts)
        spans = self._classified(admitted.spans, self._entries)
        for label, count in unmapped_counts(spans).items():
            self._counters.add("unmapped_spans", count, label)
        traced = own = self._traced(spans)
        late = admitted.late
        if not late.is_empty():
            late = late.join(traced.select("trace_id").unique(), on="trace_id", how="semi")
        if forgotten := self.buffer.missing(late):
            traced = self._with_archived(traced, forgotten)
        self.buffer.add(traced, late)
        named = spans.filter(pl.col("role").is_in(_BY_THEMSELVES)) if own.height < spans.height else spans.clear()
        if not named.is_empty():
            named = named.join(identities(named["resource"]), on="resource", how="left", maintain_order="left")
        return admitted.spans, named

    def rows_of(self, due: pl.DataFrame) -> Normalized:
        """Rows of whole traces. A trace that breaks the rules' arithmetic is left out and counted: it may not hold up the rest."""
        spans = _each_once(due.drop("at_once", "entry"))
        try:
            return normalize(spans, self._profiles)
        except Exception:
            log.exception("%d spans cannot be normalized together; each trace is tried alone", spans.height)
        good = []
        for (trace_id,), own in spans.group_by("trace_id", maintain_order=True):
            try:
                normalize(own, self._profiles)
                good.append(own)
            except Exception as error:
                self._counters.add("broken_traces", 1)
                log.error("trace %s is left out: %s: %s", trace_id, type(error).__name__, error)
        return normalize(pl.concat(good) if good else spans.clear(), self._profiles)

    def _classified(self, spans: pl.DataFrame, entry: int) -> pl.DataFrame:
        spans = self._profiles.classify(spans)
        single = [p.id for p in self._profiles.ordered if p.role == "engine" and p.settle == "span"]
        at_once = (pl.col("role") == "engine") & pl.col("profile").is_in(single)
        if "entry" not in spans.columns:
            spans = spans.with_columns(pl.lit(entry, dtype=pl.Int64).alias("entry"))
        return spans.with_columns(at_once.fill_null(False).alias("at_once"))

    @staticmethod
    def _traced(spans: pl.DataFrame) -> pl.DataFrame:
        """Spans that wait for their trace, in the buffer's columns."""
        columns = [*SPAN_SCHEMA.names, "profile", "role", "at_once", "entry"]
        others = spans["role"].is_in(_BY_THEMSELVES)
        return (spans.filter(~others) if others.any() else spans).select(columns)

    def _with_archived(self, spans: pl.DataFrame, trace_ids: list[str]) -> pl.DataFrame:
        """Late spans with the earlier ones of their traces, which are in no buffer any more."""
        self._counters.add("reopened_traces", len(trace_ids))
        stored = frame_of(self._archive.traces(trace_ids, self._clock() - DAY_NS))
        earlier = self._traced(self._classified(stored, self._entries))
        return _each_once(pl.concat([spans, earlier]))


def _each_once(spans: pl.DataFrame) -> pl.DataFrame:
    """The first of each (trace_id, span_id); most spans are there once, and to copy all of them is dear."""
    ids = ["trace_id", "span_id"]
    repeated = spans.select(pl.struct(ids).is_duplicated().any()).item()
    return spans.unique(ids, keep="first", maintain_order=True) if repeated else spans
