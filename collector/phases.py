"""The rules of one engine profile applied to its request spans: values, judgement, derivations, moments, residual.

Input and output are frames with one row a request span. Working columns carry the names of the profile; flags of what was
done to a row are collected in list column `_flags`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from graphlib import TopologicalSorter
from operator import add, and_, or_

import polars as pl

from phasewise.collector import trees
from phasewise.collector.durations import seconds
from phasewise.rules.engine_parts import Derivation, Moment
from phasewise.rules.engine_profile import EngineProfile, dependencies

SENTINEL_S = -1.0
CLAMP_S = 0.002  # two clocks disagree by that much: still zero
LONGEST_S = 86_400.0
BEYOND_S, BEYOND_RATIO = (
    0.002,
    0.01,
)  # the larger: nothing inside a request lasts longer than the request by more than that
MOMENTS = ("queued_unix_ns", "scheduled_unix_ns", "first_token_unix_ns")
PHASES = ("queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s")
GROUP = ["trace_id", "root"]


def judged(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Values no duration can have become null, with a flag: sentinel_x, negative_x, range_x; slightly negative ones become 0
    (clamped)."""
    for name in names:
        frame = _judge(frame, name)
    return frame


def _judge(frame: pl.DataFrame, name: str, field: str = "") -> pl.DataFrame:
    value = pl.col(name)
    short = (field or name).removeprefix("own_").removesuffix("_s")
    wrong = (
        pl.when(value == SENTINEL_S)
        .then(pl.lit(f"sentinel_{short}"))
        .when(value.is_nan() | value.is_infinite() | (value > LONGEST_S))
        .then(pl.lit(f"range_{short}"))
        .when(value < -CLAMP_S)
        .then(pl.lit(f"negative_{short}"))
    )
    clamp = (value < 0) & (value >= -CLAMP_S)
    if not frame.select((wrong.is_not_null() | clamp).any()).item():
        return frame
    flag = pl.coalesce(wrong, pl.when(clamp).then(pl.lit("clamped")))
    cleaned = pl.when(wrong.is_not_null()).then(None).when(clamp).then(0.0).otherwise(value)
    return (
        flagged(frame.with_columns(flag.alias("_flag")), pl.col("_flag"))
        .with_columns(cleaned.alias(name))
        .drop("_flag")
    )


def limit_s(e2e: pl.Expr) -> pl.Expr:
    """How long a part of a request that takes `e2e` seconds can be."""
    return e2e + pl.max_horizontal(pl.lit(BEYOND_S), e2e * BEYOND_RATIO)


def bounded(frame: pl.DataFrame, name: str, field: str = "") -> pl.DataFrame:
    """A duration that ends after its request is a contradiction: null, with flag x_beyond_end."""
    beyond = (pl.col(name) > limit_s(pl.col("e2e_s"))).fill_null(False)
    if not frame.select(beyond.any()).item():
        return frame
    short = (field or name).removeprefix("own_").removesuffix("_s")
    frame = flagged(frame.with_columns(beyond.alias("_beyond")), pl.when("_beyond").then(pl.lit(f"{short}_beyond_end")))
    return frame.with_columns(pl.when(~pl.col("_beyond")).then(pl.col(name)).alias(name)).drop("_beyond")


