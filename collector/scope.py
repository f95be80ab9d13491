"""What attribution looks at around some rows of instances: rows of their replicas, their samples and their steps.

Instances are looked at together: a question to the database, and to Polars, costs as much for one of them as for many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.blocks import LOOK_BACK_NS
from phasewise.collector.context import REQUEST_COLUMNS
from phasewise.collector.exposition import SAMPLE_SCHEMA
from phasewise.collector.registry import Registry
from phasewise.collector.requests import FULL_SCHEMA
from phasewise.collector.schemas import Schema
from phasewise.collector.steps import STEP_SCHEMA
from phasewise.collector.transaction import Transaction

SAMPLE_SLACK_NS = 120 * 10**9
# Of rows that may still change, as many neighbours are looked at as suit their number: each row in sight costs like a target.
LEAST_ROWS, ROWS_RATIO = 500, 0.25
NEAR_NS = 60 * 10**9  # where they are many, the hour before them is not read to find the newest
STEPS_LIMIT = 100_000  # steps in sight at once, a hundred a second of one engine: of more, the newest, and always those of the targets
LEAST_NS = 60 * 10**9
CONTEXT_SCHEMA = {name: FULL_SCHEMA[name] for name in REQUEST_COLUMNS}
OF = pl.col("instance").fill_null("").alias("of")  # rows without an instance are those of the empty name
_NO_SAMPLES, _NO_STEPS = pl.DataFrame(schema=SAMPLE_SCHEMA), pl.DataFrame(schema=STEP_SCHEMA)


@dataclass(frozen=True, slots=True)
class Scope:
    """Rows (REQUEST_COLUMNS) around some targets of one instance, samples and steps from `start_unix_ns` to `end_unix_ns`."""

    start_unix_ns: int
    end_unix_ns: int
    rows: pl.DataFrame
    samples: pl.DataFrame
    steps: pl.DataFrame


@dataclass(frozen=True, slots=True)
class Sight:
    """Rows in sight of an instance, and where they begin, where its targets do, and where all ends."""

    instance: str
    rows: pl.DataFrame
    low_unix_ns: int
    arrival_unix_ns: int
    high_unix_ns: int


def portions(rows: pl.DataFrame, most: int) -> Iterator[pl.DataFrame]:
    """Rows (`of` is their instance) of whole instances, about `most` at a time."""
    if len(rows) <= most:
        yield from [rows] if len(rows) else []
        return
    names, held = list[str](), 0
    for name, n in rows.group_by("of", maintain_order=True).len().iter_rows():
        names.append(name)
        held += n
        if held >= most:
            yield rows.filter(pl.col("of").is_in(names))
            names, held = [], 0
    if names:
        yield rows.filter(pl.col("of").is_in(names))


def stepped(transaction: Transaction, targets: pl.DataFrame) -> frozenset[str]:
    """Instances with steps near targets (of any instance)."""
    arrival, last = targets["arrival_unix_ns"].min(), targets["finished_unix_ns"].max()
    assert isinstance(arrival, int)
    assert isinstance(last, int)
    found = transaction.query(
        "SELECT DISTINCT instance FROM engine_steps WHERE start_unix_ns BETWEEN ? AND ?",
        [arrival - LOOK_BACK_NS, last + SAMPLE_SLACK_NS],
    )
    return frozenset(found["instance"])


def near_new(
    transaction: Transaction,
    registry: Registry,
    new: pl.DataFrame,
    newest: pl.DataFrame,
    stepping: frozenset[str],
) -> dict[str, Scope]:
    """By instance, what is around its rows that are not stored yet: the new and newest rows of its replica that overlap them or ended
    in the hour before. new: `of` (its instance) and CONTEXT_SCHEMA; stepping: instances that send steps at all."""
    times = _times(new)
    together = pl.concat([newest, new.select(list(CONTEXT_SCHEMA))])
    seen = together.select(OF, "arrival_unix_ns", "finished_unix_ns").with_row_index("place")
    is_own = (pl.col("context") == pl.col("of")) & (pl.col("place") >= len(newest))
    is_near = (pl.col("finished_unix_ns") >= pl.col("low")) & (pl.col("arrival_unix_ns") <= pl.col("last"))
    near = seen.join(_windows(registry, times), on="of").filter(is_own | is_near).sort("context", "finished_unix_ns")
    return _scopes(transaction, registry, _sights(times, near, together[near["place"]]), stepping)


def load_near(transaction: Transaction, registry: Registry, targets: pl.DataFrame) -> dict[str, Scope]:
    """By instance, what is in the store around stored targets that are provisional: rows of the replica (the instance and its peers)
    that overlap them and those of the hour before them, of many the newest.

    targets: of, row, arrival_unix_ns, finished_unix_ns.
    """
    times = _times(targets)
    windows = _windows(registry, times)
    near = _newest(transaction, windows.with_columns(pl.max_horizontal("low", pl.col("first") - NEAR_NS).alias("low")))
    enough = (
        near.group_by("context").len().join(windows, on="context").filter(pl.col("len") >= pl.col("most"))["context"]
    )
    if len(enough) < len(times):
        few = windows.filter(~pl.col("context").is_in(enough.implode()))
        near = pl.concat([near.filter(pl.col("context").is_in(enough.implode())), _newest(transaction, few)])
    own = targets.select(pl.col("of").alias("context"), "row", "finished_unix_ns")
    seen = pl.concat([near, own]).unique(["context", "row"])
    rows = transaction.query(
        f"SELECT r.rowid AS row, {', '.join(REQUEST_COLUMNS)} FROM requests r SEMI JOIN seen s ON r.rowid = s.row "
        "WHERE finished_unix_ns BETWEEN ? AND ?",
        [seen["finished_unix_ns"].min(), seen["finished_unix_ns"].max()],
        seen=seen.select("row").unique().sort("row"),
    )
    placed = seen.join(rows.select("row").with_row_index("place"), on="row").sort("context", "finished_unix_ns")
    return _scopes(transaction, registry, _sights(times, placed, as_context(rows)[placed["place"]]), None)


def _newest(transaction: Transaction, windows: pl.DataFrame) -> pl.DataFrame:
    """Context, place in the table (`row`) and end of the newest rows in each window, `most` of a context at most."""
    return transaction.query(
        "SELECT w.context, r.rowid AS row, r.finished_unix_ns FROM requests r JOIN windows w ON coalesce(r.instance, '') = w.of "
        "AND r.finished_unix_ns >= w.low AND r.arrival_unix_ns <= w.last WHERE r.finished_unix_ns >= ? QUALIFY row_number() "
        "OVER (PARTITION BY w.context ORDER BY r.finished_unix_ns DESC, r.request_key) <= w.most",
        [windows["low"].min()],
        windows=windows,
    )


def _times(targets: pl.DataFrame) -> pl.DataFrame:
    """Of each instance (`of`) in order: first arrival, first and last end of its targets, since when others count (`low`), and how many
    are looked at (`most`)."""
    told = targets.group_by("of").agg(
        pl.col("arrival_unix_ns").min().alias("arrival"),
        pl.col("finished_unix_ns").min().alias("first"),
        pl.col("finished_unix_ns").max().alias("last"),
        (pl.len() + pl.max_horizontal(LEAST_ROWS, (ROWS_RATIO * pl.len()).round())).cast(pl.Int64).alias("most"),
    )
    return told.with_columns(pl.min_horizontal("arrival", pl.col("first") - LOOK_BACK_NS).alias("low")).sort("of")


def _windows(registry: Registry, times: pl.DataFrame) -> pl.DataFrame:
    """The same for each instance of the replicas of these instances, which are `context` now."""
    return peers_of(registry, times["of"]).join(times.rename({"of": "context"}), on="context", maintain_order="left")


def peers_of(registry: Registry, instances: Iterable[str]) -> pl.DataFrame:
    """Each instance (`context`) with the instances of its replica (`of`), itself included."""
    pairs = [(name, peer) for name in instances for peer in (registry.peers(name) if name else [name])]
    return pl.DataFrame(pairs, schema={"context": pl.String, "of": pl.String}, orient="row")


def _sights(times: pl.DataFrame, near: pl.DataFrame, rows: pl.DataFrame) -> list[Sight]:
    """near: context and end of each of the rows, in order of the contexts."""
    counted = near.group_by("context").agg(pl.len(), pl.col("finished_unix_ns").min().alias("oldest"))
    sights, start = list[Sight](), 0
    told = times.join(counted, left_on="of", right_on="context").sort("of")
    for name, arrival, last, low, n, oldest in told.select("of", "arrival", "last", "low", "len", "oldest").iter_rows():
        own = rows[start : start + n]
        sights.append(Sight(name, own, min(max(low, oldest), arrival), arrival, last + SAMPLE_SLACK_NS))
        start += n
    return sights


def as_context(rows: pl.DataFrame) -> pl.DataFrame:
    """The columns that attribution is given, as it expects them."""
    return rows.select(pl.col(name).cast(kind) for name, kind in CONTEXT_SCHEMA.items())


def _scopes(
    transaction: Transaction, registry: Registry, sights: Sequence[Sight], stepping: frozenset[str] | None
) -> dict[str, Scope]:
    return dict(zip((one.instance for one in sights), surrounded(transaction, registry, sights, stepping), strict=True))


def surrounded(
    transaction: Transaction, registry: Registry, sights: Sequence[Sight], stepping: frozenset[str] | None = None
) -> list[Scope]:
    """With the samples and steps of each. stepping: instances that have steps, None: ask."""
    samples, steps = list[_Range](), list[_Range]()
    for place, one in enumerate(sights):
        low, high = one.low_unix_ns - SAMPLE_SLACK_NS, one.high_unix_ns
        ranges = registry.sample_ranges(one.instance) if one.instance else []
        samples += [
            _Range(place, own.scrape, max(own.from_unix_ns, low), min(own.to_unix_ns, high))
            for own in ranges
            if own.from_unix_ns <= high and own.to_unix_ns >= low
        ]
        peers = registry.peers(one.instance) if one.instance else []
        peers = [peer for peer in peers if stepping is None or peer in stepping]
        steps_low = steps_from(transaction, peers, low, high, one.arrival_unix_ns, STEPS_LIMIT)
        steps += [_Range(place, peer, steps_low, high) for peer in peers]
    sampled = _between(transaction, "engine_samples", "unix_ns", samples, SAMPLE_SCHEMA)
    walked = _between(transaction, "engine_steps", "start_unix_ns", steps, STEP_SCHEMA)
    return [
        Scope(
            one.low_unix_ns - SAMPLE_SLACK_NS,
            one.high_unix_ns,
            one.rows,
            sampled.get(place, _NO_SAMPLES),
            walked.get(place, _NO_STEPS),
        )
        for place, one in enumerate(sights)
    ]


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


@dataclass(frozen=True, slots=True)
class _Range:
    """Rows of a table's `instance` from a time to another (both ends included), for one context."""

    context: int
    instance: str
    low_unix_ns: int
    high_unix_ns: int


def _between(
    transaction: Transaction, table: str, column: str, ranges: Sequence[_Range], schema: Schema
) -> dict[int, pl.DataFrame]:
    """By context, the rows in its ranges, in order of time; contexts without any are left out."""
    if not ranges:
        return {}
    wanted = pl.DataFrame(
        [(one.context, one.instance, one.low_unix_ns, one.high_unix_ns) for one in ranges],
        schema={"context": pl.Int64, "name": pl.String, "low": pl.Int64, "high": pl.Int64},
        orient="row",
    )
    found = transaction.query(
        f"SELECT w.context AS _context, t.* FROM {table} t JOIN wanted w ON t.instance = w.name "
        f"AND t.{column} BETWEEN w.low AND w.high WHERE t.{column} BETWEEN ? AND ? ORDER BY _context, t.{column}",
        [min(one.low_unix_ns for one in ranges), max(one.high_unix_ns for one in ranges)],
        wanted=wanted,
    )
    kept = found.select("_context", *(pl.col(name).cast(kind) for name, kind in schema.items()))
    return {int(place): own for (place,), own in kept.partition_by("_context", as_dict=True, include_key=False).items()}
