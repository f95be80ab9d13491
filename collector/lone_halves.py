"""Prefill halves of requests whose decode half never came: after an hour they are rows of their own, with what is known.

Where the decode half comes after all, the row goes back among those that wait, and is paired as ever. What comes late of the half
itself changes the row.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from phasewise.collector.attribution import typed, without_attribution
from phasewise.collector.completion import NEAR_NS
from phasewise.collector.disaggregation import IS_HALF, PREFILL_SOURCE
from phasewise.collector.normalize import Normalized
from phasewise.collector.requests import REQUEST_SCHEMA
from phasewise.collector.transaction import Transaction

QUALITY = "decode_missing"
HALVES, OTHERS = "prefill_without_decode", "supplements_without_request"  # counters
# What the half says of itself, and what of the request only its other half would tell.
_UNKNOWN = ("e2e_s", "ttft_s", "tpot_s", "decode_s", "output_tokens", "finish_reason", "residual_s")


def given_up(transaction: Transaction, before_unix_ns: int) -> tuple[pl.DataFrame, int]:
    """Take out of `supplements` what was received before that and found no row: prefill halves as rows of `requests`, unattributed, and
    how many others there were."""
    old = typed(transaction.query("SELECT * FROM supplements WHERE received_unix_ns < ?", [before_unix_ns]))
    if old.is_empty():
        return old, 0
    transaction.execute("DELETE FROM supplements WHERE received_unix_ns < ?", [before_unix_ns])
    halves = old.filter(IS_HALF).unique("request_key", keep="first")
    return without_attribution(_alone(halves)), old.height - halves.height


def renewed(transaction: Transaction, made: Normalized) -> Normalized:
    """The same with those of its prefill halves that were given up as rows again, instead of as supplements: each stands in `requests`."""
    halves = made.supplements.filter(IS_HALF)
    low, high = halves["finished_unix_ns"].min(), halves["finished_unix_ns"].max()
    if not isinstance(low, int) or not isinstance(high, int):
        return made
    found = transaction.query(
        "SELECT r.request_key FROM requests r SEMI JOIN halves h USING (request_key) "
        "WHERE r.source = ? AND r.finished_unix_ns BETWEEN ? AND ?",
        [PREFILL_SOURCE, low - NEAR_NS, high + NEAR_NS],
        halves=halves.select("request_key"),
    )
    if found.is_empty():
        return made
    again = set(found["request_key"])
    own = halves.join(found, on="request_key", how="semi", maintain_order="left")
    return replace(
        made,
        requests=pl.concat([made.requests, _alone(own).select(made.requests.columns)]),
        supplements=made.supplements.join(found, on="request_key", how="anti", maintain_order="left"),
        superseded=[key for key in made.superseded if key not in again],
    )


def _alone(halves: pl.DataFrame) -> pl.DataFrame:
    """Prefill halves as rows that say what is known of a request without the other half."""
    quality = pl.coalesce(pl.col("quality").str.strip_suffix("]") + f',"{QUALITY}"]', pl.lit(f'["{QUALITY}"]'))
    failed = pl.when(pl.col("outcome") != "ok").then("outcome")  # prefilled is not served
    return halves.with_columns(
        *(pl.lit(None, dtype=REQUEST_SCHEMA[name]).alias(name) for name in _UNKNOWN),
        failed.alias("outcome"),
        quality.alias("quality"),
    )


def taken_back(transaction: Transaction, made: pl.DataFrame) -> pl.DataFrame:
    """Rows that were given up and whose other half is among `made`, out of `requests` and waiting again; as they were there."""
    named = made.select("client_request_id").drop_nulls().unique()
    low, high = made["finished_unix_ns"].min(), made["finished_unix_ns"].max()
    if named.is_empty() or not isinstance(low, int) or not isinstance(high, int):
        return typed(made.clear())
    window = [low - NEAR_NS, high + NEAR_NS]
    found = typed(
        transaction.query(
            "SELECT r.* FROM requests r SEMI JOIN named n USING (client_request_id) "
            "WHERE r.source = ? AND r.finished_unix_ns BETWEEN ? AND ?",
            [PREFILL_SOURCE, *window],
            named=named,
        )
    )
    if found.is_empty():
        return found
    transaction.run(
        "DELETE FROM requests WHERE finished_unix_ns BETWEEN ? AND ? AND request_key IN (SELECT request_key FROM back)",
        window,
        back=found.select("request_key"),
    )
    took = (pl.col("finished_unix_ns") - pl.col("arrival_unix_ns")) / 1e9
    waiting = found.with_columns(took.alias("e2e_s"), pl.lit(None, dtype=pl.String).alias("quality"))
    transaction.insert("supplements", waiting.select(list(REQUEST_SCHEMA)))
    return found
