"""Spans of whole traces to rows: requests, turns, engine steps, engine events, supplements, and what nobody knows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import polars as pl

from phasewise.collector import kv_tiers
from phasewise.collector.calls import calls_of
from phasewise.collector.disaggregation import halves_of, marked
from phasewise.collector.durations import seconds
from phasewise.collector.fronts import with_fronts, with_shapes
from phasewise.collector.identity import identities
from phasewise.collector.profiles import UNMAPPED, Profiles
from phasewise.collector.records import Annotation
from phasewise.collector.requests import empty_requests, requests_of, slices_of
from phasewise.collector.skews import SCHEMA as SKEW_SCHEMA
from phasewise.collector.steps import STEP_SCHEMA, steps_of
from phasewise.collector.time_units import in_nanoseconds
from phasewise.collector.turns import TURN_SCHEMA


@dataclass(frozen=True, slots=True)
class Normalized:
    """requests (columns of requests.REQUEST_SCHEMA), turns, steps, events as frames; supplements: request-shaped rows that
    fill others; superseded: request keys that no longer have a row; settings: what the resources of engine spans say of how their
    instance is set, oldest first; unmapped: "scope / name" -> spans; skews: what calls between hosts tell of their clocks."""

    requests: pl.DataFrame
    turns: pl.DataFrame
    steps: pl.DataFrame
    events: list[Annotation]
    supplements: pl.DataFrame
    superseded: list[str] = field(default_factory=list)
    settings: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    unmapped: dict[str, int] = field(default_factory=dict)
    broken_steps: int = 0
    skews: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SKEW_SCHEMA))


def normalize(spans: pl.DataFrame, profiles: Profiles) -> Normalized:
    """spans: columns of records.SPAN_SCHEMA, each (trace_id, span_id) once, traces as complete as they are known; already
    classified ones (columns profile, role) are not classified again."""
    if spans.is_empty():
        return Normalized(
            empty_requests(), pl.DataFrame(schema=TURN_SCHEMA), pl.DataFrame(schema=STEP_SCHEMA), [], empty_requests()
        )
    known = in_nanoseconds(spans).join(identities(spans["resource"]), on="resource", how="left", maintain_order="left")
    classified = known if "role" in known.columns else profiles.classify(known)
    classified, given_way = with_fronts(profiles, with_shapes(profiles, classified))
    engines = _chosen(classified, classified["role"] == "engine")
    marks = [p.supplement for p in profiles.ordered if p.supplement]
    supplement = pl.Series([False]).new_from_index(0, engines.height)
    for mark in marks:
        supplement |= engines["attributes"].str.contains(f'"{mark}":true', literal=True)
    supplement |= engines["profile"].is_in([p.id for p in profiles.ordered if p.kv_tier])
    own = _chosen(engines, ~supplement)
    halves = halves_of(profiles, classified, own)
    rows, prefills = marked(_engine_rows(profiles, own, classified), halves)
    told = _engine_rows(profiles, engines.filter(supplement), classified)
    calls = calls_of(profiles, classified, rows)
    steps, broken = steps_of(classified.filter(pl.col("role") == "steps"))
    return Normalized(
        requests=calls.requests,
        turns=calls.turns,
        steps=steps,
        events=startup_events(classified),
        supplements=pl.concat([kv_tiers.marked(profiles, told), prefills]),
        superseded=[*calls.superseded, *given_way, *prefills["request_key"]],
        settings=settings_of(profiles, engines),
        unmapped=unmapped_counts(classified),
        broken_steps=broken,
        skews=calls.skews,
    )


def _chosen(spans: pl.DataFrame, chosen: pl.Series) -> pl.DataFrame:
    """Without copying where all are."""
    return spans if chosen.all() else spans.filter(chosen)


def _engine_rows(profiles: Profiles, roots: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    if roots.is_empty():
        return empty_requests()
    present = [profiles.by_id[profile] for profile in roots["profile"].unique().sort()]
    parts = slices_of([p for p in present if p.settle == "trace"], spans, roots)
    return pl.concat([requests_of(p, _chosen(roots, roots["profile"] == p.id), parts) for p in present])


def settings_of(profiles: Profiles, roots: pl.DataFrame) -> list[tuple[str, dict[str, object]]]:
    """Settings by instance that resources of engine spans tell, in the order of time; what a resource lacks is not among them."""
    telling = [p.id for p in profiles.ordered if p.span_settings]
    told = roots.filter(pl.col("instance").is_not_null() & pl.col("profile").is_in(telling))
    newest = told.group_by("instance", "profile", "resource").agg(pl.col("start_unix_ns").max())
    distinct = newest.sort("start_unix_ns", "instance", "profile", "resource")
    found = []
    for instance, profile, resource in distinct.select("instance", "profile", "resource").iter_rows():
        keys = profiles.by_id[profile].span_settings
        facts = json.loads(resource)
        if values := {name: facts[key] for name, key in keys.items() if facts.get(key) not in (None, "")}:
            found.append((instance, values))
    return found


def unmapped_counts(classified: pl.DataFrame) -> dict[str, int]:
    """Spans of unknown engines by scope and name; digits count as one sign, so that ids in names do not make new labels."""
    strange = classified.filter(pl.col("role") == UNMAPPED)
    label = pl.concat_str(
        pl.col("scope_name").fill_null("(no scope)"),
        pl.lit(" / "),
        pl.col("name").str.slice(0, 60).str.replace_all(r"\d+", "#"),
    )
    return dict(strange.group_by(label.alias("label")).len().sort("label").iter_rows())


def startup_events(classified: pl.DataFrame) -> list[Annotation]:
    """Start-up spans are marks on the time axis, not requests."""
    startup = classified.filter(pl.col("role") == "startup").sort("start_unix_ns")
    rows = startup.select(
        "start_unix_ns", "name", seconds(pl.col("end_unix_ns") - pl.col("start_unix_ns")).alias("s"), "instance"
    ).iter_rows()
    return [
        Annotation(unix_ns=start, kind="startup", text=f"{name}: {length:.3g} s", source=f"spans:{instance}")
        for start, name, length, instance in rows
    ]
