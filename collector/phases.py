"""The rules of one engine profile applied to its request spans: values, judgement, derivations, moments, residual.

Input and output are frames with one row a request span. Working columns carry the names of the profile; what was done to a row
is told by columns `_flag:x`, where its values are from by columns `_source:x`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from graphlib import TopologicalSorter
from operator import add, and_, or_

import polars as pl

from phasewise.collector import trees
from phasewise.collector.durations import added, seconds
from phasewise.rules.engine_parts import Derivation, Moment, Slice, release_numbers
from phasewise.rules.engine_profile import EngineProfile, dependencies

SENTINEL_S = -1.0
CLAMP_S = 0.002  # two clocks disagree by that much: still zero
LONGEST_S = 86_400.0
FASTEST_TOKEN_S = 1e-5
NOT_STREAMED = "streaming_required"
BEYOND_S, BEYOND_RATIO = (
    0.002,
    0.01,
)  # the larger: nothing inside a request lasts longer than the request by more than that
MOMENTS = ("queued_unix_ns", "scheduled_unix_ns", "first_token_unix_ns")
PHASES = ("queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "combined_s")
ROW = "_row"  # of a part: the place of its request among those of one profile
FLAG = "_flag:"  # columns of what was done to a row
SOURCE = "_source:"  # columns of where a value is from: its place in SOURCES, counted from 1
SOURCES = ("measured:attribute", "measured:span", "measured:event", "inferred:difference", "inferred:mean_gap")
_RELEASE = re.compile(r"v?(\d{1,6}(?:\.\d{1,6}){0,2})")  # as engines tell it: 0.16.0, v0.16.0rc1, 0.16.1.dev3+g0a1b2c3


def sourced(source: str) -> pl.Expr:
    """That a value is from there, in a column `_source:x`."""
    return pl.lit(SOURCES.index(source) + 1, dtype=pl.UInt8)


def judged(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Values no duration can have become null, with a flag: sentinel_x, negative_x, range_x; slightly negative ones become 0
    (clamped)."""
    for name in _where_any(frame, {name: _strange(name) for name in names}):
        frame = _judge(frame, name)
    return frame


def _strange(name: str) -> pl.Expr:
    """Values that have to be judged: most columns have none, and one look at all of them tells."""
    return ~pl.col(name).is_between(0.0, LONGEST_S)


def _where_any(frame: pl.DataFrame, tests: Mapping[str, pl.Expr]) -> list[str]:
    """Names of the tests that hold somewhere."""
    if not tests:
        return []
    found = frame.select(test.any().alias(name) for name, test in tests.items()).row(0)
    return [name for name, holds in zip(tests, found, strict=True) if holds]


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
    flag = pl.coalesce(wrong, pl.when(clamp).then(pl.lit("clamped")))
    cleaned = pl.when(wrong.is_not_null()).then(None).when(clamp).then(0.0).otherwise(value)
    return flagged(frame, flag).with_columns(cleaned.alias(name))


def limit_s(e2e: pl.Expr) -> pl.Expr:
    """How long a part of a request that takes `e2e` seconds can be."""
    return e2e + pl.max_horizontal(pl.lit(BEYOND_S), e2e * BEYOND_RATIO)


def _beyond(name: str) -> pl.Expr:
    return (pl.col(name) > limit_s(pl.col("e2e_s"))).fill_null(False)


def _bounded(frame: pl.DataFrame, name: str, field: str = "") -> pl.DataFrame:
    """A duration that ends after its request is a contradiction: null, with flag x_beyond_end."""
    short = (field or name).removeprefix("own_").removesuffix("_s")
    frame = flagged(frame, pl.when(_beyond(name)).then(pl.lit(f"{short}_beyond_end")))
    return frame.with_columns(pl.when(~_beyond(name)).then(pl.col(name)).alias(name))


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


def flagged(frame: pl.DataFrame, *flags: pl.Expr | pl.Series) -> pl.DataFrame:
    """Flags (text or null) added to those of the rows, each as a column of its own until `completed` puts them together."""
    before = sum(name.startswith(FLAG) for name in frame.columns)
    return frame.with_columns(flag.alias(f"{FLAG}{before + number}") for number, flag in enumerate(flags))


