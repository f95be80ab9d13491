"""What a KV tier beside the engine (LMCache's server) tells of a request: how long its KV was looked up and loaded from there.

The tier has traces of its own, joined by the identifier that the engine gave the request inside. Engines load while the request stands in
their queue, or within its prefill: what lies there is taken out of that phase and is context (of it `kv_load_s`), so the phases still add up to the request.
Both run on one machine and its clock; a load that lies in neither of them tells nothing of the request's time.
"""

from __future__ import annotations

import polars as pl

from phasewise.collector.attribution import typed
from phasewise.collector.completion import NEAR_NS
from phasewise.collector.disaggregation import with_residual
from phasewise.collector.durations import seconds
from phasewise.collector.profiles import Profiles
from phasewise.collector.requests import REQUEST_SCHEMA
from phasewise.collector.transaction import Transaction

# `source` of a row that only tells of the KV of another. Of its times, `queued` is when the lookup began, `scheduled` and `first_token`
# when the load began and ended; `context_s` are both together; `client_request_id` is the identifier as the engine's client knows it.
TIER_SOURCE = "otlp:kv_tier"
IS_TIER = (pl.col("source") == TIER_SOURCE).fill_null(False)
QUALITY = "kv_load"
IS_LOADED = pl.col("quality").fill_null("").str.contains(f'"{QUALITY}"', literal=True)
# What a row has from its load: made anew of the engine's span alone, it says something else of these.
OF_LOAD = ("queue_s", "context_s", "prefill_s", "kv_load_s", "residual_s", "quality")
_TOLD = ("context_s", "queued_unix_ns", "scheduled_unix_ns", "first_token_unix_ns")


