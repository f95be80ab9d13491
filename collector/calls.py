"""Calls: which client spans are the same call as an engine's span, and which calls never reached an engine.

A client's, gateway's or HTTP server's span is the same call as the engine's only as its ancestor in the same trace; siblings
never merge. The outermost such span with exactly this call below it is the call's outer boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from phasewise.collector import skews, trees
from phasewise.collector.durations import seconds
from phasewise.collector.profiles import Profiles
from phasewise.collector.requests import empty_requests, requests_of
from phasewise.collector.turns import TURN_SCHEMA, turns_of
from phasewise.rules.engine_profile import EngineProfile

HOUR_NS = 3600 * 10**9
SPAN = ["trace_id", "span_id"]
NODE = ["trace_id", "node"]
SKEW_NS = 1_000_000
LATE_NS = 5_000_000  # an answer may be read a little before its server's span ends
_CLIENT_KIND = 3
_KEEP = ("host", "role", "profile", "name", "kind", "start_unix_ns", "end_unix_ns", "status_code")
# What a client's own span tells of the call, where the engine's span says nothing.
_FROM_CLIENT = ("client_request_id", "model", "finish_reason", "input_tokens", "output_tokens", "cached_tokens")
_ABORTED = "(?i)cancel|abort|disconnect|timeout|timed out"


@dataclass(frozen=True, slots=True)
class Calls:
    """requests: engine rows completed by their clients, and rows of clients without an engine span;
    superseded: keys of client spans that belong to an engine's row and have none of their own; skews: what the calls between hosts
    tell of their clocks (skews.SCHEMA)."""

    requests: pl.DataFrame
    turns: pl.DataFrame
    superseded: list[str]
    skews: pl.DataFrame


def calls_of(profiles: Profiles, spans: pl.DataFrame, engine_rows: pl.DataFrame) -> Calls:
    """Join the sides of each call. spans: classified, with identities; engine_rows: rows of the engine spans among them."""
    clients = spans.filter(pl.col("role") == "client")
    sides = spans.filter(pl.col("role").is_in(["engine", "client", "tool"]))
    if (
        clients.is_empty() and not sides["parent_span_id"].count()
    ):  # nothing stands above any call: there is nothing to join
        return Calls(engine_rows, pl.DataFrame(schema=TURN_SCHEMA), [], pl.DataFrame(schema=skews.SCHEMA))
    calls = engine_rows.select(*SPAN, "call_key")
    nodes = pl.concat(
        [
            spans.join(calls, on=SPAN, how="semi").select(*SPAN, "parent_span_id", "start_unix_ns"),
            spans.filter(pl.col("role").is_in(["client", "tool"])).select(*SPAN, "parent_span_id", "start_unix_ns"),
        ]
    )
    boundary = [p.id for p in profiles.ordered if p.call_boundary]
    chain, stale = _chain(nodes, spans)
    chain = chain.with_columns(pl.col("profile").is_in(boundary).fill_null(False).alias("boundary"))
    engine_chain = chain.join(calls.rename({"span_id": "node"}), on=NODE, how="inner")
    single = _single_call_boundaries(engine_chain)
    rows = with_flag(engine_rows, stale, "wrong_parent")
    across = _across_hosts(chain, spans)
    rows = with_flag(rows, _skewed(across), "clock_skew")
    serving = [p for p in profiles.ordered if p.serves]
    rows = _with_entry(rows, single, spans, [p.id for p in serving])
    telling = [p for p in profiles.ordered if p.role == "client" and p.alone and not p.serves]
    rows, superseded = _with_client(telling, rows, single, clients, (*_FROM_CLIENT, "entry_ttft_s"))
    rows, _ = _with_client(serving, rows, single, clients, _FROM_CLIENT)
    within = chain.filter((pl.col("role") == "client") | pl.col("profile").is_in([p.id for p in serving]))
    own = clients.filter(~pl.col("profile").is_in([p.id for p in serving]))
    rows = pl.concat([rows, _lonely_clients(profiles, own, within, engine_chain)])
    return Calls(*turns_of(rows, spans, chain, single), superseded, skews.bounds_of(across))


def with_flag(rows: pl.DataFrame, chosen: pl.DataFrame, flag: str) -> pl.DataFrame:
    """`flag` added to the JSON list in `quality` of the chosen (trace_id, span_id)."""
    if chosen.is_empty():
        return rows
    marks = chosen.select(SPAN).unique().with_columns(pl.lit(True).alias("_marked"))
    marked = rows.join(marks, on=SPAN, how="left", maintain_order="left")
    longer = pl.coalesce(pl.col("quality").str.strip_suffix("]") + f',"{flag}"]', pl.lit(f'["{flag}"]'))
    return marked.with_columns(pl.when("_marked").then(longer).otherwise("quality").alias("quality")).drop("_marked")


def _chain(nodes: pl.DataFrame, spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ancestors of the nodes, and the nodes whose chain was cut.

    From a start-up span on, or from a parent an hour older on, ancestors are not those of this call: engines fall back to a
    span that was active when the process began. That one is of their own host: a caller elsewhere that waited at least as long as
    the call took is its caller, by a clock that is off.
    """
    chain = trees.ancestors(nodes, spans, _KEEP)
    chain = chain.join(_own(spans), on=NODE, how="left")
    length, own_length = (pl.col(f"end_unix_ns{of}") - pl.col(f"start_unix_ns{of}") for of in ("", "_own"))
    calls_from_elsewhere = ((pl.col("host") != pl.col("host_own")) & (own_length <= length)).fill_null(False)
    older = pl.col("start_unix_ns_own") - pl.col("start_unix_ns") > HOUR_NS
    strange = (pl.col("role") == "startup") | (older & ~calls_from_elsewhere)
    chain = chain.with_columns(pl.col("depth").filter(strange).min().over(NODE).alias("_cut"))
    kept = chain.filter(pl.col("_cut").is_null() | (pl.col("depth") < pl.col("_cut")))
    cut = chain.filter(pl.col("_cut") == 1).select("trace_id", pl.col("node").alias("span_id")).unique()
    return kept.drop("host_own", "start_unix_ns_own", "end_unix_ns_own", "_cut"), cut