def with_slices(frame: pl.DataFrame, profile: EngineProfile, parts: pl.DataFrame) -> pl.DataFrame:
    """Phase seconds from child spans as columns `_slice:x`, and moments from them. parts: spans with the place of their request in
    `frame` as `_row`."""
    found = trees.extents(parts, [ROW])
    interruptions = _interruptions(profile, parts)
    lengths = found.with_columns(seconds(pl.col("end_unix_ns") - pl.col("start_unix_ns")).alias("s"))
    if interruptions is not None:
        inside = trees.overlaps(found, interruptions, [ROW])
        lengths = lengths.join(inside, on=[ROW, "name"], how="left").with_columns(
            (pl.col("s") - pl.col("overlap_s").fill_null(0.0)).alias("s")
        )
    extent = {name: part.names for name, part in profile.slices.items() if part.how == "extent"}
    moments = {name: m for name, m in profile.moments.items() if not m.at and not m.event}
    read = {one for names in extent.values() for one in names}
    read |= {one for m in moments.values() for one in (*m.start_of, *m.end_of)}
    wide = by_place(frame.height, *(_of_name(lengths, one) for one in sorted(read)))
    columns = [
        *(_slice_seconds(names).alias(f"_slice:{name}") for name, names in extent.items()),
        *(_slice_moment(moment).alias(name) for name, moment in moments.items()),
    ]
    others = [
        _slice_of(parts, part, interruptions if name == profile.interrupted_by else None).rename(
            {"s": f"_slice:{name}"}
        )
        for name, part in profile.slices.items()
        if part.how != "extent"
    ]
    return frame.hstack(wide.select(columns)).hstack(by_place(frame.height, *others).drop(ROW))


def by_place(height: int, *found: pl.DataFrame) -> pl.DataFrame:
    """Frames with one row a request that they tell of (its place as `_row`), side by side for all `height` requests."""
    whole = pl.DataFrame({ROW: pl.int_range(height, dtype=pl.UInt32, eager=True)})
    for one in found:
        whole = whole.join(one, on=ROW, how="left", maintain_order="left")
    return whole


def _of_name(lengths: pl.DataFrame, name: str) -> pl.DataFrame:
    told = ("s", "start_unix_ns", "end_unix_ns")
    own = lengths.filter(pl.col("name") == name)
    return own.select(ROW, *(pl.col(column).alias(f"{name}:{column}") for column in told))


def _slice_seconds(names: Sequence[str]) -> pl.Expr:
    """One name after the other, so that the sum does not depend on the order of rows; null where none is there."""
    each = [pl.col(f"{name}:s") for name in names]
    return pl.when(pl.any_horizontal(one.is_not_null() for one in each)).then(
        reduce(add, (one.fill_null(0.0) for one in each))
    )


def _slice_of(parts: pl.DataFrame, part: Slice, merged: pl.DataFrame | None) -> pl.DataFrame:
    """Seconds (`s`) of a slice that is not told by its whole extent. merged: its intervals made disjoint, where that was done."""
    own = parts.filter(pl.col("name").is_in(part.names))
    if part.how == "union":
        return trees.union_seconds(own if merged is None else merged, [ROW], "s")
    length = seconds((pl.col("end_unix_ns") - pl.col("start_unix_ns")).first())
    return own.sort("start_unix_ns", "end_unix_ns").group_by(ROW, maintain_order=True).agg(length.alias("s"))


def _interruptions(profile: EngineProfile, parts: pl.DataFrame) -> pl.DataFrame | None:
    """Intervals taken out of the phases they fall into."""
    part = profile.slices.get(profile.interrupted_by)
    if part is None:
        return None
    own = parts.filter(pl.col("name").is_in(part.names))
    return None if own.is_empty() else trees.merged(own, [ROW])


