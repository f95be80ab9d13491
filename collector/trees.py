"""Shapes of traces, over many traces at once: ancestors, child spans as phases, unions of intervals.

All functions take and give Polars frames; a trace is named by `trace_id`, a span inside it by `span_id`.
"""

from __future__ import annotations

import polars as pl

from phasewise.collector.durations import seconds

MAX_DEPTH = 64  # a parent chain longer than that is a loop
_LINK = ("trace_id", "span_id")


def ancestors(nodes: pl.DataFrame, spans: pl.DataFrame, keep: tuple[str, ...]) -> pl.DataFrame:
    """Every ancestor of every node that is among `spans`.

    nodes: trace_id, span_id, parent_span_id. Result: trace_id, node (span id), depth (1 is the parent), span_id of the
    ancestor and its columns `keep`. A missing parent ends the chain; where parents form a ring, the node of it with the smallest
    id counts as its top.
    """
    links = spans.select(*_LINK, "parent_span_id", *keep)
    current = nodes.filter(pl.col("parent_span_id").is_not_null()).select(
        "trace_id", pl.col("span_id").alias("node"), pl.col("parent_span_id").alias("next")
    )
    found = []
    for depth in range(1, MAX_DEPTH + 1):
        if current.is_empty():
            break
        current = current.join(links, left_on=["trace_id", "next"], right_on=list(_LINK), how="inner")
        if current.is_empty():
            break
        level = current.select("trace_id", "node", pl.lit(depth).alias("depth"), pl.col("next").alias("span_id"), *keep)
        found.append(level)
        current = current.filter(pl.col("parent_span_id").is_not_null() & (pl.col("next") != pl.col("node"))).select(
            "trace_id", "node", pl.col("parent_span_id").alias("next")
        )
    if not found:
        schema = links.schema
        columns = {"trace_id": pl.String, "node": pl.String, "depth": pl.Int32, "span_id": pl.String}
        return pl.DataFrame(schema=columns | {name: schema[name] for name in keep})
    chain = pl.concat(found)
    ring = (chain["node"] == chain["span_id"]).any() or len(found) == MAX_DEPTH
    return _without_rings(chain) if ring else chain


def _without_rings(chain: pl.DataFrame) -> pl.DataFrame:
    """Each ancestor once, none above the top of a ring: below it are those that reach themselves."""
    node = ["trace_id", "node"]
    each = chain.sort("depth").unique([*node, "span_id"], keep="first", maintain_order=True)
    itself = pl.col("node") == pl.col("span_id")
    rings = each.filter(itself.any().over(node))
    tops = rings.group_by(node).agg(pl.col("span_id").min().alias("_top"))
    marked = each.join(tops, on=node, how="left", maintain_order="left")
    top_depth = pl.col("depth").filter(pl.col("span_id") == pl.col("_top")).min().over(node)
    below = pl.col("_top").is_null() | ((pl.col("node") != pl.col("_top")) & (pl.col("depth") <= top_depth))
    return marked.filter(below & ~itself).drop("_top")


def owners(parts: pl.DataFrame, roots: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """`parts` (child spans) with `root`, the span id of the request they belong to; parts without one are left out.

    A trace with one request owns all its parts, also those whose parents have not arrived; else the nearest ancestor decides.
    """
    per_trace = roots.group_by("trace_id").agg(pl.len().alias("roots"), pl.col("span_id").first().alias("only"))
    counted = parts.join(per_trace, on="trace_id", how="inner")
    simple = counted.filter(pl.col("roots") == 1).with_columns(pl.col("only").alias("root")).drop("roots", "only")
    shared = counted.filter(pl.col("roots") > 1).drop("roots", "only")
    if shared.is_empty():
        return simple
    scope = spans.join(shared.select("trace_id").unique(), on="trace_id", how="semi")
    marked = scope.join(
        roots.select(*_LINK, pl.lit(True).alias("_is_root")), on=list(_LINK), how="left", maintain_order="left"
    )
    chain = ancestors(shared, marked, ("_is_root",)).filter(pl.col("_is_root"))
    nearest = chain.sort("depth").group_by("trace_id", "node", maintain_order=True).agg(pl.col("span_id").first())
    found = shared.join(
        nearest.rename({"span_id": "root"}), left_on=["trace_id", "span_id"], right_on=["trace_id", "node"], how="inner"
    )
    return pl.concat([simple, found.select(simple.columns)])


def extents(parts: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Per request (columns `by`) and slice name: start_unix_ns (first start), end_unix_ns (last end) over all ranks.

    parts: `by`, name, start_unix_ns, end_unix_ns.
    """
    return parts.group_by(*by, "name").agg(pl.col("start_unix_ns").min(), pl.col("end_unix_ns").max())


def merged(intervals: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Overlapping intervals of each group made one: columns `by`, start_unix_ns, end_unix_ns, disjoint and, within a group, in order."""
    columns = [*by, "start_unix_ns", "end_unix_ns"]
    alone = pl.struct(by).is_unique() if len(by) > 1 else pl.col(by).is_unique()
    real = intervals.filter(pl.col("end_unix_ns") > pl.col("start_unix_ns")).select(*columns, alone.alias("_alone"))
    several = real.filter(~pl.col("_alone"))
    if several.is_empty():  # the most common case, and sorting is dear
        return real.select(columns)
    return pl.concat([real.filter("_alone").select(columns), _joined(several.select(columns), by)])


def _joined(intervals: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    ordered = intervals.sort(*by, "start_unix_ns", "end_unix_ns")
    reached = pl.col("end_unix_ns").cum_max().shift(1).over(by)
    begins = pl.col("start_unix_ns") > reached
    return (
        ordered.with_columns(begins.fill_null(True).cum_sum().over(by).alias("_island"))
        .group_by(*by, "_island", maintain_order=True)
        .agg(pl.col("start_unix_ns").min(), pl.col("end_unix_ns").max())
        .drop("_island")
    )


def union_seconds(intervals: pl.DataFrame, by: list[str], name: str) -> pl.DataFrame:
    """Length of the union of each group's intervals in seconds, as column `name`."""
    length = seconds((pl.col("end_unix_ns") - pl.col("start_unix_ns")).sum())
    return merged(intervals, by).group_by(by).agg(length.alias(name))


def overlaps(spans: pl.DataFrame, disjoint: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Per row of `spans` (columns `by`, name, start, end) the seconds that `disjoint` intervals of its group cover:
    columns `by`, name, overlap_s; without those that have none."""
    pairs = spans.join(disjoint, on=by, how="inner", suffix="_other")
    start = pl.max_horizontal("start_unix_ns", "start_unix_ns_other")
    end = pl.min_horizontal("end_unix_ns", "end_unix_ns_other")
    inside = pairs.select(*by, "name", (end - start).alias("_inside")).filter(pl.col("_inside") > 0)
    return inside.group_by(*by, "name").agg(seconds(pl.col("_inside").sum()).alias("overlap_s"))
