"""Requests that one engine prefills and another decodes: two spans of two processes that are one request.

The prefill half gives queue, context and prefill, the decode half the tokens and everything after. The halves are found by an
attribute that both carry, or by what stands above them in one trace; where more than one of either could be meant they stay apart.
"""

from __future__ import annotations

import polars as pl

from phasewise.collector import trees
from phasewise.collector.detection import condition
from phasewise.collector.durations import added
from phasewise.collector.profiles import Profiles
from phasewise.rules.engine_profile import EngineProfile

SPAN = ["trace_id", "span_id"]
SCHEMA = {"trace_id": pl.String, "span_id": pl.String, "half": pl.String, "pair": pl.String}
PREFILL_SOURCE = "otlp:prefill"  # `source` of a row that is only the prefill half of another
IS_HALF = (pl.col("source") == PREFILL_SOURCE).fill_null(False)
QUALITY = "disaggregated"
_OF_PREFILL = (
    "queue_s", "context_s", "prefill_s", "queue_slot_s", "queue_kv_s", "queue_budget_s", "queue_window_s", "queue_policy_s",
    "queue_upstream_s", "kv_load_s", "queued_unix_ns", "scheduled_unix_ns", "combined_s", "combined_covers",
)  # fmt: skip
_EITHER = ("input_tokens", "cached_tokens", "model", "tenant", "route", "request_class", "priority")
# What a row has from its pair: made anew of the decode half alone, it says something else of these.
OF_PAIR = (*_OF_PREFILL, *_EITHER, "e2e_s", "ttft_s", "residual_s", "arrival_unix_ns", "quality")
IS_PAIR = pl.col("quality").fill_null("").str.contains(QUALITY, literal=True)
_PHASES = ("queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s")


def halves_of(profiles: Profiles, spans: pl.DataFrame, engines: pl.DataFrame) -> pl.DataFrame:
    """Engine spans that are half a request (SCHEMA). spans: classified; engines: those of engines among them."""
    found = [pl.DataFrame(schema=SCHEMA)]
    for profile in profiles.ordered:
        told = profile.disaggregated
        if told is not None and told.key:
            own = engines.filter(pl.col("profile") == profile.id)
            found.append(_by_key(own, profile) if not own.is_empty() else found[0])
    found.append(_by_trace(profiles, spans, engines))
    return pl.concat(found).unique(SPAN, keep="first", maintain_order=True)


def _by_key(own: pl.DataFrame, profile: EngineProfile) -> pl.DataFrame:
    assert profile.disaggregated is not None
    value = pl.col("attributes").str.extract(rf'"{profile.disaggregated.key}":"?([^",}}]+)')
    return (
        own.with_columns(_half(profile), pl.concat_str(pl.lit(f"{profile.id}:"), value).alias("pair"))
        .filter(pl.col("half").is_not_null() & pl.col("pair").is_not_null())
        .select(list(SCHEMA))
    )


def _half(profile: EngineProfile) -> pl.Expr:
    told = profile.disaggregated
    assert told is not None
    prefill, decode = condition(told.prefill), condition(told.decode)
    return pl.when(prefill).then(pl.lit("prefill")).when(decode).then(pl.lit("decode")).alias("half")


def _by_trace(profiles: Profiles, spans: pl.DataFrame, engines: pl.DataFrame) -> pl.DataFrame:
    """Halves below the spans of a router that say which half they are, under the same front."""
    routers = [p for p in profiles.ordered if p.disaggregated is not None and not p.disaggregated.key]
    nothing = pl.DataFrame(schema=SCHEMA)
    detectors = [d for p in routers if p.disaggregated for d in (p.disaggregated.prefill, p.disaggregated.decode)]
    names = {name for detector in detectors for name in detector.names}
    if engines.height < 2 or not spans["name"].is_in(list(names)).any():
        return nothing
    half = pl.coalesce(_half(profile) for profile in routers).alias("half")
    serving = [p.id for p in profiles.ordered if p.serves]
    known = spans.with_columns(half).with_columns(
        (pl.col("profile").is_in(serving).fill_null(False) & pl.col("half").is_null()).alias("front")
    )
    chain = trees.ancestors(engines.select(*SPAN, "parent_span_id"), known, ("half", "front"))
    told = (
        chain.filter(pl.col("half").is_not_null())
        .sort("depth")
        .group_by("trace_id", "node", maintain_order=True)
        .first()
    )
    above = chain.filter("front").join(
        told.select("trace_id", "node", pl.col("depth").alias("_at")), on=["trace_id", "node"]
    )
    fronts = (
        above.filter(pl.col("depth") > pl.col("_at"))
        .sort("depth")
        .group_by("trace_id", "node", maintain_order=True)
        .first()
    )
    pairs = told.select("trace_id", "node", "half").join(
        fronts.select("trace_id", "node", pl.concat_str("trace_id", pl.lit("/"), "span_id").alias("pair")),
        on=["trace_id", "node"],
        how="inner",
    )
    one_of_each = (pl.len().over("pair") == 2) & (pl.col("half").n_unique().over("pair") == 2)
    return pairs.filter(one_of_each).rename({"node": "span_id"}).select(list(SCHEMA))


