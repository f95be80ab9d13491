"""Calling attribution: what it is given of an instance (a Context), and rows with its answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.context import Attribute, Context
from phasewise.collector.exposition import SAMPLE_SCHEMA
from phasewise.collector.registry import Registry
from phasewise.collector.requests import ATTRIBUTED, FULL_SCHEMA
from phasewise.collector.schemas import Schema
from phasewise.collector.steps import STEP_SCHEMA
from phasewise.collector.store import Transaction

HOUR_NS = 3600 * 10**9
SAMPLE_SLACK_NS = 120 * 10**9
# Rows in sight at once. Where whole hours hold more, the window shrinks to what holds about that many: a busy instance's rows
# are many within minutes. Provisional rows, attributed every second or so, see fewer than final ones.
ROWS_LIMIT = 200_000
FINAL_ROWS_LIMIT = 600_000
# Steps in sight at once, a hundred a second of one engine: of more, the newest, and always those of the targets.
STEPS_LIMIT = 100_000
FINAL_STEPS_LIMIT = 500_000
LEAST_NS = 60 * 10**9
_KEPT_BY_WRITER = ("request_key", "revision", "final")


@dataclass(frozen=True, slots=True)
class Scope:
    """Rows around some targets of one instance, from `start_unix_ns` to `end_unix_ns`; fresh: keys of those that are not in the
    store as they are here."""

    start_unix_ns: int
    end_unix_ns: int
    rows: pl.DataFrame
    fresh: pl.DataFrame
    samples: pl.DataFrame
    steps: pl.DataFrame


def load_scope(
    transaction: Transaction,
    registry: Registry,
    instance: str,
    targets: pl.DataFrame,
    fresh: pl.DataFrame,
    final: bool,
    peers_fresh: pl.DataFrame,
) -> Scope:
    """Rows of the replica (the instance and its peers) in the hours the targets finish in and the hour before, and those that
    overlap a target; the joined samples and steps of that time.

    targets: arrival_unix_ns, finished_unix_ns of the rows to attribute; fresh, peers_fresh: rows not yet in the store;
    final: the rows become final by this.
    """
    arrival, first, last = (
        int(targets["arrival_unix_ns"].min() or 0),  # type: ignore[arg-type]
        int(targets["finished_unix_ns"].min() or 0),  # type: ignore[arg-type]
        int(targets["finished_unix_ns"].max() or 0),  # type: ignore[arg-type]
    )
    start = (first // HOUR_NS - 1) * HOUR_NS
    end = (last // HOUR_NS + 1) * HOUR_NS
    limit = FINAL_ROWS_LIMIT if final else ROWS_LIMIT
    peers = registry.peers(instance) if instance else [instance]
    named = f"coalesce(instance, '') IN ({', '.join('?' for _ in peers)})"
    count = _count(transaction, named, peers, start, end)
    if count > limit:
        room = max(LEAST_NS, (end - start) * limit // count // 2)
        start, end = max(start, min(arrival, first) - room), min(end, last + room)
    stored = transaction.query(
        f"SELECT * FROM requests WHERE {named} AND ((finished_unix_ns >= ? AND finished_unix_ns < ?) "
        "OR (finished_unix_ns >= ? AND arrival_unix_ns <= ?))",
        [*peers, start, end, arrival, last],
    )
    unstored = pl.concat([fresh, peers_fresh])
    rows = typed(stored).join(unstored.select("request_key"), on="request_key", how="anti")
    rows = pl.concat([rows, unstored]).sort("arrival_unix_ns", "request_key")
    low, high = min(start, arrival) - SAMPLE_SLACK_NS, end + SAMPLE_SLACK_NS
    ranges = registry.sample_ranges(instance) if instance else []
    samples = [
        (one.scrape, max(one.from_unix_ns, low), min(one.to_unix_ns, high))
        for one in ranges
        if one.from_unix_ns <= high and one.to_unix_ns >= low
    ]
    named_peers = [name for name in peers if name]
    steps_low = steps_from(transaction, named_peers, low, high, arrival, FINAL_STEPS_LIMIT if final else STEPS_LIMIT)
    steps = [(name, steps_low, high) for name in named_peers]
    return Scope(
        low,
        high,
        rows,
        fresh.select("request_key"),
        _between(transaction, "engine_samples", "unix_ns", samples, SAMPLE_SCHEMA),
        _between(transaction, "engine_steps", "start_unix_ns", steps, STEP_SCHEMA),
    )


def _count(transaction: Transaction, named: str, peers: Sequence[str], start: int, end: int) -> int:
    counted = transaction.query(
        f"SELECT count(*) AS n FROM requests WHERE {named} AND finished_unix_ns >= ? AND finished_unix_ns < ?",
        [*peers, start, end],
    )
    return int(counted["n"].item())


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


def typed(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of `requests` with exactly the columns and types of the record."""
    missing = [pl.lit(None).alias(name) for name in FULL_SCHEMA if name not in rows.columns]
    return rows.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in FULL_SCHEMA.items())