def _slice_moment(moment: Moment) -> pl.Expr:
    if moment.start_of:
        return pl.min_horizontal(f"{name}:start_unix_ns" for name in moment.start_of)
    return pl.max_horizontal(f"{name}:end_unix_ns" for name in moment.end_of)


def settled(frame: pl.DataFrame, profile: EngineProfile) -> pl.DataFrame:
    """Everything the profile derives, in the order the values need each other; column `_source:x` says where x is from.

    Needs columns: the profile's times (already judged), `_slice:x`, arrival_unix_ns, e2e_s, output_tokens.
    """
    frame = _sources(frame, profile)
    told = sorted({*profile.times, *profile.slices} - {"e2e_s"})
    for name in _where_any(frame, {name: _beyond(name) for name in told}):
        frame = _bounded(frame, name)
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
    return flagged(
        frame,
        *(
            pl.when((_sum(one.left) - _sum(one.right)).abs() > one.tolerance_s).then(pl.lit(one.quality))
            for one in profile.agree
        ),
    )


def _sources(frame: pl.DataFrame, profile: EngineProfile) -> pl.DataFrame:
    """A child span beats the parent's attribute of the same phase."""
    names = {*profile.times, *profile.slices, *(step.field for step in profile.derive)}
    additions = []
    for name in sorted(names):
        own = pl.col(name) if name in frame.columns else pl.lit(None, dtype=pl.Float64)
        part = pl.col(f"_slice:{name}") if f"_slice:{name}" in frame.columns else pl.lit(None, dtype=pl.Float64)
        additions.append(pl.coalesce(part, own).alias(name))
        if f"{SOURCE}{name}" not in frame.columns:
            source = pl.when(part.is_not_null()).then(sourced("measured:span"))
            additions.append(
                source.when(own.is_not_null()).then(sourced("measured:attribute")).alias(f"{SOURCE}{name}")
            )
    if "combined_covers" not in frame.columns:
        additions.append(pl.lit(None, dtype=pl.String).alias("combined_covers"))
    return frame.with_columns(additions)


def _distrusted(frame: pl.DataFrame, profile: EngineProfile, name: str) -> pl.DataFrame:
    if name == "ttft_s" and profile.role == "client" and not profile.recorded and "output_tokens" in frame.columns:
        at_end = _at_once(pl.col("e2e_s") - pl.col(name))
        if _where_any(frame, {"at_end": at_end}):
            frame = flagged(frame, pl.when(at_end).then(pl.lit(NOT_STREAMED)))
            frame = frame.with_columns(pl.when(~at_end).then(pl.col(name)).alias(name))
    for doubt in profile.distrust:
        if doubt.field == name:
            wrong = (pl.col(name) > doubt.above * pl.col(doubt.of)) & (pl.col("output_tokens") > doubt.tokens)
            frame = flagged(frame, pl.when(wrong).then(pl.lit(doubt.quality)))
            frame = frame.with_columns(pl.when(wrong).then(None).otherwise(pl.col(name)).alias(name))
    return frame


def _at_once(left_s: pl.Expr) -> pl.Expr:
    """Whether so little time is left for decoding that no sequence makes its tokens in it: the "first" one was told when all were
    there, as an answer that is not streamed is."""
    tokens = pl.col("output_tokens")
    return ((tokens >= 2) & left_s.is_between(-CLAMP_S, FASTEST_TOKEN_S * (tokens - 1))).fill_null(False)


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
    if step.scopes or step.before:
        older = _is_of(frame, step)
        if not older.any():
            return frame
        tests.append(pl.lit(older))
    tests += [pl.col(name).is_null() for name in step.unless]
    tests += [pl.col(name).is_not_null() for name in step.needs]
    if step.close_left:
        left, right = _sum(step.close_left), _sum(step.close_right)
        tolerance = pl.max_horizontal(pl.lit(step.close_tolerance_s), left.abs() * step.close_tolerance_ratio)
        tests.append((left - right).abs() <= tolerance)
    allowed = reduce(and_, tests)
    if step.field == "decode_s" and step.minus and "output_tokens" in frame.columns:
        at_end = allowed & _at_once(value)
        if _where_any(frame, {"at_end": at_end}):
            frame = flagged(frame, pl.when(at_end).then(pl.lit(NOT_STREAMED)))
            allowed = allowed & ~at_end
    frame = frame.with_columns(pl.when(allowed).then(value).alias("_new_s"))
    if _where_any(frame, {"_new_s": _strange("_new_s")}):
        frame = _judge(frame, "_new_s", step.field)
    if step.field != "e2e_s" and _where_any(frame, {"_new_s": _beyond("_new_s")}):
        frame = _bounded(frame, "_new_s", step.field)
    new = pl.col("_new_s").is_not_null()
    additions = [
        pl.coalesce("_new_s", step.field).alias(step.field),
        pl.when(new).then(sourced(source)).otherwise(f"{SOURCE}{step.field}").alias(f"{SOURCE}{step.field}"),
    ]
    if step.covers:
        covers = pl.when(new).then(pl.lit(step.covers)).otherwise(pl.col("combined_covers"))
        additions.append(covers.alias("combined_covers"))
    if step.quality:
        frame = flagged(frame, pl.when(new).then(pl.lit(step.quality)))
    return frame.with_columns(additions).drop("_new_s")


