"""Turns: root spans of applications and agents with calls below, as their user sees them."""

from __future__ import annotations

import polars as pl

from phasewise.collector import trees
from phasewise.collector.durations import seconds
from phasewise.collector.keys import span_keys
from phasewise.collector.records import Turn
from phasewise.collector.schemas import polars_schema

TURN_SCHEMA = polars_schema(Turn)
NODE = ["trace_id", "node"]
TOP = ["trace_id", "top"]


def turns_of(
    rows: pl.DataFrame, spans: pl.DataFrame, chain: pl.DataFrame, single: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`rows` with their turn_key, and the turns (TURN_SCHEMA).

    chain: ancestors of calls and tools with `boundary`; single: those that are the boundary of exactly one call. A root that is
    itself the boundary of its only call is a call, not a turn.
    """
    tops = (
        chain.sort("depth", descending=True)
        .group_by(NODE, maintain_order=True)
        .agg(pl.col("span_id").first().alias("top"), pl.col("boundary").first())
    )
    calls = rows.select(
        "trace_id",
        pl.col("span_id").alias("node"),
        "call_key",
        "arrival_unix_ns",
        "finished_unix_ns",
        "ttft_s",
        "entry_ttft_s",
    ).join(tops, on=NODE, how="inner")
    calls_below = pl.col("call_key").n_unique().over(TOP)
    calls = calls.with_columns(calls_below.alias("calls")).filter(~(pl.col("boundary") & (pl.col("calls") == 1)))
    if calls.is_empty():
        return rows, pl.DataFrame(schema=TURN_SCHEMA)
    calls = _with_outer_interval(calls, single)
    roots = spans.join(
        calls.select("trace_id", pl.col("top").alias("span_id")).unique(), on=["trace_id", "span_id"], how="semi"
    )
    roots = roots.with_columns(span_keys(roots["trace_id"], roots["span_id"]).alias("turn_key"))
    tools = (
        spans.filter(pl.col("role") == "tool")
        .select("trace_id", pl.col("span_id").alias("node"), "start_unix_ns", "end_unix_ns")
        .join(tops.select(*NODE, "top"), on=NODE, how="inner")
    )
    keys = roots.select("trace_id", pl.col("span_id").alias("top"), "turn_key")
    by_call = calls.join(keys, on=TOP, how="left").select("trace_id", pl.col("node").alias("span_id"), "turn_key")
    keyed = rows.drop("turn_key").join(by_call, on=["trace_id", "span_id"], how="left", maintain_order="left")
    return keyed.select(rows.columns), _turn_rows(roots, calls, tools)


def _with_outer_interval(calls: pl.DataFrame, single: pl.DataFrame) -> pl.DataFrame:
    """start_unix_ns and end_unix_ns of each call at its outer boundary, on that boundary's clock."""
    outermost = (
        single.sort("depth", descending=True)
        .group_by(NODE, maintain_order=True)
        .agg(pl.col("start_unix_ns").first(), pl.col("end_unix_ns").first())
    )
    joined = calls.join(outermost, on=NODE, how="left")
    return joined.with_columns(
        pl.coalesce("start_unix_ns", "arrival_unix_ns").alias("start_unix_ns"),
        pl.coalesce("end_unix_ns", "finished_unix_ns").alias("end_unix_ns"),
    )


def _turn_rows(roots: pl.DataFrame, calls: pl.DataFrame, tools: pl.DataFrame) -> pl.DataFrame:
    intervals = calls.select(*TOP, "start_unix_ns", "end_unix_ns")
    both = pl.concat([intervals, tools.select(intervals.columns)])
    covered = trees.union_seconds(both, TOP, "covered_s")
    called = trees.union_seconds(intervals, TOP, "calls_s")
    frame = (
        roots.rename({"span_id": "top"})
        .join(_last_call(calls), on=TOP, how="inner")
        .join(called, on=TOP, how="left")
        .join(covered, on=TOP, how="left")
    )
    calls_s = pl.col("calls_s").fill_null(0.0)
    covered_s = pl.col("covered_s").fill_null(0.0)
    length = seconds(pl.col("end_unix_ns") - pl.col("start_unix_ns"))
    e2e = pl.when(length >= 0).then(length)
    # The engine's clock and the client's differ: only durations of one side are added.
    before_call = seconds(pl.col("_call_start") - pl.col("start_unix_ns"))
    return frame.select(
        "turn_key",
        "trace_id",
        "name",
        pl.col("start_unix_ns").alias("arrival_unix_ns"),
        pl.col("end_unix_ns").alias("finished_unix_ns"),
        pl.col("calls").cast(pl.Int64),
        calls_s.alias("calls_s"),
        (covered_s - calls_s).alias("external_s"),
        (e2e - covered_s).alias("unattributed_s"),
        (before_call + pl.col("_call_ttft_s")).alias("ttft_s"),
        e2e.alias("e2e_s"),
        pl.lit(None, dtype=pl.String).alias("tenant"),
    )


def _last_call(calls: pl.DataFrame) -> pl.DataFrame:
    return (
        calls.sort("start_unix_ns")
        .group_by(TOP, maintain_order=True)
        .agg(
            pl.col("calls").last(),
            pl.col("start_unix_ns").last().alias("_call_start"),
            pl.coalesce("entry_ttft_s", "ttft_s").last().alias("_call_ttft_s"),
        )
    )