def attributed(
    attribute: Attribute, registry: Registry, instance: str, scope: Scope, keys: Collection[str], watermark_unix_ns: int
) -> pl.DataFrame:
    """The target rows with the answer in them, their revision counted on, `final` where the watermark has passed.

    Only rows that differ from what the store holds come back.
    """
    rows = with_model(scope.rows, scope.samples, keys)
    context = Context(
        instance=instance,
        engine=_engine_of(rows),
        requests=rows,
        samples=scope.samples,
        steps=scope.steps,
        targets=frozenset(keys),
        settings=registry.settings(instance, scope.start_unix_ns, scope.end_unix_ns) if instance else {},
    )
    answer = attribute(context)
    old = scope.rows.filter(pl.col("request_key").is_in(list(keys)))
    new = rows.filter(pl.col("request_key").is_in(list(keys)))
    set_columns = [name for name in answer.columns if name in FULL_SCHEMA and name not in _KEPT_BY_WRITER]
    joined = new.drop(set_columns).join(
        answer.select("request_key", *(pl.col(name).cast(FULL_SCHEMA[name]) for name in set_columns)).unique(
            "request_key"
        ),
        on="request_key",
        how="left",
        maintain_order="left",
    )
    passed = (pl.col("finished_unix_ns") <= watermark_unix_ns) | pl.col("final").fill_null(False)
    revision = pl.when(pl.col("revision").is_null()).then(pl.lit(0)).otherwise(pl.col("revision") + 1)
    done = typed(joined.with_columns(passed.alias("final"), revision.cast(pl.Int64).alias("revision")))
    return pl.concat(
        [
            _changed(old, done.join(scope.fresh, on="request_key", how="anti")),
            done.join(scope.fresh, on="request_key", how="semi"),
        ]
    )


def _engine_of(rows: pl.DataFrame) -> str | None:
    known = rows["engine"].drop_nulls()
    return str(known[-1]) if len(known) else None


def with_model(rows: pl.DataFrame, samples: pl.DataFrame, keys: Collection[str]) -> pl.DataFrame:
    """Rows whose span names no model get that of their replica's samples, if those agree on one."""
    models = samples["model"].drop_nulls().unique()
    lacking = pl.col("model").is_null() & pl.col("request_key").is_in(list(keys))
    if len(models) != 1 or not rows.select(lacking.any()).item():
        return rows
    noted = pl.col("provenance").fill_null("{}").str.strip_suffix("}")
    comma = pl.when(noted == "{").then(pl.lit("")).otherwise(pl.lit(","))
    provenance = noted + comma + pl.lit('"model":"inferred:samples"}')
    return rows.with_columns(
        pl.when(lacking).then(provenance).otherwise("provenance").alias("provenance"),
        pl.when(lacking).then(pl.lit(models[0])).otherwise("model").alias("model"),
    )


def _changed(old: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """Rows of `new` that say something else than the row of the same key in `old`, revision aside."""
    compared = [name for name in FULL_SCHEMA if name not in ("request_key", "revision")]
    pairs = new.join(old, on="request_key", how="left", suffix=":old", maintain_order="left")
    never = pl.col("revision:old").is_null()
    differs = pl.any_horizontal(pl.col(name).ne_missing(pl.col(f"{name}:old")) for name in compared)
    return pairs.filter(never | differs).select(new.columns)


def without_attribution(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of normalization with the columns attribution will fill, all unknown."""
    nothing = [pl.lit(None, dtype=FULL_SCHEMA[name]).alias(name) for name in ATTRIBUTED]
    return typed(rows.with_columns(nothing).with_columns(pl.lit(False).alias("final")))