def _is_of(frame: pl.DataFrame, step: Derivation) -> pl.Series:
    """Rows whose scope, or whose engine's release, is among those that a derivation is for."""
    chosen = frame.select(pl.col("_scope").is_in(step.scopes).fill_null(False)).to_series()
    if not step.before or "engine_version" not in frame.columns or frame["engine_version"].null_count() == frame.height:
        return chosen
    told = pl.Series(frame["engine_version"].unique().drop_nulls())
    limit = release_numbers(step.before)
    older = [
        one for one in told if (release := _RELEASE.match(one)) and release_numbers(release[1])[: len(limit)] < limit
    ]
    return chosen | frame["engine_version"].is_in(older).fill_null(False)


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
    several = pl.col("output_tokens") >= 2
    frame = frame.with_columns(
        pl.when(several).then(pl.col("decode_s") / (pl.col("output_tokens") - 1)).alias("tpot_s"),
        pl.when(any_known).then(pl.col("e2e_s") - added(present)).alias("residual_s"),
    )
    return frame.with_columns(_quality(frame).alias("quality"), _provenance(frame).alias("provenance"))


def _quality(frame: pl.DataFrame) -> pl.Expr:
    """The flags of each row as a JSON list, each once, in the order they arose; null where there is none."""
    used = [name for name in frame.columns if name.startswith(FLAG) and frame[name].null_count() < frame.height]
    if not used:
        return pl.lit(None, dtype=pl.String)
    if len(used) == 1:
        return pl.lit('["') + pl.col(used[0]) + '"]'
    flags = pl.concat_list(used).list.drop_nulls().list.unique(maintain_order=True)
    return pl.when(flags.list.len() > 0).then(pl.lit('["') + flags.list.join('","') + '"]')


def _provenance(frame: pl.DataFrame) -> pl.Series:
    """Where each value of a row is from, as JSON. Many rows tell the same: a text is made once for each that differs."""
    names = [name for name in frame.columns if name.startswith(SOURCE) and not name.startswith(f"{SOURCE}own_")]
    steps = [(len(SOURCES) + 1) ** place for place in range(len(names))]
    numbers = frame.select(
        pl.sum_horizontal(
            pl.lit(0, dtype=pl.UInt64),
            *(pl.col(name).cast(pl.UInt64) * step for name, step in zip(names, steps, strict=True)),
        ).alias("number")
    ).to_series()
    different = numbers.unique()
    told = []
    for number in different:
        codes = ((name, number // step % (len(SOURCES) + 1)) for name, step in zip(names, steps, strict=True))
        told.append(
            "{" + ",".join(f'"{name[len(SOURCE) :]}":"{SOURCES[code - 1]}"' for name, code in codes if code) + "}"
        )
    if len(different) == 1:
        return pl.Series([told[0]]).new_from_index(0, frame.height)
    return numbers.replace_strict(different, pl.Series(told), return_dtype=pl.String)
