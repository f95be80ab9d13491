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
RECENT_SPANS = 300_000


def buffered_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    """Columns of a span in the buffer: as received, classified, and the number of the journal entry it came with."""
    empty = pl.from_arrow(SPAN_SCHEMA.empty_table())
    assert isinstance(empty, pl.DataFrame)
    return {**empty.schema, "profile": pl.String, "role": pl.String, "at_once": pl.Boolean, "entry": pl.Int64}


@dataclass(slots=True)
class TraceBuffer:
    """open: spans not settled; recent: spans of settled traces; counters: what had to be given up."""

    open: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=buffered_schema()))
    recent: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=buffered_schema()))
    evicted: int = 0

    def add(self, spans: pl.DataFrame, late: pl.DataFrame) -> None:
        """New spans; settled traces that go on (`late`: their trace_id) are open again, with all their spans."""
        back = self.recent.join(late, on="trace_id", how="semi")
        if not back.is_empty():
            self.recent = self.recent.join(late, on="trace_id", how="anti")
        self.open = pl.concat([self.open, back, spans])

    def missing(self, trace_ids: pl.DataFrame) -> list[str]:
        """Of some traces (column trace_id) those of which nothing is held."""
        held = pl.concat([self.open.select("trace_id"), self.recent.select("trace_id")])
        return trace_ids.join(held, on="trace_id", how="anti")["trace_id"].to_list()

    def take_due(self, settled_before_unix_ns: int, now_unix_ns: int) -> pl.DataFrame:
        """Spans of the traces that settle now; they move to `recent`.

        settled_before_unix_ns: a trace whose last span was received before that is complete as far as we know.
        """
        if self.open.is_empty():
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
        taken = self.take_traces(due, now_unix_ns)
        self._limit_open()
        return taken

    def take_traces(self, traces: pl.DataFrame, now_unix_ns: int) -> pl.DataFrame:
        """Spans of these traces (column trace_id), settled now whatever may follow."""
        taken = self.open.join(traces, on="trace_id", how="semi").with_columns(pl.lit(False).alias("at_once"))
        self.open = self.open.join(traces, on="trace_id", how="anti")
        self._keep_recent(taken, now_unix_ns)
        return taken

    def open_entries(self) -> list[int]:
        """Numbers of the journal entries that open spans came with."""
        return self.open["entry"].drop_nulls().unique().to_list()

    def _keep_recent(self, taken: pl.DataFrame, now_unix_ns: int) -> None:
        if taken.is_empty() and self.recent.is_empty():
            return
        young = self.recent.filter(pl.col("received_unix_ns") > now_unix_ns - RECENT_NS)
        self.recent = pl.concat([young, taken]).tail(RECENT_SPANS)

    def _limit_open(self) -> None:
        """Over the limit the oldest spans are let go: their traces come back from the archive when they go on."""
        surplus = self.open.height - OPEN_SPANS
        if surplus > 0:
            oldest = self.open.head(surplus).select("trace_id").unique()
            self.evicted += oldest.height
            self.open = self.open.join(oldest, on="trace_id", how="anti")