def marked(profiles: Profiles, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of supplements (REQUEST_SCHEMA), those of KV tiers with their source and the identifier without its random tail."""
    for profile in profiles.ordered:
        if profile.kv_tier:
            own = (pl.col("engine") == profile.id).fill_null(False)
            bare = pl.col("request_id").str.replace(profile.id_tail, "") if profile.id_tail else pl.col("request_id")
            rows = rows.with_columns(
                pl.when(own).then(pl.lit(TIER_SOURCE)).otherwise("source").alias("source"),
                pl.when(own).then(bare).otherwise("client_request_id").alias("client_request_id"),
            )
    return rows


def with_loads(transaction: Transaction, rows: pl.DataFrame, tiers: pl.DataFrame) -> pl.DataFrame:
    """`rows` (whole ones) with what `tiers` and those that wait tell, and the stored rows that they tell of; a tier's word whose row has
    not come waits among the supplements."""
    if (
        tiers.is_empty()
        and transaction.query("SELECT 1 FROM supplements WHERE source = ? LIMIT 1", [TIER_SOURCE]).is_empty()
    ):
        return rows
    incoming = typed(tiers)
    waiting = _waiting(transaction, rows)
    everything = pl.concat([incoming, waiting]).unique("request_key", keep="first", maintain_order=True)
    if everything.is_empty():
        return rows
    stored = _stored(transaction, incoming)
    candidates = pl.concat([rows, stored.filter(~pl.col("request_key").is_in(rows["request_key"].to_list()))])
    pairs = _pairs(candidates.filter(~IS_LOADED), everything)
    used = pairs.select(pl.col("other").alias("request_key"))
    done = pl.concat([used, incoming.select("request_key")]).unique()
    transaction.run("DELETE FROM supplements WHERE request_key IN (SELECT request_key FROM done)", done=done)
    transaction.insert("supplements", incoming.join(used, on="request_key", how="anti").select(list(REQUEST_SCHEMA)))
    touched = [*rows["request_key"].to_list(), *pairs["request_key"].to_list()]
    return _loaded(candidates.filter(pl.col("request_key").is_in(touched)), everything, pairs)


def loaded(rows: pl.DataFrame, tiers: pl.DataFrame) -> pl.DataFrame:
    """`rows` with what `tiers` (both REQUEST_SCHEMA) tell of them."""
    return _loaded(rows, tiers, _pairs(rows.filter(~IS_LOADED), tiers))


def _waiting(transaction: Transaction, rows: pl.DataFrame) -> pl.DataFrame:
    named = rows.select("request_id").drop_nulls().unique()
    return typed(
        transaction.query(
            "SELECT * FROM supplements WHERE source = ? AND (request_id IN (SELECT request_id FROM named) "
            "OR client_request_id IN (SELECT request_id FROM named))",
            [TIER_SOURCE],
            named=named,
        )
    )


def _stored(transaction: Transaction, tiers: pl.DataFrame) -> pl.DataFrame:
    """Rows in the table that words of tiers may be of, found by the exact identifier: an hour of rows is wide and long."""
    named = pl.concat([tiers["request_id"], tiers["client_request_id"]]).drop_nulls().unique().alias("name").to_frame()
    low, high = tiers["finished_unix_ns"].min(), tiers["finished_unix_ns"].max()
    if not isinstance(low, int) or not isinstance(high, int):
        return typed(tiers.clear())
    return typed(
        transaction.query(
            "SELECT * FROM requests WHERE instance IS NOT NULL AND finished_unix_ns BETWEEN ? AND ? "
            "AND request_id IN (SELECT name FROM named)",
            [low - NEAR_NS, high + NEAR_NS],
            named=named,
        )
    )


def _pairs(rows: pl.DataFrame, tiers: pl.DataFrame) -> pl.DataFrame:
    """request_key of a row and `other` of the tier's word on it, one to one: an identifier that several share matches nothing."""
    names = pl.concat(
        tiers.select(
            pl.col("request_key").alias("other"),
            pl.col("arrival_unix_ns").alias("_at"),
            pl.col(name).alias("request_id"),
        )
        for name in ("request_id", "client_request_id")
    )
    known = rows.filter(pl.col("request_id").is_not_null() & pl.col("instance").is_not_null())
    found = (
        known.select("request_key", "request_id", "arrival_unix_ns")
        .join(names.unique(), on="request_id", how="inner")
        .filter((pl.col("arrival_unix_ns") - pl.col("_at")).abs() < NEAR_NS)
        .select("request_key", "other")
        .unique()
    )
    sole = (pl.len().over("other") == 1) & (pl.len().over("request_key") == 1)
    return found.filter(sole)


def _loaded(rows: pl.DataFrame, tiers: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    donors = tiers.select(pl.col("request_key").alias("other"), *(pl.col(name).alias(f"_t:{name}") for name in _TOLD))
    joined = rows.join(pairs, on="request_key", how="left", maintain_order="left").join(
        donors, on="other", how="left", maintain_order="left"
    )
    loading_ns = (pl.col("_t:first_token_unix_ns") - pl.col("_t:scheduled_unix_ns")).fill_null(0)
    looking_ns = (pl.col("_t:context_s") * 1e9).round().cast(pl.Int64) - loading_ns
    times = (
        (pl.col("_t:queued_unix_ns"), pl.col("_t:queued_unix_ns") + looking_ns),
        (pl.col("_t:scheduled_unix_ns"), pl.col("_t:first_token_unix_ns")),
    )
    queued = _inside(times, "queued_unix_ns", "scheduled_unix_ns")
    prefilled = _inside(times, "scheduled_unix_ns", "first_token_unix_ns")
    placed = joined.with_columns(
        pl.min_horizontal(queued, pl.col("queue_s").fill_null(0.0)).alias("_of_queue_s"),
        pl.min_horizontal(prefilled, pl.col("prefill_s").fill_null(0.0)).alias("_of_prefill_s"),
        pl.all_horizontal(pl.col(name).is_null() for name in ("queue_s", "prefill_s", "combined_s")).alias("_whole"),
    ).with_columns(
        pl.when("_whole")
        .then("_t:context_s")
        .otherwise(pl.col("_of_queue_s") + pl.col("_of_prefill_s"))
        .alias("_load_s")
    )
    loaded = (pl.col("_load_s") > 0).fill_null(False)
    longer = pl.coalesce(pl.col("quality").str.strip_suffix("]") + f',"{QUALITY}"]', pl.lit(f'["{QUALITY}"]'))
    told = placed.with_columns(
        pl.when(loaded).then(pl.col("queue_s") - pl.col("_of_queue_s")).otherwise("queue_s").alias("queue_s"),
        pl.when(loaded).then(pl.col("prefill_s") - pl.col("_of_prefill_s")).otherwise("prefill_s").alias("prefill_s"),
        pl.when(loaded)
        .then(pl.col("context_s").fill_null(0.0) + pl.col("_load_s"))
        .otherwise("context_s")
        .alias("context_s"),
        pl.when(loaded).then("_load_s").otherwise("kv_load_s").alias("kv_load_s"),
        pl.when(loaded).then(longer).otherwise("quality").alias("quality"),
        pl.when(loaded).then(_sourced()).otherwise("provenance").alias("provenance"),
    )
    return with_residual(told, loaded).select(rows.columns)


def _inside(times: tuple[tuple[pl.Expr, pl.Expr], ...], low: str, high: str) -> pl.Expr:
    """Seconds of some intervals between two moments of the row; 0 where one of them is unknown."""
    shares = [pl.min_horizontal(end, pl.col(high)) - pl.max_horizontal(start, pl.col(low)) for start, end in times]
    known = pl.col(low).is_not_null() & pl.col(high).is_not_null()
    whole = [
        pl.when(known & start.is_not_null() & end.is_not_null() & (share > 0)).then(share).otherwise(0)
        for share, (start, end) in zip(shares, times, strict=True)
    ]
    return seconds(pl.sum_horizontal(whole))


def _sourced() -> pl.Expr:
    """The provenance with where the context is from, as text; a row that said it already says so still."""
    said = pl.col("provenance").fill_null("{}")
    rest = pl.when(said == "{}").then(pl.lit("}")).otherwise(pl.lit(",") + said.str.strip_prefix("{"))
    longer = pl.concat_str(pl.lit('{"context_s":"measured:span"'), rest)
    return pl.when(said.str.contains('"context_s":', literal=True)).then(said).otherwise(longer)
