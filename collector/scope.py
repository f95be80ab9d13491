"""What attribution looks at around some rows of one instance: rows of its replica, its samples and its steps, read from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from phasewise.collector.exposition import SAMPLE_SCHEMA
from phasewise.collector.registry import Registry
from phasewise.collector.requests import FULL_SCHEMA
from phasewise.collector.schemas import Schema
from phasewise.collector.steps import STEP_SCHEMA
from phasewise.collector.store import Transaction

SAMPLE_SLACK_NS = 120 * 10**9
# A sample speaks for a minute around itself, but a block waits for none that come later than this after its end.
AFTER_NS = 30 * 10**9
# Of rows that may still change, as many neighbours are looked at as suit their number: each row in sight costs like a target.
LEAST_ROWS, ROWS_RATIO = 500, 0.25
NEAR_NS = (5 * 10**9, 60 * 10**9, LOOK_BACK_NS)
STEPS_LIMIT = 100_000  # steps in sight at once, a hundred a second of one engine: of more, the newest, and always those of the targets
LEAST_NS = 60 * 10**9
CONTEXT_SCHEMA = {name: FULL_SCHEMA[name] for name in REQUEST_COLUMNS}


@dataclass(frozen=True, slots=True)
class Scope:
    """Rows (REQUEST_COLUMNS) around some targets of one instance, samples and steps from `start_unix_ns` to `end_unix_ns`."""

    start_unix_ns: int
    end_unix_ns: int
    rows: pl.DataFrame
    samples: pl.DataFrame
    steps: pl.DataFrame


def stepped(transaction: Transaction, targets: pl.DataFrame) -> frozenset[str]:
    """Instances with steps near targets (of any instance)."""
    arrival, _, last = _times(targets)
    found = transaction.query(
        "SELECT DISTINCT instance FROM engine_steps WHERE start_unix_ns BETWEEN ? AND ?",
        [arrival - LOOK_BACK_NS, last + SAMPLE_SLACK_NS],
    )
    return frozenset(found["instance"])


def near_new(
    transaction: Transaction,
    registry: Registry,
    instance: str,
    targets: pl.DataFrame,
    newest: pl.DataFrame,
    stepping: frozenset[str],
) -> Scope:
    """Targets that are not stored yet, with those of the newest rows of their replica that overlap them or ended in the hour before.
    stepping: instances that send steps at all."""
    arrival, first, last = _times(targets)
    low = min(arrival, first - LOOK_BACK_NS)
    near = newest.filter(pl.col("finished_unix_ns") >= low, pl.col("arrival_unix_ns") <= last)
    rows = pl.concat([near, targets.select(list(CONTEXT_SCHEMA))])
    low = max(low, int(rows["finished_unix_ns"].min() or low))  # type: ignore[arg-type]
    times = (min(low, arrival), arrival, last + SAMPLE_SLACK_NS)
    return _scope(transaction, registry, instance, rows, times, stepping)


def load_near(transaction: Transaction, registry: Registry, instance: str, targets: pl.DataFrame) -> Scope:
    """What is in the store around stored targets that are provisional: rows of the replica (the instance and its peers) that
    overlap them and those of the hour before them, of many the newest.

    targets: row, arrival_unix_ns, finished_unix_ns.
    """
    arrival, first, last = _times(targets)
    named, peers = _named(registry, instance)
    most = targets.height + max(LEAST_ROWS, round(ROWS_RATIO * targets.height))
    low = min(arrival, first - LOOK_BACK_NS)
    for reach_ns in NEAR_NS:  # where they are many, the hour is not read to find the newest
        counted = transaction.query(
            f"SELECT finished_unix_ns AS at FROM requests WHERE {named} AND finished_unix_ns >= ? AND arrival_unix_ns <= ? "
            f"ORDER BY finished_unix_ns DESC LIMIT 1 OFFSET {most}",
            [*peers, max(low, first - reach_ns), last],
        )
        if counted.height:
            low = int(counted["at"].item()) + 1
            break
    rows = transaction.query(
        f"SELECT {', '.join(REQUEST_COLUMNS)} FROM requests WHERE {named} AND finished_unix_ns >= ? AND arrival_unix_ns <= ?",
        [*peers, low, last],
    )
    old = transaction.query(
        f"SELECT {', '.join(REQUEST_COLUMNS)} FROM requests r SEMI JOIN wanted w ON r.rowid = w.row "
        "WHERE finished_unix_ns >= ? AND (finished_unix_ns < ? OR arrival_unix_ns > ?)",
        [first, low, last],
        wanted=targets.select("row"),
    )
    rows = pl.concat([rows, old])
    return _scope(transaction, registry, instance, rows, (min(low, arrival), arrival, last + SAMPLE_SLACK_NS))


def load_block(transaction: Transaction, registry: Registry, instance: str, block: Block) -> tuple[Scope, pl.DataFrame]:
    """What is around a block, and its rows of the instance: row (DuckDB's rowid), request_key, finished_unix_ns, final."""
    named, peers = _named(registry, instance)
    stored = transaction.query(
        f"SELECT rowid AS row, final, {', '.join(REQUEST_COLUMNS)} FROM requests WHERE {named} AND finished_unix_ns >= ? "
        "AND finished_unix_ns < ? AND (finished_unix_ns < ? OR arrival_unix_ns < ?)",
        [*peers, block.look_unix_ns, block.end_unix_ns + LOOK_BACK_NS, block.end_unix_ns, block.end_unix_ns],
    )
    own = (pl.col("instance").fill_null("") == instance) & pl.col("finished_unix_ns").is_between(
        block.start_unix_ns, block.end_unix_ns, closed="left"
    )
    targets = stored.filter(own).select("row", "request_key", "arrival_unix_ns", "finished_unix_ns", "final")
    arrival = int(targets["arrival_unix_ns"].min() or block.start_unix_ns)  # type: ignore[arg-type]
    times = (min(block.look_unix_ns, arrival), arrival, block.end_unix_ns + AFTER_NS)
    return _scope(transaction, registry, instance, stored, times), targets


def read_blocks(
    transaction: Transaction, registry: Registry, instance: str, low_unix_ns: int, high_unix_ns: int
) -> list[Block]:
    """The blocks of an instance's replica in the spans from a time to another."""
    named, peers = _named(registry, instance)
    start = span_start(low_unix_ns)

    def slots(low: int) -> list[Slot]:
        found = transaction.query(
            f"SELECT finished_unix_ns // {SLOT_NS} * {SLOT_NS} AS slot, count(*) AS n, min(arrival_unix_ns) AS arrival, "
            "count(*) FILTER (coalesce(instance, '') = ? AND NOT coalesce(final, FALSE)) AS open FROM requests "
            f"WHERE {named} AND finished_unix_ns >= ? AND finished_unix_ns < ? GROUP BY 1 ORDER BY 1",
            [instance, *peers, low, span_end(high_unix_ns)],
        )
        return [Slot(*row) for row in found.iter_rows()]

    near = slots(start - SPAN_NS)
    before = near if enough(near, start) else slots(start - LOOK_BACK_NS)
    return list(blocks_of(before, start))


def _times(targets: pl.DataFrame) -> tuple[int, int, int]:
    """First arrival, first and last end."""
    arrival, first, last = targets.select(
        pl.col("arrival_unix_ns").min(),
        pl.col("finished_unix_ns").min(),
        pl.col("finished_unix_ns").max().alias("last"),
    ).row(0)
    return int(arrival), int(first), int(last)


def _named(registry: Registry, instance: str) -> tuple[str, list[str]]:
    peers: list[str] = registry.peers(instance) if instance else [instance]
    return f"coalesce(instance, '') IN ({', '.join('?' for _ in peers)})", peers


def _scope(
    transaction: Transaction,
    registry: Registry,
    instance: str,
    stored: pl.DataFrame,
    times: tuple[int, int, int],
    stepping: frozenset[str] | None = None,
) -> Scope:
    """times: where rows in sight begin, where targets do, and where all ends; stepping: instances that have steps, None: ask."""
    rows = stored.select(pl.col(name).cast(kind) for name, kind in CONTEXT_SCHEMA.items())
    low, high = times[0] - SAMPLE_SLACK_NS, times[2]
    ranges = registry.sample_ranges(instance) if instance else []
    samples = [
        (one.scrape, max(one.from_unix_ns, low), min(one.to_unix_ns, high))
        for one in ranges
        if one.from_unix_ns <= high and one.to_unix_ns >= low
    ]
    peers = registry.peers(instance) if instance else []
    peers = [name for name in peers if stepping is None or name in stepping]
    steps_low = steps_from(transaction, peers, low, high, times[1], STEPS_LIMIT)
    steps = [(name, steps_low, high) for name in peers]
    return Scope(
        low,
        high,
        rows,
        _between(transaction, "engine_samples", "unix_ns", samples, SAMPLE_SCHEMA),
        _between(transaction, "engine_steps", "start_unix_ns", steps, STEP_SCHEMA),
    )


def steps_from(transaction: Transaction, peers: Sequence[str], low: int, high: int, arrival: int, limit: int) -> int:
    """From when on steps are looked at: all of [low, high], or about the newest `limit` and those since a minute before
    `arrival`."""
    if not peers:
        return low
    found = transaction.query(
        "SELECT count(*) AS n, min(start_unix_ns) AS oldest, max(start_unix_ns) AS newest FROM engine_steps "
        f"WHERE instance IN ({', '.join('?' for _ in peers)}) AND start_unix_ns BETWEEN ? AND ?",
        [*peers, low, high],
    ).row(0)
    count, oldest, newest = (int(value or 0) for value in found)
    if count <= limit:
        return low
    return max(low, min(arrival - LEAST_NS, newest - (newest - oldest) * limit // count))


def _between(
    transaction: Transaction, table: str, column: str, ranges: Sequence[tuple[str, int, int]], schema: Schema
) -> pl.DataFrame:
    """Rows of some instances, each in its own time (both ends included)."""
    if not ranges:
        return pl.DataFrame(schema=schema)
    one = f"(instance = ? AND {column} BETWEEN ? AND ?)"
    found = transaction.query(
        f"SELECT * FROM {table} WHERE {' OR '.join(one for _ in ranges)} ORDER BY {column}",
        [value for named in ranges for value in named],
    )
    return found.select(pl.col(name).cast(kind) for name, kind in schema.items())
