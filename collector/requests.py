"""Request spans of one profile to rows of `requests`: what the span, its resource and its child spans say."""

from __future__ import annotations

import re

import polars as pl

from phasewise.collector import phases, trees
from phasewise.collector.attribute_columns import Column, columns_of, repeated_columns
from phasewise.collector.durations import seconds
from phasewise.collector.keys import span_keys
from phasewise.collector.profiles import PART, PHASE
from phasewise.collector.readings import counts, numbers, read_key, suffixed, texts, triples, wanted_of
from phasewise.collector.records import Request
from phasewise.collector.schemas import polars_schema
from phasewise.collector.time_units import TIME_UNIT
from phasewise.collector.watermarks import FUTURE_NS
from phasewise.rules.engine_parts import Key
from phasewise.rules.engine_profile import EngineProfile
from phasewise.rules.vocabulary import CAUSE_COLUMNS

CHILD_NUMBER = r"^\d+_"  # vLLM numbers the sequences of a call in front of its id
UNIT_FACTORS = (1e3, 1e6, 1e9, 1e-3)
UNIT_ERROR = 0.01
SHORTEST_S = 0.001  # below that a clock's steps are as large as what is compared
FULL_SCHEMA = polars_schema(Request)
ATTRIBUTED = (*CAUSE_COLUMNS, *list(FULL_SCHEMA)[list(FULL_SCHEMA).index(CAUSE_COLUMNS[-1]) + 1 :])
# What normalization makes; the attribution columns follow in the table.
REQUEST_SCHEMA = {name: kind for name, kind in FULL_SCHEMA.items() if name not in ATTRIBUTED}
_NO_REQUESTS = pl.DataFrame(schema=REQUEST_SCHEMA)
_UNKNOWN = {name: pl.lit(None, dtype=kind).alias(name) for name, kind in REQUEST_SCHEMA.items()}
_TYPED = [pl.col(name).cast(kind) for name, kind in REQUEST_SCHEMA.items()]


