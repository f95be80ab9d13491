"""Writing rows of `requests`: what is new, what changed, what is the same again; rows of several sources made one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from phasewise.collector.attribution import typed, without_attribution
from phasewise.collector.completion import CLIENT_COLUMNS, NEAR_NS, SUPPLEMENT_COLUMNS, Identifiers, filled
from phasewise.collector.disaggregation import IS_HALF, IS_PAIR, OF_PAIR, PREFILL_SOURCE, with_prefill, with_residual
from phasewise.collector.kv_tiers import IS_LOADED, IS_TIER, OF_LOAD, TIER_SOURCE, with_loads
from phasewise.collector.requests import FULL_SCHEMA, REQUEST_SCHEMA
from phasewise.collector.transaction import Transaction

# Normalization may say these anew (a late parent, a model of another source) without the row saying something else.
_NOT_COMPARED = ("request_key", "received_unix_ns", "provenance")


@dataclass(frozen=True, slots=True)
class Changes:
    """rows: whole rows that are new or changed, attribution emptied only where it was never made; stored: keys of those that are
    in the table already; gone: keys of rows to delete."""

    rows: pl.DataFrame
    stored: list[str]
    gone: list[str]


def changes_of(
    transaction: Transaction,
    identifiers: Identifiers,
    made: pl.DataFrame,
    supplements: pl.DataFrame,
    superseded: Sequence[str],
) -> Changes:
    """What the table has to take of rows that normalization made (REQUEST_SCHEMA)."""
    if made.is_empty() and supplements.is_empty():
        return Changes(typed(made), [], list(superseded))
    if made["request_key"].n_unique() < made.height:
        made = made.unique("request_key", keep="first", maintain_order=True)
    made, gone = _with_other_sides(transaction, identifiers, made)
    stored = _stored(transaction, made)
    rows = _merged(stored, made)
    completed = _supplemented(transaction, identifiers, rows, supplements.filter(~IS_TIER))
    completed = with_loads(transaction, completed, supplements.filter(IS_TIER))
    # A supplement may have completed rows that were not made now: those are in the table as well.
    if completed is rows and stored.is_empty():
        return Changes(rows, [], [*superseded, *gone])
    new = made.join(stored.select("request_key"), on="request_key", how="anti")
    known = completed.join(new.select("request_key"), on="request_key", how="anti")["request_key"].to_list()
    return Changes(completed, known, [*superseded, *gone])


def _stored(transaction: Transaction, made: pl.DataFrame) -> pl.DataFrame:
    """Rows in the table under the same keys. A key belongs to one span, so its row arrived at the same time: that is a number, and
    most rows are new, so the keys of all rows of two hours are not looked at. Only a row that was joined to its prefill half may
    have arrived earlier than its span began; those bear an identifier that both halves share."""
    if made.is_empty():
        return typed(made)
    window = [_low(made) - NEAR_NS, _high(made) + NEAR_NS]
    candidates = transaction.query(
        "SELECT r.rowid AS row FROM requests r SEMI JOIN made m ON r.arrival_unix_ns = m.arrival_unix_ns "
        "WHERE r.finished_unix_ns BETWEEN ? AND ?",
        window,
        made=made.select("arrival_unix_ns"),
    )
    named = made.filter(pl.col("client_request_id").is_not_null() & pl.col("instance").is_not_null())
    if not named.is_empty():
        moved = transaction.query(
            "SELECT r.rowid AS row FROM requests r SEMI JOIN named n ON r.request_key = n.request_key "
            "WHERE r.finished_unix_ns BETWEEN ? AND ?",
            window,
            named=named.select("request_key"),
        )
        candidates = pl.concat([candidates, moved]).unique()
    if candidates.height > made.height:  # many rows of one moment: whole ones would be read in vain
        candidates = transaction.query(
            "SELECT r.rowid AS row FROM requests r SEMI JOIN candidates c ON r.rowid = c.row SEMI JOIN made m ON r.request_key = m.request_key",
            candidates=candidates,
            made=made.select("request_key"),
        )
    if candidates.is_empty():
        return typed(made.clear())
    found = transaction.query(
        "SELECT r.* FROM requests r SEMI JOIN candidates c ON r.rowid = c.row WHERE r.finished_unix_ns BETWEEN ? AND ?",
        window,
        candidates=candidates,
    )
    return typed(found).join(made.select("request_key"), on="request_key", how="semi")


def _merged(stored: pl.DataFrame, made: pl.DataFrame) -> pl.DataFrame:
    """New rows, and stored rows with what normalization says differently now; values it does not know are kept, and of a row that was
    joined to its prefill half what is of both, or to a KV tier what is loaded: those may be in traces of their own, which nobody looks at
    now."""
    if stored.is_empty():
        return without_attribution(made)
    new = made.join(stored.select("request_key"), on="request_key", how="anti", maintain_order="left")
    pairs = stored.join(made, on="request_key", how="inner", suffix=":new")
    joined, loaded = pairs.select(IS_PAIR.any().alias("pair"), IS_LOADED.any().alias("loaded")).row(0)
    if joined:
        pairs = pairs.with_columns(pl.when(~IS_PAIR).then(f"{name}:new").alias(f"{name}:new") for name in OF_PAIR)
    if loaded:
        pairs = pairs.with_columns(pl.when(~IS_LOADED).then(f"{name}:new").alias(f"{name}:new") for name in OF_LOAD)
    compared = [name for name in REQUEST_SCHEMA if name not in _NOT_COMPARED]
    differs = pl.any_horizontal(
        pl.col(f"{name}:new").is_not_null() & pl.col(name).ne_missing(pl.col(f"{name}:new")) for name in compared
    )
    changed = pairs.filter(differs).with_columns(
        pl.coalesce(f"{name}:new", name).alias(name) for name in REQUEST_SCHEMA if name != "request_key"
    )
    changed = with_residual(changed, IS_PAIR | IS_LOADED) if joined or loaded else changed
    return pl.concat([without_attribution(new), changed.select(list(FULL_SCHEMA))])


def _with_other_sides(
    transaction: Transaction, identifiers: Identifiers, made: pl.DataFrame
) -> tuple[pl.DataFrame, list[str]]:
    """Engine rows completed by clients' rows of the same call, which then have no row of their own; `gone`: those stored."""
    window = [_low(made) - NEAR_NS, _high(made) + NEAR_NS]
    clients = "FROM requests WHERE instance IS NULL AND outcome = 'ok' AND finished_unix_ns BETWEEN ? AND ?"
    if not made["instance"].null_count() and transaction.query(f"SELECT 1 {clients} LIMIT 1", window).is_empty():
        return made, []
    engine = made.filter(pl.col("instance").is_not_null())
    client = made.filter(pl.col("instance").is_null())
    stored_clients = transaction.query(f"SELECT * {clients}", window)
    gone: list[str] = []
    everyone = pl.concat([typed(client.filter(pl.col("outcome") == "ok")), typed(stored_clients)]).unique("request_key")
    if not engine.is_empty() and not everyone.is_empty():
        pairs = identifiers.pairs(engine, everyone)
        engine = filled(engine, everyone, pairs, CLIENT_COLUMNS)
        gone = pairs["other"].unique().to_list()
        client = client.filter(~pl.col("request_key").is_in(gone))
    answered = client.filter((pl.col("outcome") == "ok") & pl.col("client_request_id").is_not_null())
    if not answered.is_empty():
        stored_engines = transaction.query(
            "SELECT * FROM requests WHERE instance IS NOT NULL AND finished_unix_ns BETWEEN ? AND ?", window
        )
        pairs = identifiers.pairs(typed(stored_engines), answered)
        if not pairs.is_empty():
            hit = typed(stored_engines).join(pairs, on="request_key", how="semi")
            completed = filled(hit, answered, pairs, CLIENT_COLUMNS).select(list(REQUEST_SCHEMA))
            others = engine.filter(~pl.col("request_key").is_in(completed["request_key"].to_list()))
            engine = pl.concat([others, completed])
            client = client.filter(~pl.col("request_key").is_in(pairs["other"].to_list()))
    return pl.concat([engine, client]), gone


