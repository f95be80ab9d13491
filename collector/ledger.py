"""Which spans came before: a resend changes nothing, a different span under the same id is counted and not stored.

The ledger holds the newest spans (64-bit hashes) in the store itself, in the transaction of the rows they made. Older resends
find their row by its key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from phasewise.collector.keys import span_hashes, trace_hashes
from phasewise.collector.sieve import Sieve
from phasewise.collector.transaction import Transaction

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
_TRACES = np.uint64(0xA5A5A5A55A5A5A5A)  # a trace stands in the sieve beside its spans
SIEVE_NUMBERS = 4 * LEDGER_SPANS  # more than that lets too much through: it is made anew, without what was pruned


@dataclass(frozen=True, slots=True)
class Admitted:
    """spans: the new ones; late: ids of traces among them that began earlier and are not crowded; duplicates, conflicts: what was left out."""

    spans: pl.DataFrame
    late: pl.DataFrame
    duplicates: int
    conflicts: int


class Ledger:
    """The ledger, and what is known of it without asking: most spans are new, and a sieve tells so. The sieve may hold more than the
    table (what was rolled back or pruned), never less."""

    def __init__(self) -> None:
        self._sieve: Sieve | None = None

    def forget(self) -> None:
        """The table may be another one now."""
        self._sieve = None

    def admit(self, transaction: Transaction, spans: pl.DataFrame) -> Admitted:
        """Leave out what came before, note the rest. `spans` in the order they were received."""
        sieve = self._read(transaction)
        content = spans.select(pl.struct(_CONTENT).hash(_SEED).alias("content")).to_series()
        told = pl.DataFrame(
            [
                span_hashes(spans["trace_id"], spans["span_id"]),
                trace_hashes(spans["trace_id"]),
                content,
                spans["received_unix_ns"],
            ]
        )
        conflicts = 0
        possible = sieve.may_hold(told["trace"].to_numpy(), told["span"].to_numpy())
        if possible.any() or told["span"].n_unique() < told.height:
            chosen, conflicts = _first_copies(transaction, told, pl.Series(possible))
            new, admitted = told[chosen], spans[chosen]
        else:
            new, admitted = told, spans
        late = _late(transaction, new, admitted, sieve)
        _note(sieve, new)
        transaction.insert("span_ledger", new)
        return Admitted(admitted, late, spans.height - new.height - conflicts, conflicts)

    def _read(self, transaction: Transaction) -> Sieve:
        sieve = self._sieve
        if sieve is None or sieve.added > SIEVE_NUMBERS:
            sieve = Sieve()
            _note(sieve, transaction.query("SELECT span, trace FROM span_ledger"))
            self._sieve = sieve  # only now: one that was not filled would let everything pass as new
        return sieve


def _note(sieve: Sieve, told: pl.DataFrame) -> None:
    traces = told["trace"].unique().to_numpy()
    sieve.add(told["trace"].to_numpy(), told["span"].to_numpy())
    sieve.add(traces, traces ^ _TRACES)


def _first_copies(transaction: Transaction, told: pl.DataFrame, possible: pl.Series) -> tuple[pl.Series, int]:
    """Places of the spans that are new, and how many of the others say something else.

    The first copy wins, whether it came in an earlier batch or in this one: every later copy is held against that one.
    """
    first = (
        told.with_columns(possible.alias("possible"))
        .with_row_index("place")
        .unique(subset="span", keep="first", maintain_order=True)
    )
    known = transaction.query(
        "SELECT l.span, any_value(l.content) AS known FROM span_ledger l SEMI JOIN batch b ON l.span = b.span GROUP BY 1",
        batch=first.filter("possible").select("span"),
    )
    new = first.join(known, on="span", how="anti", maintain_order="left")
    kept = pl.concat([known, new.select("span", pl.col("content").alias("known"))])
    conflicts = told.join(kept, on="span", how="inner").filter(pl.col("content") != pl.col("known")).height
    return new["place"], conflicts


def _late(transaction: Transaction, new: pl.DataFrame, spans: pl.DataFrame, sieve: Sieve) -> pl.DataFrame:
    traces = new["trace"].unique()
    numbers = traces.to_numpy()
    possible = traces.filter(pl.Series(sieve.may_hold(numbers, numbers ^ _TRACES)))
    if possible.is_empty():
        return spans.select("trace_id").clear()
    late = transaction.query(
        "SELECT l.trace FROM span_ledger l SEMI JOIN batch b ON l.trace = b.trace GROUP BY 1 HAVING count(*) <= ?",
        [CROWDED_SPANS],
        batch=possible.to_frame(),
    )
    return spans.filter(new["trace"].is_in(late["trace"].implode())).select("trace_id").unique()


def prune(transaction: Transaction) -> None:
    """Forget the oldest spans beyond LEDGER_SPANS."""
    count = transaction.query("SELECT count(*) AS n FROM span_ledger")["n"].item()
    if count > LEDGER_SPANS * 5 // 4:
        transaction.execute(
            "DELETE FROM span_ledger WHERE received_unix_ns < "
            "(SELECT received_unix_ns FROM span_ledger ORDER BY received_unix_ns DESC LIMIT 1 OFFSET ?)",
            [LEDGER_SPANS],
        )
