"""Which spans came before: a resend changes nothing, a different span under the same id is counted and not stored.

The ledger holds the newest spans (64-bit hashes) in the store itself, in the transaction of the rows they made. Older resends
find their row by its key.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from phasewise.collector.keys import span_hashes, trace_hashes
from phasewise.collector.store import Transaction

LEDGER_SPANS = 2_000_000
# An engine that takes a stale parent puts every request into one trace: beyond this size a trace's spans stand for themselves.
CROWDED_SPANS = 20_000
# What makes two spans the same; when they were received does not.
_CONTENT = (
    "parent_span_id",
    "name",
    "kind",
    "start_unix_ns",
    "end_unix_ns",
    "status_code",
    "resource",
    "attributes",
    "events",
)
_SEED = 0x5048415345


@dataclass(frozen=True, slots=True)
class Admitted:
    """spans: the new ones; late: ids of traces among them that began earlier and are not crowded; duplicates, conflicts: what was left out."""

    spans: pl.DataFrame
    late: pl.DataFrame
    duplicates: int
    conflicts: int


def admit(transaction: Transaction, spans: pl.DataFrame) -> Admitted:
    """Leave out what came before, note the rest. `spans` in the order they were received."""
    content = spans.select(pl.struct(_CONTENT).hash(_SEED).alias("content")).to_series()
    hashed = spans.with_columns(
        span_hashes(spans["trace_id"], spans["span_id"]).alias("_span"),
        trace_hashes(spans["trace_id"]).alias("_trace"),
        content.alias("_content"),
    )
    first = hashed.unique(subset="_span", keep="first", maintain_order=True)
    known = transaction.query(
        "SELECT l.span AS _span, any_value(l.content) AS _known FROM span_ledger l SEMI JOIN batch b ON l.span = b._span GROUP BY 1",
        batch=first.select("_span"),
    )
    # The first copy wins, whether it came in an earlier batch or in this one: every later copy is held against that one.
    own = first.select("_span", pl.col("_content").alias("_known")).join(known, on="_span", how="anti")
    kept = pl.concat([known, own])
    conflicts = hashed.join(kept, on="_span", how="inner").filter(pl.col("_content") != pl.col("_known")).height
    new = first.join(known.select("_span"), on="_span", how="anti", maintain_order="left")
    late = transaction.query(
        "SELECT l.trace AS _trace FROM span_ledger l SEMI JOIN batch b ON l.trace = b._trace GROUP BY 1 HAVING count(*) <= ?",
        [CROWDED_SPANS],
        batch=new.select("_trace").unique(),
    )
    transaction.insert(
        "span_ledger",
        new.select(
            pl.col("_span").alias("span"),
            pl.col("_trace").alias("trace"),
            pl.col("_content").alias("content"),
            "received_unix_ns",
        ),
    )
    return Admitted(
        spans=new.drop("_span", "_trace", "_content"),
        late=new.join(late, on="_trace", how="semi").select("trace_id").unique(),
        duplicates=spans.height - new.height - conflicts,
        conflicts=conflicts,
    )


def prune(transaction: Transaction) -> None:
    """Forget the oldest spans beyond LEDGER_SPANS."""
    count = transaction.query("SELECT count(*) AS n FROM span_ledger")["n"].item()
    if count > LEDGER_SPANS * 5 // 4:
        transaction.execute(
            "DELETE FROM span_ledger WHERE received_unix_ns < "
            "(SELECT received_unix_ns FROM span_ledger ORDER BY received_unix_ns DESC LIMIT 1 OFFSET ?)",
            [LEDGER_SPANS],
        )
