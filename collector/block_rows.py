"""The blocks of instances that the store holds rows of, and what is around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from phasewise.collector.blocks import (
    LOOK_BACK_NS,
    SLOT_NS,
    SPAN_NS,
    Block,
    Slot,
    blocks_of,
    enough,
    span_end,
    span_start,
)
from phasewise.collector.context import REQUEST_COLUMNS
from phasewise.collector.registry import Registry
from phasewise.collector.scope import OF, Scope, Sight, as_context, peers_of, surrounded
from phasewise.collector.transaction import Transaction

# A sample speaks for a minute around itself, but a block waits for none that come later than this after its end.
SAMPLES_AFTER_NS = 30 * 10**9


def read_blocks(
    transaction: Transaction, registry: Registry, spans: Mapping[str, tuple[int, int]]
) -> dict[str, list[Block]]:
    """By instance, the blocks of its replica in the spans of the clock from a time to another."""
    starts = {name: span_start(low) for name, (low, _) in spans.items()}
    ends = {name: span_end(high) for name, (_, high) in spans.items()}
    found = _slots(transaction, registry, {name: (start - SPAN_NS, ends[name]) for name, start in starts.items()})
    few = {name: (start - LOOK_BACK_NS, ends[name]) for name, start in starts.items() if not enough(found[name], start)}
    if few:
        found |= _slots(transaction, registry, few)
    return {name: list(blocks_of(found[name], start)) for name, start in starts.items()}


def _slots(transaction: Transaction, registry: Registry, spans: Mapping[str, tuple[int, int]]) -> dict[str, list[Slot]]:
    told = pl.DataFrame(
        [(name, *span) for name, span in spans.items()],
        schema={"context": pl.String, "low": pl.Int64, "high": pl.Int64},
        orient="row",
    )
    counted = transaction.query(
        f"SELECT w.context, r.finished_unix_ns // {SLOT_NS} * {SLOT_NS} AS slot, count(*) AS n, "
        "min(r.arrival_unix_ns) AS arrival, count(*) FILTER (w.of = w.context AND NOT coalesce(r.final, FALSE)) AS open "
        "FROM requests r JOIN windows w ON coalesce(r.instance, '') = w.of AND r.finished_unix_ns >= w.low "
        "AND r.finished_unix_ns < w.high WHERE r.finished_unix_ns >= ? AND r.finished_unix_ns < ? GROUP BY ALL ORDER BY ALL",
        [told["low"].min(), told["high"].max()],
        windows=peers_of(registry, spans).join(told, on="context"),
    )
    found: dict[str, list[Slot]] = {name: [] for name in spans}
    for name, *slot in counted.iter_rows():
        found[name].append(Slot(*slot))
    return found


def load_blocks(
    transaction: Transaction, registry: Registry, blocks: Sequence[tuple[str, Block]]
) -> tuple[list[Scope], pl.DataFrame]:
    """What is around each of some instances' blocks, and their rows of these instances: n (which block), of (its instance), row (DuckDB's
    rowid), request_key, arrival_unix_ns, finished_unix_ns, final."""
    told = pl.DataFrame(
        [(n, name, one.look_unix_ns, one.start_unix_ns, one.end_unix_ns) for n, (name, one) in enumerate(blocks)],
        schema={"n": pl.Int64, "context": pl.String, "look": pl.Int64, "start": pl.Int64, "stop": pl.Int64},
        orient="row",
    )
    names = dict.fromkeys(name for name, _ in blocks)
    stored = transaction.query(
        f"SELECT w.n, w.context, w.start, w.stop, r.rowid AS row, r.final, {', '.join(f'r.{name}' for name in REQUEST_COLUMNS)} "
        "FROM requests r JOIN windows w ON coalesce(r.instance, '') = w.of AND r.finished_unix_ns >= w.look "
        "AND (r.finished_unix_ns < w.stop OR r.arrival_unix_ns < w.stop) "
        f"AND r.finished_unix_ns < w.stop + {LOOK_BACK_NS} WHERE r.finished_unix_ns >= ? AND r.finished_unix_ns < ? ORDER BY w.n",
        [told["look"].min(), int(told["stop"].max()) + LOOK_BACK_NS],  # type: ignore[arg-type]
        windows=peers_of(registry, names).join(told, on="context"),
    )
    is_own = pl.col("context") == OF
    ends_inside = pl.col("finished_unix_ns").is_between(pl.col("start"), pl.col("stop"), closed="left")
    targets = stored.filter(is_own & ends_inside).select(
        "n", pl.col("context").alias("of"), "row", "request_key", "arrival_unix_ns", "finished_unix_ns", "final"
    )
    counts = dict(stored.group_by("n").len().iter_rows())
    arrivals = dict(targets.group_by("n").agg(pl.col("arrival_unix_ns").min()).iter_rows())
    rows, first = as_context(stored), 0
    sights = []
    for n, (name, block) in enumerate(blocks):
        arrival = arrivals.get(n, block.start_unix_ns)
        last = first + counts.get(n, 0)
        low = min(block.look_unix_ns, arrival)
        sights.append(Sight(name, rows[first:last], low, arrival, block.end_unix_ns + SAMPLES_AFTER_NS))
        first = last
    return surrounded(transaction, registry, sights), targets