def _supplemented(
    transaction: Transaction, identifiers: Identifiers, rows: pl.DataFrame, supplements: pl.DataFrame
) -> pl.DataFrame:
    """Rows with what supplements say; a supplement whose row has not come waits in its table, for an hour (`lone_halves`)."""
    held = "SELECT 1 FROM supplements WHERE source IS DISTINCT FROM ? LIMIT 1"
    if supplements.is_empty() and transaction.query(held, [TIER_SOURCE]).is_empty():
        return rows
    incoming = typed(supplements)
    window = [min(_low(rows), _low(incoming)) - NEAR_NS, max(_high(rows), _high(incoming)) + NEAR_NS]
    named = pl.concat([rows["request_id"], incoming["request_id"]]).drop_nulls().unique().to_frame()
    waiting = typed(
        transaction.query(
            "SELECT * FROM supplements WHERE finished_unix_ns BETWEEN ? AND ? AND source IS DISTINCT FROM ? "
            "AND (output_tokens IS NULL OR source = ? OR request_id IN (SELECT request_id FROM named))",
            [*window, TIER_SOURCE, PREFILL_SOURCE],
            named=named,
        )
    )
    everything = pl.concat([incoming, waiting]).unique("request_key", keep="first")
    if everything.is_empty():
        return rows
    known = rows["request_key"].to_list()
    stored = _possible(transaction, everything, window)
    candidates = pl.concat([rows, stored.filter(~pl.col("request_key").is_in(known))])
    others = everything.filter(~IS_HALF)
    told = identifiers.sequences(candidates, others)
    # Halves that were given up are rows as well, under the identifier of their pair.
    pairs = pl.concat([told, identifiers.pairs(candidates.filter(~IS_HALF), everything.filter(IS_HALF))])
    used = pairs.select(pl.col("other").alias("request_key")).unique()
    done = pl.concat([used, incoming.select("request_key")]).unique()
    transaction.run("DELETE FROM supplements WHERE request_key IN (SELECT request_key FROM done)", done=done)
    transaction.insert("supplements", incoming.join(used, on="request_key", how="anti").select(list(REQUEST_SCHEMA)))
    touched = candidates.filter(pl.col("request_key").is_in([*known, *pairs["request_key"].to_list()]))
    return with_prefill(filled(touched, others, told, SUPPLEMENT_COLUMNS), everything, pairs)