def told_within(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of clients' own records (columns of `requests`) without a TTFT that lies after the end of its call."""
    for ttft, e2e in (("entry_ttft_s", "entry_e2e_s"), ("ttft_s", "e2e_s")):
        beyond = (pl.col(ttft) > limit_s(pl.col(e2e))).fill_null(False)
        longer = pl.coalesce(
            pl.col("quality").str.strip_suffix("]") + ',"ttft_beyond_end"]', pl.lit('["ttft_beyond_end"]')
        )
        told = pl.col("quality").fill_null("").str.contains("ttft_beyond_end", literal=True)
        rows = rows.with_columns(
            pl.when(beyond).then(None).otherwise(ttft).alias(ttft),
            pl.when(beyond & ~told).then(longer).otherwise("quality").alias("quality"),
        )
    return rows


def flagged(frame: pl.DataFrame, flag: pl.Expr) -> pl.DataFrame:
    """`flag` (text or null) added to the row's flags."""
    return frame.with_columns(pl.concat_list("_flags", flag.alias("_new")).alias("_flags"))


def with_slices(frame: pl.DataFrame, profile: EngineProfile, parts: pl.DataFrame) -> pl.DataFrame:
    """Phase seconds from child spans as columns `_slice:x`, and moments from them, joined to the request spans."""
    found = trees.extents(parts)
    interruptions = _interruptions(profile, parts)
    lengths = found.with_columns(seconds(pl.col("end_unix_ns") - pl.col("start_unix_ns")).alias("s"))
    if interruptions is not None:
        inside = trees.overlaps(found, interruptions, GROUP)
        lengths = lengths.join(inside, on=[*GROUP, "name"], how="left").with_columns(
            (pl.col("s") - pl.col("overlap_s").fill_null(0.0)).alias("s")
        )
    columns = [  # one name after the other, so that the sum does not depend on the order of rows
        reduce(add, (pl.col("s").filter(pl.col("name") == one).sum() for one in part.names)).alias(f"_slice:{name}")
        for name, part in profile.slices.items()
        if part.how == "extent"
    ]
    known = [
        pl.col("name").is_in(part.names).any().alias(f"_known:{name}")
        for name, part in profile.slices.items()
        if part.how == "extent"
    ]
    moments = [
        _slice_moment(name, moment) for name, moment in profile.moments.items() if not moment.at and not moment.event
    ]
    per_root = lengths.group_by(GROUP).agg(*columns, *known, *moments)
    per_root = per_root.with_columns(
        pl.when(pl.col(f"_known:{name}")).then(pl.col(f"_slice:{name}")).alias(f"_slice:{name}")
        for name, part in profile.slices.items()
        if part.how == "extent"
    ).drop([f"_known:{name}" for name, part in profile.slices.items() if part.how == "extent"])
    for name, part in profile.slices.items():
        if part.how == "union":
            unions = trees.union_seconds(parts.filter(pl.col("name").is_in(part.names)), GROUP, f"_slice:{name}")
            per_root = per_root.join(unions, on=GROUP, how="left")
        elif part.how == "first":
            own = parts.filter(pl.col("name").is_in(part.names)).sort("start_unix_ns", "end_unix_ns")
            length = seconds((pl.col("end_unix_ns") - pl.col("start_unix_ns")).first())
            firsts = own.group_by(GROUP, maintain_order=True).agg(length.alias(f"_slice:{name}"))
            per_root = per_root.join(firsts, on=GROUP, how="left")
    return frame.join(per_root, left_on=["trace_id", "span_id"], right_on=GROUP, how="left", maintain_order="left")


def _interruptions(profile: EngineProfile, parts: pl.DataFrame) -> pl.DataFrame | None:
    """Intervals taken out of the phases they fall into."""
    part = profile.slices.get(profile.interrupted_by)
    if part is None:
        return None
    own = parts.filter(pl.col("name").is_in(part.names))
    return None if own.is_empty() else trees.merged(own, GROUP)


def _slice_moment(name: str, moment: Moment) -> pl.Expr:
    column, names = ("start_unix_ns", moment.start_of) if moment.start_of else ("end_unix_ns", moment.end_of)
    chosen = pl.col(column).filter(pl.col("name").is_in(names))
    return (chosen.min() if moment.start_of else chosen.max()).alias(name)


def settled(frame: pl.DataFrame, profile: EngineProfile) -> pl.DataFrame:
    """Everything the profile derives, in the order the values need each other; column `_source:x` says where x is from.

    Needs columns: the profile's times (already judged), `_slice:x`, arrival_unix_ns, e2e_s, output_tokens, `_flags`.
    """
    frame = _sources(frame, profile)
    for name in sorted({*profile.times, *profile.slices} - {"e2e_s"}):
        frame = bounded(frame, name)
    for name in TopologicalSorter(dependencies(profile)).static_order():
        if name in profile.moments:
            moment = profile.moments[name]
            if moment.at:
                frame = frame.with_columns(_moment(moment).alias(name))
            elif name not in frame.columns:
                frame = frame.with_columns(pl.lit(None, dtype=pl.Int64).alias(name))
            continue
        frame = _distrusted(frame, profile, name)
        for step in profile.derive:
            if step.field == name:
                frame = _derived(frame, step)
    for agreement in profile.agree:
        difference = _sum(agreement.left) - _sum(agreement.right)
        frame = flagged(frame, pl.when(difference.abs() > agreement.tolerance_s).then(pl.lit(agreement.quality)))
    return frame


def _sources(frame: pl.DataFrame, profile: EngineProfile) -> pl.DataFrame:
    """A child span beats the parent's attribute of the same phase."""
    names = {*profile.times, *profile.slices, *(step.field for step in profile.derive)}
    additions = []
    for name in sorted(names):
        own = pl.col(name) if name in frame.columns else pl.lit(None, dtype=pl.Float64)
        part = pl.col(f"_slice:{name}") if f"_slice:{name}" in frame.columns else pl.lit(None, dtype=pl.Float64)
        additions.append(pl.coalesce(part, own).alias(name))
        if f"_source:{name}" not in frame.columns:
            source = pl.when(part.is_not_null()).then(pl.lit("measured:span"))
            additions.append(source.when(own.is_not_null()).then(pl.lit("measured:attribute")).alias(f"_source:{name}"))
    if "combined_covers" not in frame.columns:
        additions.append(pl.lit(None, dtype=pl.String).alias("combined_covers"))
    return frame.with_columns(additions)


def _distrusted(frame: pl.DataFrame, profile: EngineProfile, name: str) -> pl.DataFrame:
    for doubt in profile.distrust:
        if doubt.field == name:
            wrong = (pl.col(name) > doubt.above * pl.col(doubt.of)) & (pl.col("output_tokens") > doubt.tokens)
            frame = flagged(frame, pl.when(wrong).then(pl.lit(doubt.quality)))
            frame = frame.with_columns(pl.when(wrong).then(None).otherwise(pl.col(name)).alias(name))
    return frame


def _derived(frame: pl.DataFrame, step: Derivation) -> pl.DataFrame:
    if step.between:
        first, last = step.between
        value = seconds(pl.col(last) - pl.col(first))
        source = "measured:span"
    elif step.per_gap:
        gaps = pl.when(pl.col("output_tokens") >= 2).then(pl.col("output_tokens") - 1)
        value = pl.col(step.per_gap) * gaps
        source = "inferred:mean_gap"
    else:
        value = _sum(step.plus) - _sum(step.minus) if step.minus else _sum(step.plus)
        source = "inferred:difference" if step.minus else "measured:attribute"
    tests = [pl.col(step.field).is_null()]
    tests += [pl.col(name).is_null() for name in step.unless]
    tests += [pl.col(name).is_not_null() for name in step.needs]
    if step.close_left:
        left, right = _sum(step.close_left), _sum(step.close_right)
        tolerance = pl.max_horizontal(pl.lit(step.close_tolerance_s), left.abs() * step.close_tolerance_ratio)
        tests.append((left - right).abs() <= tolerance)
    allowed = reduce(and_, tests)
    frame = _judge(frame.with_columns(pl.when(allowed).then(value).alias("_new_s")), "_new_s", step.field)
    if step.field != "e2e_s":
        frame = bounded(frame, "_new_s", step.field)
    new = pl.col("_new_s").is_not_null()
    additions = [
        pl.coalesce("_new_s", step.field).alias(step.field),
        pl.when(new).then(pl.lit(source)).otherwise(pl.col(f"_source:{step.field}")).alias(f"_source:{step.field}"),
    ]
    if step.covers:
        covers = pl.when(new).then(pl.lit(step.covers)).otherwise(pl.col("combined_covers"))
        additions.append(covers.alias("combined_covers"))
    if step.quality:
        frame = flagged(frame, pl.when(new).then(pl.lit(step.quality)))
    return frame.with_columns(additions).drop("_new_s")


def _sum(names: Iterable[str]) -> pl.Expr:
    """Null where any is null."""
    return reduce(lambda left, right: left + right, (pl.col(name) for name in names))


def _moment(moment: Moment) -> pl.Expr:
    at = pl.col(moment.at)
    for name in moment.plus:
        at = at + (pl.col(name) * 1e9).round().cast(pl.Int64)
    for name in moment.minus:
        at = at - (pl.col(name) * 1e9).round().cast(pl.Int64)
    return at


def completed(frame: pl.DataFrame) -> pl.DataFrame:
    """tpot_s, residual_s, quality and provenance out of the working columns; moments after the end are unknown."""
    end = pl.col("arrival_unix_ns") + (limit_s(pl.col("e2e_s")) * 1e9).round().cast(pl.Int64)
    late = {name: (pl.col(name) > end).fill_null(False) for name in MOMENTS}
    frame = flagged(frame, pl.when(pl.any_horizontal(*late.values())).then(pl.lit("moment_beyond_end")))
    frame = frame.with_columns(pl.when(~beyond).then(pl.col(name)).alias(name) for name, beyond in late.items())
    present = [name for name in PHASES if name in frame.columns]
    any_known = reduce(or_, (pl.col(name).is_not_null() for name in present), pl.lit(False))
    explained = pl.sum_horizontal(present) if present else pl.lit(0.0)
    several = pl.col("output_tokens") >= 2
    frame = frame.with_columns(
        pl.when(several).then(pl.col("decode_s") / (pl.col("output_tokens") - 1)).alias("tpot_s"),
        pl.when(any_known).then(pl.col("e2e_s") - explained).alias("residual_s"),
        pl.col("_flags").list.drop_nulls().list.unique(maintain_order=True).alias("_flags"),
    )
    entries = []
    for name in frame.columns:
        if name.startswith("_source:") and not name.startswith("_source:own_"):
            entries.append(pl.lit(f'"{name.removeprefix("_source:")}":"') + pl.col(name) + '"')
    provenance = pl.concat_str(entries, separator=",", ignore_nulls=True) if entries else pl.lit("")
    return frame.with_columns(
        pl.when(pl.col("_flags").list.len() > 0)
        .then(pl.lit('["') + pl.col("_flags").list.join('","') + '"]')
        .alias("quality"),
        (pl.lit("{") + provenance + "}").alias("provenance"),
    )
