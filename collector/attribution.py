"""Calling attribution: what it is given of an instance (a Context), and rows with its answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.context import REQUEST_COLUMNS, Attribute, Context
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
_NO_ROWS = pl.DataFrame(schema=FULL_SCHEMA)
_NULLS = {name: pl.lit(None, dtype=kind).alias(name) for name, kind in FULL_SCHEMA.items()}
_CONTEXT_SCHEMA = {name: FULL_SCHEMA[name] for name in REQUEST_COLUMNS}


@dataclass(frozen=True, slots=True)
class Scope:
    """Rows (REQUEST_COLUMNS) around some targets of one instance, samples and steps from `start_unix_ns` to `end_unix_ns`."""

    start_unix_ns: int
    end_unix_ns: int
    rows: pl.DataFrame
    samples: pl.DataFrame
    steps: pl.DataFrame


def load_scope(
    transaction: Transaction, registry: Registry, instance: str, targets: pl.DataFrame, final: bool
) -> Scope:
    """Rows of the replica (the instance and its peers) in the hours the targets finish in and the hour before, and those that
    overlap a target; the joined samples and steps of that time.

    targets: arrival_unix_ns, finished_unix_ns of the rows to attribute; final: the rows become final by this.
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
    least = min(start, arrival)  # said apart from the alternatives, so that older rows are not looked at
    stored = transaction.query(
        f"SELECT {', '.join(REQUEST_COLUMNS)} FROM requests WHERE {named} AND finished_unix_ns >= ? AND "
        "((finished_unix_ns >= ? AND finished_unix_ns < ?) OR (finished_unix_ns >= ? AND arrival_unix_ns <= ?))",
        [*peers, least, start, end, arrival, last],
    )
    rows = stored.select(pl.col(name).cast(kind) for name, kind in _CONTEXT_SCHEMA.items())
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
    if rows.is_empty():
        return _NO_ROWS
    known = rows.schema
    others = {name: pl.col(name).cast(kind) for name, kind in FULL_SCHEMA.items() if known.get(name, kind) != kind}
    if not others and known.names() == _NO_ROWS.columns:
        return rows
    absent = [null for name, null in _NULLS.items() if name not in known]
    return rows.with_columns([*absent, *others.values()]).select(_NO_ROWS.columns)


def attributed(
    transaction: Transaction,
    attribute: Attribute,
    registry: Registry,
    instance: str,
    scope: Scope,
    targets: pl.DataFrame,
    watermark_unix_ns: int,
    counted: Collection[str] = (),
) -> pl.DataFrame:
    """Of the targets (row, request_key, finished_unix_ns), which are all stored, those whose attribution says something else now:
    their place, key, time and what is to be set in the store, `revision` counted on, `final` where the watermark has passed. A column
    that is the same for all of them is left out.

    counted: keys of rows whose revision counts what changed in them already.
    """
    keys = targets["request_key"]
    models = scope.samples["model"].drop_nulls().unique()
    sole = str(models[0]) if len(models) == 1 else None
    context = Context(
        instance=instance,
        engine=_engine_of(scope.rows),
        requests=_with_model(scope.rows, keys, sole),
        samples=scope.samples,
        steps=scope.steps,
        targets=frozenset(keys.to_list()),
        settings=registry.settings(instance, scope.start_unix_ns, scope.end_unix_ns) if instance else {},
    )
    answer = attribute(context)
    set_columns = [name for name in answer.columns if name in FULL_SCHEMA and name not in _KEPT_BY_WRITER]
    compared = list(dict.fromkeys([*set_columns, "model", "provenance", "final"]))
    old = _stored_columns(transaction, targets, [*compared, "revision"])
    told = answer.select("request_key", *(pl.col(name).cast(FULL_SCHEMA[name]) for name in set_columns))
    new = _noting_model(old, sole).drop(set_columns)
    new = new.join(told.unique("request_key"), on="request_key", how="left", maintain_order="left")
    passed = (pl.col("finished_unix_ns") <= watermark_unix_ns) | pl.col("final").fill_null(False)
    more = pl.lit(1) - pl.col("request_key").is_in(list(counted)).cast(pl.Int64) if counted else pl.lit(1)
    revision = pl.when(pl.col("revision").is_null()).then(pl.lit(0)).otherwise(pl.col("revision") + more)
    new = new.with_columns(passed.alias("final"), revision.cast(pl.Int64).alias("revision"))
    differs = old["revision"].is_null()
    same = []
    for name in compared:
        changed = old[name].ne_missing(new[name])
        differs |= changed
        if not changed.any():
            same.append(name)
    return new.drop(same).filter(differs)  # what nobody changes need not be written: rows become final with few changes


def _engine_of(rows: pl.DataFrame) -> str | None:
    """The engine of the newest row that names one."""
    known = rows.select("engine", "arrival_unix_ns", "request_key").drop_nulls("engine")
    newest = known.filter(pl.col("arrival_unix_ns") == pl.col("arrival_unix_ns").max()).sort("request_key")
    return str(newest["engine"][-1]) if len(newest) else None


def _with_model(rows: pl.DataFrame, keys: pl.Series, sole: str | None) -> pl.DataFrame:
    """Targets whose span names no model get that of their replica's samples, if those agree on one."""
    if sole is None or not rows["model"].null_count():
        return rows
    lacking = pl.col("model").is_null() & pl.col("request_key").is_in(keys.implode())
    return rows.with_columns(pl.when(lacking).then(pl.lit(sole)).otherwise("model").alias("model"))


def _noting_model(targets: pl.DataFrame, sole: str | None) -> pl.DataFrame:
    """The same in what is stored of the targets, with where the model is from."""
    if sole is None or not targets["model"].null_count():
        return targets
    lacking = pl.col("model").is_null()
    noted = pl.col("provenance").fill_null("{}").str.strip_suffix("}")
    comma = pl.when(noted == "{").then(pl.lit("")).otherwise(pl.lit(","))
    provenance = noted + comma + pl.lit('"model":"inferred:samples"}')
    return targets.with_columns(
        pl.when(lacking).then(provenance).otherwise("provenance").alias("provenance"),
        pl.when(lacking).then(pl.lit(sole)).otherwise("model").alias("model"),
    )


def _stored_columns(transaction: Transaction, targets: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Key, time, place in the table (`row`) and some other columns of stored rows (row, finished_unix_ns)."""
    found = transaction.query(
        f"SELECT r.rowid AS row, request_key, finished_unix_ns, {', '.join(names)} FROM requests r "
        "SEMI JOIN wanted w ON r.rowid = w.row WHERE r.finished_unix_ns BETWEEN ? AND ?",
        [targets["finished_unix_ns"].min(), targets["finished_unix_ns"].max()],
        wanted=targets.select("row"),
    )
    known = (pl.col(name).cast(FULL_SCHEMA[name]) for name in ("request_key", "finished_unix_ns", *names))
    return found.select("row", *known)


def without_attribution(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of normalization with the columns attribution will fill, all unknown."""
    return typed(rows.drop(ATTRIBUTED, strict=False).with_columns(pl.lit(False).alias("final")))