def _possible(transaction: Transaction, supplements: pl.DataFrame, window: list[int]) -> pl.DataFrame:
    """Stored rows that supplements may be of. An hour of rows is wide and long, so those of an exact identifier are found by it."""
    loose = supplements["output_tokens"].null_count() > 0 or PREFILL_SOURCE in supplements["source"]
    named = supplements.select("request_id").drop_nulls().unique()
    chosen = "" if loose else "AND request_id IN (SELECT request_id FROM named)"
    keys = transaction.query(
        "SELECT request_key, finished_unix_ns FROM requests "
        f"WHERE instance IS NOT NULL AND finished_unix_ns BETWEEN ? AND ? {chosen}",
        window,
        named=named,
    )
    if keys.is_empty():
        return typed(keys)
    return typed(
        transaction.query(
            "SELECT * FROM requests r SEMI JOIN keys k ON r.request_key = k.request_key "
            "WHERE r.finished_unix_ns BETWEEN ? AND ?",
            [_low(keys), _high(keys)],
            keys=keys,
        )
    )


def replace_rows(transaction: Transaction, rows: pl.DataFrame, stored: Sequence[str]) -> None:
    """Write whole rows; those in the table under the keys `stored` go."""
    if stored:
        own = rows.filter(pl.col("request_key").is_in(list(stored)))
        delete_rows(transaction, own.select("request_key"), _low(own) - NEAR_NS, _high(own) + NEAR_NS)
    transaction.insert("requests", rows)


def update_rows(transaction: Transaction, rows: pl.DataFrame) -> None:
    """Set columns of stored rows. `rows`: their place in the table (`row`, DuckDB's rowid, which holds within a transaction),
    request_key, finished_unix_ns, and the columns to set."""
    if rows.is_empty():
        return
    _update(transaction, rows)


def finish_rows(transaction: Transaction, rows: pl.DataFrame) -> None:
    """The same for rows that become final by it; `revision` is counted on in the table."""
    set_revision = "final = TRUE, revision = coalesce(requests.revision + 1, 0)"
    _update(transaction, rows, set_revision)


def _update(transaction: Transaction, rows: pl.DataFrame, *settings: str) -> None:
    kept = ("row", "request_key", "finished_unix_ns")
    columns = [f"{name} = n.{name}" for name in rows.columns if name not in kept]
    transaction.run(
        f"UPDATE requests SET {', '.join([*settings, *columns])} FROM news n WHERE requests.rowid = n.row "
        "AND requests.finished_unix_ns BETWEEN ? AND ?",
        [_low(rows), _high(rows)],
        news=rows.drop("request_key").sort("row"),  # in another order DuckDB takes many times as long
    )


def delete_rows(transaction: Transaction, keys: pl.DataFrame, low: int, high: int) -> None:
    """Delete rows of these keys that finished between `low` and `high` (the range keeps the look-up small)."""
    transaction.run(
        "DELETE FROM requests WHERE finished_unix_ns BETWEEN ? AND ? AND request_key IN (SELECT request_key FROM gone)",
        [low, high],
        gone=keys,
    )


def replace_turns(transaction: Transaction, traces: pl.DataFrame, turns: pl.DataFrame) -> None:
    """Write the turns of some traces (column trace_id); what those traces had before goes, a root may have come late."""
    transaction.run("DELETE FROM turns WHERE trace_id IN (SELECT trace_id FROM traces)", traces=traces)
    transaction.insert("turns", turns)


def _low(rows: pl.DataFrame) -> int:
    value = rows["finished_unix_ns"].min()
    return int(value) if isinstance(value, int) else 2**61


def _high(rows: pl.DataFrame) -> int:
    value = rows["finished_unix_ns"].max()
    return int(value) if isinstance(value, int) else 0
