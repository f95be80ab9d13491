"""Spans between receipt and row: traces that are still coming in, and those settled lately, whose late spans come soonest.

A trace settles one second after its last span; at once where its request is one span. Child spans whose request span has not
come wait for it, up to `ROOT_WAIT_NS`; after that the archive keeps them. Where more are open than memory should hold, those
that have waited longest settle before their time, with what has come: what comes to them later is late, and brings them back whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from phasewise.collector.frames import frame_of
from phasewise.collector.records import SPAN_SCHEMA

SETTLE_NS = 10**9
ROOT_WAIT_NS = 600 * 10**9
RECENT_NS = 120 * 10**9
OPEN_SPANS, OPEN_BYTES = 1_000_000, 256 << 20
RECENT_SPANS, RECENT_BYTES = 300_000, 64 << 20
_SLACK_BYTES = 64 << 20


def buffered_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    """Columns of a span in the buffer: as received, classified, and the number of the journal entry it came with."""
    empty = pl.from_arrow(SPAN_SCHEMA.empty_table())
    assert isinstance(empty, pl.DataFrame)
    return {**empty.schema, "profile": pl.String, "role": pl.String, "at_once": pl.Boolean, "entry": pl.Int64}


# Of a span in memory: its texts, and what stands in each column for a text or a number.
_BYTES = pl.sum_horizontal(pl.col(pl.String).str.len_bytes().fill_null(0)) + sum(
    16 if kind == pl.String else 8 for kind in buffered_schema().values()
)


def _bytes_of(spans: pl.DataFrame) -> int:
    return int(spans.select(_BYTES.sum()).item())


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
    """open: spans not settled; evicted: how many traces had to settle before their time. A trace is either open or among those settled
    lately."""

    open: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=buffered_schema()))
    evicted: int = 0
    _held_bytes: int = 0  # at most, by `open`: a span that is left of a batch holds all the texts of that batch
    _recent: list[_Settled] = field(default_factory=list)  # the oldest first

    def add(self, spans: pl.DataFrame, late: pl.DataFrame) -> None:
        """New spans; settled traces that go on (`late`: their trace_id) are open again, with all their spans."""
        new = [*self._taken_back(self._not_open(late)), spans]
        self._held_bytes += sum(_bytes_of(frame) for frame in new)
        self.open = pl.concat([self.open, *new])

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
        is_due = pl.col("at_once") | complete | given_up
        due = traces.filter(is_due).select("trace_id")
        if self.open.height > OPEN_SPANS or _bytes_of(self.open) > OPEN_BYTES:
            evicted = self._over(traces.filter(~is_due).select("trace_id", "last"))
            self.evicted += evicted.height
            due = pl.concat([due, evicted])
        taken = self._taken(due, now_unix_ns) if due.height < traces.height else self._all(now_unix_ns)
        self._let_go()
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

    def _let_go(self) -> None:
        """Copy what is open once it may hold far more than itself: seldom enough to cost little."""
        size = _bytes_of(self.open)
        if self._held_bytes > 2 * size + _SLACK_BYTES:
            self.open, self._held_bytes = frame_of(self.open.to_arrow(compat_level=pl.CompatLevel.oldest())), size

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

    def _over(self, waiting: pl.DataFrame) -> pl.DataFrame:
        """Of traces that wait (columns trace_id, last) those for which there is no room beside the ones that go on sooner (trace_id)."""
        sizes = self.open.group_by("trace_id").agg(pl.len().alias("spans"), _BYTES.sum().alias("bytes"))
        newest = waiting.join(sizes, on="trace_id").sort("last", "trace_id", descending=[True, False])
        fits = (pl.col("spans").cum_sum() <= OPEN_SPANS) & (pl.col("bytes").cum_sum() <= OPEN_BYTES)
        return newest.filter(~fits).select("trace_id")