def requests_of(profile: EngineProfile, roots: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """Rows of `requests` (REQUEST_SCHEMA), one a row of `roots`, in their order.

    roots: spans with `instance`, `service`, `service_version`; parts: spans with `root`, the span id of their request.
    """
    frame = _read(profile, roots)
    places = roots.select("trace_id", pl.col("span_id").alias("root")).with_row_index(phases.ROW)
    own_parts = parts.join(places, on=["trace_id", "root"], how="inner", maintain_order="left")
    if profile.slices and not own_parts.is_empty():
        frame = phases.with_slices(frame, profile, own_parts)
    frame = _with_event_moments(frame, profile, roots, own_parts)
    frame = _with_part_facts(frame, profile, own_parts)
    frame = phases.settled(frame, profile)
    frame = phases.completed(_with_all_columns(frame))
    finished = pl.col("arrival_unix_ns") + (pl.col("e2e_s").fill_null(0.0) * 1e9).round().cast(pl.Int64)
    keys = span_keys(frame["trace_id"], frame["span_id"])
    frame = frame.with_columns(keys.alias("request_key"), finished.alias("finished_unix_ns"))
    return frame.with_columns(pl.coalesce(_call(), "request_key").alias("call_key")).select(_TYPED)


def _call() -> pl.Expr:
    """What the sequences of one call (n > 1) share: the id without the sequence's own number, and the trace they were called
    in; where nobody called them in a trace each begins its own, and they share the moment of arrival. An id alone does not
    do: clients that set it themselves use it again."""
    identifier = pl.col("request_id").str.replace(CHILD_NUMBER, "")
    place = pl.when("_called").then(pl.col("trace_id")).otherwise(pl.col("arrival_unix_ns").cast(pl.String))
    return pl.concat_str("instance", identifier, place, separator="/")


def empty_requests() -> pl.DataFrame:
    return _NO_REQUESTS


def _read(profile: EngineProfile, roots: pl.DataFrame) -> pl.DataFrame:
    """Attributes as columns; the engine's own end-to-end figure, else the span's length."""
    rows = len(roots)
    keys = [*profile.times.values(), *profile.counts.values(), *profile.texts.values()]
    own = columns_of(roots["attributes"], wanted_of(profile))
    resource = repeated_columns(roots["resource"], [name for key in keys for name in key.resource])
    columns = [
        *(_seconds(k, read_key(k, own, resource, rows)).alias(name) for name, k in profile.times.items()),
        *(counts(read_key(k, own, resource, rows)).alias(name) for name, k in profile.counts.items()),
    ]
    for name, key in profile.texts.items():
        values = read_key(key, own, resource, rows)
        columns.append((triples(values) if name == "segments" else texts(values)).alias(name))
    frame = roots.select(
        "trace_id",
        "span_id",
        "instance",
        "service",
        *(name for name in ("dataset", "key_tenant") if name in roots.columns),
        pl.col("start_unix_ns").alias("arrival_unix_ns"),
        "received_unix_ns",
        pl.col("parent_span_id").is_not_null().alias("_called"),
        pl.col("scope_name").alias("_scope"),
        seconds(pl.col("end_unix_ns") - pl.col("start_unix_ns")).alias("_span_s"),
        pl.lit(profile.id).alias("engine"),
        pl.when(pl.col("status_code") == 2)
        .then(pl.lit(profile.error_outcome))
        .otherwise(pl.lit("ok"))
        .alias("outcome"),
        pl.lit("otlp").alias("source"),
    ).with_columns(columns)
    if "key_tenant" in frame.columns:
        told = ["tenant"] if "tenant" in frame.columns else []
        frame = frame.with_columns(pl.coalesce("key_tenant", *told).alias("tenant")).drop("key_tenant")
    frame = phases.flagged(frame, *roots.select(_of_receipt(roots)).get_columns())
    frame = _with_whole_input(_with_told_first_token(frame), profile)
    return _own_end(phases.judged(_with_event_times(_with_aborted(frame), profile, roots), profile.times))


def _with_told_first_token(frame: pl.DataFrame) -> pl.DataFrame:
    """No first token comes at once: a time of 0 stands for one that its sender never learned."""
    if "ttft_s" not in frame.columns or not (frame["ttft_s"] == 0.0).any():
        return frame
    never = pl.col("ttft_s") == 0.0
    frame = phases.flagged(frame, pl.when(never).then(pl.lit("sentinel_ttft")))
    return frame.with_columns(pl.when(~never).then("ttft_s").alias("ttft_s"))


def _with_whole_input(frame: pl.DataFrame, profile: EngineProfile) -> pl.DataFrame:
    """Cached tokens are part of the input. Where they are more than it, a client counts them apart, as some providers do, and those
    written into the cache too: the input is all of them. Of an engine nothing tells which of the two is wrong."""
    if not {"input_tokens", "cached_tokens"} <= set(frame.columns):
        return frame
    apart = pl.col("cached_tokens") > pl.col("input_tokens")
    if not frame.select(apart.any()).item():
        return frame
    if profile.role != "client" or profile.recorded:
        frame = phases.flagged(frame, pl.when(apart).then(pl.lit("cached_beyond_input")))
        return frame.with_columns(pl.when(~apart).then("cached_tokens").alias("cached_tokens"))
    told = "own_written_tokens" in frame.columns
    written = pl.col("own_written_tokens").fill_null(0) if told else pl.lit(0)
    whole = pl.col("input_tokens") + pl.col("cached_tokens") + written
    frame = phases.flagged(frame, pl.when(apart).then(pl.lit("cached_apart")))
    return frame.with_columns(pl.when(apart).then(whole).otherwise("input_tokens").alias("input_tokens"))


def _of_receipt(roots: pl.DataFrame) -> list[pl.Expr]:
    """Flags that the columns of a span tell by themselves."""
    ahead = pl.max_horizontal("start_unix_ns", "end_unix_ns") > pl.col("received_unix_ns") + FUTURE_NS
    told = [pl.when(pl.col("dropped") > 0).then(pl.lit("attributes_dropped")).alias("dropped")]
    if roots["flags"].null_count() < roots.height:
        noted = (("attributes_cut", "truncated"), (TIME_UNIT, "unit_mismatch"))
        told += [
            pl.when(pl.col("flags").str.contains(note, literal=True)).then(pl.lit(flag)).alias(flag)
            for note, flag in noted
        ]
    told.append(pl.when(ahead & (pl.col("received_unix_ns") > 0)).then(pl.lit("future")).alias("future"))
    if (roots["end_unix_ns"] == 0).any():
        told.append(pl.when(pl.col("end_unix_ns") == 0).then(pl.lit("end_missing")).alias("end"))
    return told


def _seconds(key: Key, values: Column) -> pl.Series:
    return suffixed(values) if key.suffixed else numbers(values, key.scale)


def _with_event_moments(
    frame: pl.DataFrame, profile: EngineProfile, roots: pl.DataFrame, parts: pl.DataFrame
) -> pl.DataFrame:
    """Moments that events of a request's span or of its parts tell."""
    wanted = {name: moment for name, moment in profile.moments.items() if moment.event}
    if not wanted:
        return frame
    own = roots.select("events").with_row_index(phases.ROW)
    told = pl.concat([own, parts.select(own.columns)]).filter(pl.col("events").is_not_null())
    found = []
    for name, moment in wanted.items():
        names = "|".join(re.escape(event) for event in moment.event)
        marks = pl.col("events").str.extract_all(rf'"name":"(?:{names})","unix_ns":\d+')
        times = (
            told.select(phases.ROW, marks.alias("_mark"))
            .explode("_mark")
            .drop_nulls("_mark")
            .with_columns(pl.col("_mark").str.extract(r"(\d+)$").cast(pl.Int64).alias("_at"))
        )
        known = pl.len() == 1 if moment.sole else pl.lit(True)
        found.append(times.group_by(phases.ROW).agg(pl.when(known).then(pl.col("_at").min()).alias(name)))
    return frame.with_columns(phases.by_place(frame.height, *found).drop(phases.ROW))


def _with_aborted(frame: pl.DataFrame) -> pl.DataFrame:
    """A request that its client gave up is no failure of the engine, whatever status its span has."""
    if "finish_reason" not in frame.columns:
        return frame
    reasons = frame["finish_reason"].unique()
    aborting = reasons.filter(reasons.str.contains(r"(?i)^\W*(abort|cancel)"))
    if aborting.is_empty():
        return frame
    given_up = pl.col("finish_reason").is_in(aborting.implode())
    return frame.with_columns(pl.when(given_up).then(pl.lit("aborted")).otherwise("outcome").alias("outcome"))


def _with_event_times(frame: pl.DataFrame, profile: EngineProfile, roots: pl.DataFrame) -> pl.DataFrame:
    """Times that span events tell, where they come before what the attribute says."""
    for name, key in profile.times.items():
        if not key.events or not roots["events"].count():
            continue
        names = "|".join(re.escape(event) for event in key.events)
        marks = roots["events"].str.extract_all(rf'"name":"(?:{names})","unix_ns":\d+')
        first = marks.list.eval(pl.element().str.extract(r"(\d+)$").cast(pl.Int64)).list.min()
        told = (first - roots["start_unix_ns"]).alias("_event_ns")
        frame = frame.with_columns(told).with_columns(seconds(pl.col("_event_ns")).alias("_event_s")).drop("_event_ns")
        earlier = pl.col("_event_s").is_not_null() & (pl.col(name).is_null() | (pl.col("_event_s") < pl.col(name)))
        attribute = pl.when(pl.col(name).is_not_null()).then(phases.sourced("measured:attribute"))
        source = pl.when(earlier).then(phases.sourced("measured:event")).otherwise(attribute)
        value = pl.when(earlier).then("_event_s").otherwise(name)
        frame = frame.with_columns(source.alias(f"{phases.SOURCE}{name}"), value.alias(name)).drop("_event_s")
    return frame


def _own_end(frame: pl.DataFrame) -> pl.DataFrame:
    """End to end: the sender's own figure, else the span's length; unknown where the span ends before it starts.

    A figure that is the span's length times a thousand (or a million) is in another unit than its name says.
    """
    own = pl.col("e2e_s") if "e2e_s" in frame.columns else pl.lit(None, dtype=pl.Float64)
    span = pl.when(pl.col("_span_s") >= 0).then(pl.col("_span_s"))
    ratio = own / pl.when(pl.col("_span_s") >= SHORTEST_S).then(pl.col("_span_s"))
    off = pl.any_horizontal((ratio / factor - 1).abs() < UNIT_ERROR for factor in UNIT_FACTORS).fill_null(False)
    frame = phases.flagged(
        frame,
        pl.when(pl.col("_span_s") < 0).then(pl.lit("negative_duration")),
        pl.when(off).then(pl.lit("unit_mismatch")),
    )
    trusted = pl.when(~off).then(own)
    by_span = pl.when(span.is_not_null()).then(phases.sourced("measured:span"))
    source = pl.when(trusted.is_not_null()).then(phases.sourced("measured:attribute")).otherwise(by_span)
    return frame.with_columns(pl.coalesce(trusted, span).alias("e2e_s"), source.alias(f"{phases.SOURCE}e2e_s"))


def _with_part_facts(frame: pl.DataFrame, profile: EngineProfile, parts: pl.DataFrame) -> pl.DataFrame:
    """Counts of span events over a request's parts, and an error of a part as the outcome."""
    if profile.settle != "trace":
        return frame
    if parts.is_empty():
        nothing = [pl.lit(None, dtype=pl.Int64).alias(name) for name in profile.events if name not in frame.columns]
        return frame.with_columns(nothing)
    tallies = [
        pl.col("events")
        .str.count_matches(f'"name":"{event}"', literal=True)
        .sum()
        .cast(pl.Int64)
        .alias(f"_events:{name}")
        for name, event in profile.events.items()
    ]
    facts = parts.group_by(phases.ROW).agg(*tallies, (pl.col("status_code") == 2).any().alias("_part_failed"))
    frame = frame.hstack(phases.by_place(frame.height, facts).drop(phases.ROW))
    columns = [pl.col(f"_events:{name}").alias(name) for name in profile.events]
    failed = pl.col("_part_failed").fill_null(False) & (pl.col("outcome") == "ok")
    outcome = pl.when(failed).then(pl.lit(profile.error_outcome)).otherwise(pl.col("outcome")).alias("outcome")
    return frame.with_columns(*columns, outcome)


def _with_all_columns(frame: pl.DataFrame) -> pl.DataFrame:
    told = set(frame.columns)
    return frame.with_columns(unknown for name, unknown in _UNKNOWN.items() if name not in told)


def slices_of(profiles: list[EngineProfile], spans: pl.DataFrame, roots: pl.DataFrame) -> pl.DataFrame:
    """Child spans that some profile reads (by name, or because of an event or an error), with their request as `root`."""
    if not profiles:
        return spans.clear().with_columns(pl.lit(None, dtype=pl.String).alias("root"))
    names = sorted({name for profile in profiles for name in profile.slice_names})
    wanted = pl.col("name").is_in(names) | pl.col("events").is_not_null() | (pl.col("status_code") == 2)
    parts = spans.filter(pl.col("role").is_in([PART, PHASE]) & wanted)
    return trees.owners(parts, roots, spans)
