"""Spans between receipt and row: traces that are still coming in, and those settled lately, whose late spans come soonest.

A trace settles one second after its last span; at once where its request is one span. Child spans whose request span has not
come wait for it, up to `ROOT_WAIT_NS`; after that the archive keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from phasewise.collector.records import SPAN_SCHEMA

SETTLE_NS = 10**9
ROOT_WAIT_NS = 600 * 10**9
RECENT_NS = 120 * 10**9
OPEN_SPANS = 1_000_000
RECENT_SPANS, RECENT_BYTES = 300_000, 64 << 20


def buffered_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    """Columns of a span in the buffer: as received, classified, and the number of the journal entry it came with."""
    empty = pl.from_arrow(SPAN_SCHEMA.empty_table())
    assert isinstance(empty, pl.DataFrame)
    return {**empty.schema, "profile": pl.String, "role": pl.String, "at_once": pl.Boolean, "entry": pl.Int64}


@dataclass(frozen=True, slots=True)
class _Settled:
    """Spans that settled together; when the last of them was received."""

    newest_unix_ns: int
    spans: pl.DataFrame

    @property
    def bytes(self) -> int:
        return int(self.spans.estimated_size())


@dataclass(slots=True)
class TraceBuffer:
    """open: spans not settled; evicted: how many traces had to be given up. A trace is either open or among those settled lately."""

    open: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=buffered_schema()))
    evicted: int = 0
    _recent: list[_Settled] = field(default_factory=list)  # the oldest first

    def add(self, spans: pl.DataFrame, late: pl.DataFrame) -> None:
        """New spans; settled traces that go on (`late`: their trace_id) are open again, with all their spans."""
        self.open = pl.concat([self.open, *self._taken_back(self._not_open(late)), spans])

    def missing(self, trace_ids: pl.DataFrame) -> list[str]:
        """Of some traces (column trace_id) those of which nothing is held."""
        wanted = self._not_open(trace_ids)
        for one in self._recent if len(wanted) else ():
            wanted = wanted.filter(~wanted.is_in(one.spans["trace_id"].implode()))
        return wanted.to_list()

    def take_due(self, settled_before_unix_ns: int, now_unix_ns: int) -> pl.DataFrame:
        """Spans of the traces that settle now; they are kept in mind for a while.

        settled_before_unix_ns: a trace whose last span was received before that is complete as far as we know.
        """
        if self.open.is_empty():
            self._keep_recent(self.open, now_unix_ns)
            return self.open
        traces = self.open.group_by("trace_id").agg(
            pl.col("received_unix_ns").max().alias("last"),
            pl.col("at_once").any(),
            pl.col("role").is_in(["engine", "client"]).any().alias("_has_call"),
            (pl.col("role") == "part").any().alias("_has_part"),
        )
        waits_for_root = pl.col("_has_part") & ~pl.col("_has_call")
        complete = (pl.col("last") <= settled_before_unix_ns) & ~waits_for_root
        given_up = pl.col("last") <= now_unix_ns - ROOT_WAIT_NS
        due = traces.filter(pl.col("at_once") | complete | given_up).select("trace_id")
        taken = self._taken(due, now_unix_ns) if due.height < traces.height else self._all(now_unix_ns)
        self._limit_open()
        return taken

    def take_traces(self, traces: pl.DataFrame, now_unix_ns: int) -> pl.DataFrame:
        """Spans of these traces (column trace_id), settled now whatever may follow."""
        return self._taken(traces, now_unix_ns)

    def open_entries(self) -> list[int]:
        """Numbers of the journal entries that open spans came with."""
        return self.open["entry"].drop_nulls().unique().to_list()

    def _all(self, now_unix_ns: int) -> pl.DataFrame:
        taken = self.open.with_columns(pl.lit(False).alias("at_once"))
        self.open = self.open.clear()
        self._keep_recent(taken, now_unix_ns)
        return taken

    def _taken(self, traces: pl.DataFrame, now_unix_ns: int) -> pl.DataFrame:
        chosen = self.open["trace_id"].is_in(traces["trace_id"].implode())
        taken = self.open.filter(chosen).with_columns(pl.lit(False).alias("at_once"))
        self.open = self.open.filter(~chosen)
        self._keep_recent(taken, now_unix_ns)
        return taken

    def _not_open(self, traces: pl.DataFrame) -> pl.Series:
        wanted = traces["trace_id"]
        return wanted.filter(~wanted.is_in(self.open["trace_id"].implode())) if len(wanted) else wanted

    def _taken_back(self, traces: pl.Series) -> list[pl.DataFrame]:
        """Spans of settled traces, which are not settled any more."""
        back, kept = [], []
        for one in self._recent:
            again = one.spans["trace_id"].is_in(traces.implode()) if len(traces) else None
            if again is None or not again.any():
                kept.append(one)
                continue
            back.append(one.spans.filter(again))
            kept.append(_Settled(one.newest_unix_ns, one.spans.filter(~again)))
        self._recent = kept
        return back

    def _keep_recent(self, taken: pl.DataFrame, now_unix_ns: int) -> None:
        """Whole groups are forgotten, not span by span: all that is kept would have to be copied again and again."""
        self._recent = [one for one in self._recent if one.newest_unix_ns > now_unix_ns - RECENT_NS]
        newest = taken["received_unix_ns"].max()
        if isinstance(newest, int):
            self._recent.append(_Settled(newest, taken.tail(RECENT_SPANS)))
        count, size = sum(one.spans.height for one in self._recent), sum(one.bytes for one in self._recent)
        while count > RECENT_SPANS or size > RECENT_BYTES:
            oldest = self._recent.pop(0)
            count, size = count - oldest.spans.height, size - oldest.bytes

    def _limit_open(self) -> None:
        """Over the limit the oldest spans are let go: their traces come back from the archive when they go on."""
        surplus = self.open.height - OPEN_SPANS
        if surplus > 0:
            oldest = self.open.head(surplus).select("trace_id").unique()
            self.evicted += oldest.height
            self.open = self.open.join(oldest, on="trace_id", how="anti")