def marked(rows: pl.DataFrame, halves: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of engine spans without those of prefill halves, and these, which wait for theirs; both carry the pair's name as the
    identifier that they share."""
    if halves.is_empty():
        return rows, rows.clear()
    joined = rows.join(halves, on=SPAN, how="left", maintain_order="left")
    shared = joined.with_columns(
        pl.when(pl.col("half").is_not_null())
        .then(pl.col("pair"))
        .otherwise("client_request_id")
        .alias("client_request_id"),
        pl.when(pl.col("half") == "prefill").then(pl.lit(PREFILL_SOURCE)).otherwise("source").alias("source"),
    )
    prefill = (pl.col("half") == "prefill").fill_null(False)
    return shared.filter(~prefill).select(rows.columns), shared.filter(prefill).select(rows.columns)


def with_prefill(rows: pl.DataFrame, others: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """`rows` with the queue, context and prefill of the prefill half they are paired with.

    Where decoding was asked for after prefilling ended, the durations of both are added up; where both were asked at once (SGLang), the
    decode half spans the whole request. Never a difference of two hosts' clocks.
    """
    halves = others.filter(pl.col("source") == PREFILL_SOURCE)
    own = pairs.join(halves.select(pl.col("request_key").alias("other")), on="other", how="semi")
    if own.is_empty():
        return rows
    wanted = (*_OF_PREFILL, *_EITHER, "e2e_s", "arrival_unix_ns", "finished_unix_ns")
    donors = halves.select(pl.col("request_key").alias("other"), *(pl.col(n).alias(f"_p:{n}") for n in wanted))
    joined = rows.join(own, on="request_key", how="left", maintain_order="left").join(
        donors, on="other", how="left", maintain_order="left"
    )
    paired = pl.col("other").is_not_null()
    after = paired & (pl.col("arrival_unix_ns") >= pl.col("_p:finished_unix_ns"))
    longer = {
        name: pl.when(after).then(pl.col(name) + pl.col("_p:e2e_s")).otherwise(name).alias(name)
        for name in ("e2e_s", "ttft_s")
    }
    quality = pl.coalesce(pl.col("quality").str.strip_suffix("]") + f',"{QUALITY}"]', pl.lit(f'["{QUALITY}"]'))
    told = joined.with_columns(
        *(pl.when(paired).then(f"_p:{name}").otherwise(name).alias(name) for name in _OF_PREFILL),
        *(pl.when(paired).then(pl.coalesce(f"_p:{name}", name)).otherwise(name).alias(name) for name in _EITHER),
        *longer.values(),
        pl.when(after).then("_p:arrival_unix_ns").otherwise("arrival_unix_ns").alias("arrival_unix_ns"),
        pl.when(paired & ~IS_PAIR).then(quality).otherwise("quality").alias("quality"),
    )
    return with_residual(told, paired).select(rows.columns)


def with_residual(rows: pl.DataFrame, chosen: pl.Expr) -> pl.DataFrame:
    """`rows`, those chosen with what their phases leave of their end-to-end time."""
    residual = pl.col("e2e_s") - added(_PHASES)
    return rows.with_columns(pl.when(chosen).then(residual).otherwise("residual_s").alias("residual_s"))