def _own(spans: pl.DataFrame) -> pl.DataFrame:
    """What is known of each node itself, beside what its ancestors are."""
    times = ("start_unix_ns", "end_unix_ns")
    return spans.select(
        "trace_id", pl.col("span_id").alias("node"), *(pl.col(c).alias(f"{c}_own") for c in ("host", *times))
    )


def _across_hosts(chain: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Nodes with a parent on another host, by which another clock goes, in the order of their spans."""
    pairs = _own(spans).join(chain.filter(pl.col("depth") == 1), on=NODE, how="inner", maintain_order="left")
    return pairs.filter(pl.col("host").ne_missing(pl.col("host_own")))


def _skewed(across: pl.DataFrame) -> pl.DataFrame:
    """Spans that start before their parent, or end after it although they are no longer: two clocks. Nothing is shifted, and no time
    of one is subtracted from one of the other; who compares the raw times is warned."""
    length, own_length = (pl.col(f"end_unix_ns{of}") - pl.col(f"start_unix_ns{of}") for of in ("", "_own"))
    early = pl.col("start_unix_ns_own") < pl.col("start_unix_ns") - SKEW_NS
    late = (pl.col("end_unix_ns_own") > pl.col("end_unix_ns") + LATE_NS) & (own_length <= length)
    return across.filter(early | late).select("trace_id", pl.col("node").alias("span_id"))


def _single_call_boundaries(engine_chain: pl.DataFrame) -> pl.DataFrame:
    """Boundary ancestors with exactly one call below."""
    calls_below = pl.col("call_key").n_unique().over(SPAN)
    return engine_chain.filter("boundary").with_columns(calls_below.alias("_calls")).filter(pl.col("_calls") == 1)


def _with_entry(rows: pl.DataFrame, single: pl.DataFrame, spans: pl.DataFrame, serving: list[str]) -> pl.DataFrame:
    """The outermost boundary of each row's call: how long it lasts, whose it is, and how much of it lies before the engine's span,
    which only one clock can tell. serving: profiles of routers and gateways, whose spans are a server's whatever kind they have."""
    if single.is_empty():
        return rows
    outside = (pl.col("role") == "client") | (pl.col("kind") == _CLIENT_KIND)
    client = outside & ~pl.col("profile").is_in(serving)
    outermost = (
        single.sort("depth", descending=True)
        .group_by(NODE, maintain_order=True)
        .agg(
            seconds((pl.col("end_unix_ns") - pl.col("start_unix_ns")).first()).alias("_entry_s"),
            pl.when(client.first()).then(pl.lit("client")).otherwise(pl.lit("server")).alias("_side"),
            pl.col("start_unix_ns").first().alias("_outer_start"),
            pl.col("host").first().alias("_outer_host"),
        )
        .with_columns(pl.when(pl.col("_entry_s") >= 0).then("_entry_s").alias("_entry_s"))
    )
    hosts = spans.select(*SPAN, "host").join(outermost, left_on=SPAN, right_on=NODE, how="semi")
    joined = rows.join(outermost, left_on=SPAN, right_on=NODE, how="left", maintain_order="left").join(
        hosts, on=SPAN, how="left", maintain_order="left"
    )
    before = seconds(pl.col("arrival_unix_ns") - pl.col("_outer_start"))
    inside = (pl.col("host") == pl.col("_outer_host")) & before.is_between(0.0, pl.col("_entry_s"))
    known = pl.col("_entry_s").is_not_null()
    return joined.with_columns(
        pl.coalesce("_entry_s", "entry_e2e_s").alias("entry_e2e_s"),
        pl.when(known).then("_side").otherwise("entry_side").alias("entry_side"),
        pl.when(inside.fill_null(False)).then(before).otherwise("entry_before_s").alias("entry_before_s"),
    ).select(rows.columns)


def _with_client(
    telling: list[EngineProfile],
    rows: pl.DataFrame,
    single: pl.DataFrame,
    clients: pl.DataFrame,
    columns: tuple[str, ...],
) -> tuple[pl.DataFrame, list[str]]:
    """Empty `columns` from what spans of the `telling` profiles around the call say of it, the nearest first; and the keys of
    these spans."""
    around = single.filter(pl.col("profile").is_in([p.id for p in telling])).select(
        *NODE, pl.col("span_id").alias("client"), "depth"
    )
    if around.is_empty():
        return rows, []
    own = clients.join(around, left_on=SPAN, right_on=["trace_id", "client"], how="semi")
    told = pl.concat([_alone(profile, own.filter(pl.col("profile") == profile.id)) for profile in telling])
    facts = told.with_columns(pl.col("ttft_s").alias("entry_ttft_s")).select(
        "trace_id", pl.col("span_id").alias("client"), *(pl.col(name).alias(f"_client:{name}") for name in columns)
    )
    nearest = (
        around.join(facts, on=["trace_id", "client"], how="inner")
        .sort("depth")
        .group_by(NODE, maintain_order=True)
        .agg(pl.col(f"_client:{name}").drop_nulls().first() for name in columns)
    )
    joined = rows.join(nearest, left_on=SPAN, right_on=NODE, how="left", maintain_order="left")
    filled = [pl.coalesce(name, f"_client:{name}").alias(name) for name in columns]
    return joined.with_columns(filled).select(rows.columns), told["request_key"].to_list()


def _lonely_clients(
    profiles: Profiles, clients: pl.DataFrame, within: pl.DataFrame, engine_chain: pl.DataFrame
) -> pl.DataFrame:
    """Rows of outermost client spans without an engine span below: refused or aborted calls, or requests of their own.

    within: ancestors that already stand for what lies below them.
    """
    alone = clients.join(engine_chain.select(SPAN).unique(), on=SPAN, how="anti")
    inner = within.select("trace_id", pl.col("node").alias("span_id")).unique()
    alone = alone.join(inner, on=SPAN, how="anti")
    found = []
    for profile in profiles.ordered:
        own = alone.filter(pl.col("profile") == profile.id)
        if not profile.alone:
            own = own.filter(pl.col("status_code") == 2)
        if own.is_empty():
            continue
        says = pl.concat_str("attributes", pl.col("status_message").fill_null(""))
        aborted = own.select(says.str.contains(_ABORTED)).to_series()
        failed = pl.when(aborted).then(pl.lit("aborted")).otherwise(pl.lit("refused"))
        found.append(
            _alone(profile, own).with_columns(
                pl.when(pl.col("outcome") == "ok").then(pl.lit("ok")).otherwise(failed).alias("outcome"),
                pl.col("e2e_s").alias("entry_e2e_s"),
                pl.lit("server" if profile.recorded else "client").alias("entry_side"),
                (pl.lit(None, dtype=pl.Float64) if profile.recorded else pl.col("ttft_s")).alias("entry_ttft_s"),
            )
        )
    return pl.concat(found) if found else empty_requests()


def _alone(profile: EngineProfile, clients: pl.DataFrame) -> pl.DataFrame:
    """Rows of client spans by themselves; the client's process is no replica, so they have no instance."""
    if clients.is_empty():
        return empty_requests()
    rows = requests_of(profile, clients, clients.clear().with_columns(pl.lit("").alias("root")))
    return rows.with_columns(pl.lit(None, dtype=pl.String).alias("instance"), pl.col("request_key").alias("call_key"))
