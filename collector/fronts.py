"""Requests that only their shape or their place in the trace tells: spans with phases as children, and the spans of routers and
workers, which are a call's boundary above an engine's span and the request itself where no engine tells of it.
"""

from __future__ import annotations

import polars as pl

from phasewise.collector import trees
from phasewise.collector.keys import span_keys
from phasewise.collector.profiles import PHASE, UNMAPPED, Profiles

SPAN = ["trace_id", "span_id"]
NODE = ["trace_id", "node"]
LEAST_PHASES = 2


def with_shapes(profiles: Profiles, spans: pl.DataFrame) -> pl.DataFrame:
    """`spans` (classified), where an unknown one with at least two different phases right below it is the request."""
    for profile in (one for one in profiles.ordered if one.of_parts):
        phases = spans.filter((pl.col("role") == PHASE) & (pl.col("profile") == profile.id))
        if phases.is_empty():
            continue
        field = {name: column for column, part in profile.slices.items() for name in part.names}
        parents = (
            phases.with_columns(pl.col("name").replace_strict(field, default=None).alias("_field"))
            .group_by("trace_id", pl.col("parent_span_id").alias("span_id"))
            .agg(pl.col("_field").drop_nulls().n_unique().alias("_phases"))
            .filter(pl.col("_phases") >= LEAST_PHASES)
            .select(*SPAN, pl.lit(True).alias("_request"))
        )
        marked = spans.join(parents, on=SPAN, how="left", maintain_order="left")
        chosen = pl.col("_request").fill_null(False) & (pl.col("role") == UNMAPPED)
        spans = marked.with_columns(
            pl.when(chosen).then(pl.lit("engine")).otherwise("role").alias("role"),
            pl.when(chosen).then(pl.lit(profile.id)).otherwise("profile").alias("profile"),
        ).drop("_request")
    return spans


def with_fronts(profiles: Profiles, spans: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """`spans` (classified), where the outermost front without an engine's span below has role engine; and the request keys that
    the other fronts would have, or had before more of their trace came.
    """
    serving = [profile.id for profile in profiles.ordered if profile.serves]
    front = pl.col("profile").is_in(serving).fill_null(False) & (pl.col("role") == "client")
    fronts = spans.filter(front).select(*SPAN, "parent_span_id", "role")
    if fronts.is_empty():
        return spans, []
    engines = spans.filter(pl.col("role") == "engine").select(fronts.columns)
    known = spans.filter(pl.col("role") != "startup").with_columns(front.alias("front"))
    nodes = pl.concat([fronts, engines])
    roles = nodes.select("trace_id", pl.col("span_id").alias("node"), pl.col("role").alias("node_role"))
    above = trees.ancestors(nodes, known, ("front",)).filter("front").join(roles, on=NODE, how="inner")
    boundaries = above.filter(pl.col("node_role") == "engine").select(SPAN)
    inner = above.filter(pl.col("node_role") == "client").select("trace_id", pl.col("node").alias("span_id"))
    others = pl.concat([boundaries, inner]).unique()
    chosen = fronts.join(others, on=SPAN, how="anti").select(*SPAN, pl.lit(True).alias("_request"))
    marked = spans.join(chosen, on=SPAN, how="left", maintain_order="left")
    role = pl.when(pl.col("_request").fill_null(False)).then(pl.lit("engine")).otherwise("role").alias("role")
    return marked.with_columns(role).drop("_request"), span_keys(others["trace_id"], others["span_id"]).to_list()
