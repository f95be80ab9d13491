"""The engine replicas of a window: which samples and settings belong to which requests, by the joins the collector made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from phasewise.analyzer.draw import Drawn
from phasewise.analyzer.filters import SERVED, conditions
from phasewise.analyzer.scrapes import read_scrapes
from phasewise.analyzer.step_samples import of_instances, read_step_samples, with_idle_scrapes
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.context import Setting
from phasewise.collector.facts import as_settings, merged, valid_facts
from phasewise.collector.joins import peers, sample_ranges

LIVE_NS = 60 * 10**9  # in-flight evidence looks back this far from the newest data in the window
FAR_NS = 4 * 10**18  # window ends beyond this (about the year 2096) mean "no end"


class Reader(Protocol):
    """What the analyzer needs of a store."""

    def query(self, sql: str, parameters: Sequence[object] = (), *, order_by: Sequence[str] = ()) -> pl.DataFrame: ...


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine replica in the window: the samples joined to its spans, or a scraped engine without spans.

    members: further span instances that are the same replica (several API servers in front of one engine); scrapes: of an engine
    that also sends steps, whose samples then are its steps.
    """

    instance: str
    engine: str | None
    samples: pl.DataFrame
    settings: Mapping[str, Setting]
    has_spans: bool
    members: tuple[str, ...] = ()
    scrapes: pl.DataFrame | None = None

    @property
    def counters(self) -> pl.DataFrame:
        """The samples whose counters are the engine's own: steps count no prefix hits, and nobody who was turned away."""
        return self.samples if self.scrapes is None or self.scrapes.is_empty() else self.scrapes


def read_replicas(
    store: Reader, window: Window, filters: Sequence[Filter], served: pl.DataFrame
) -> tuple[tuple[Replica, ...], tuple[str, ...], Drawn | None]:
    """Replicas with requests in the window, then scraped engines without; the scrapes that nobody's spans claim; and how many scrapes
    were read, where that is not all. served: rows with the instances and engines of the requests, the earliest first."""
    instances = list(store.query("SELECT * FROM instances").iter_rows(named=True))
    low, high = window.from_unix_ns - LIVE_NS, min(window.to_unix_ns, FAR_NS) + LIVE_NS
    samples, drawn = read_scrapes(store, window, low, high)
    stepped = read_step_samples(store, low, high)
    narrowed = _narrowed(store, filters)
    found = _with_spans(served, samples, stepped, instances, window)
    found += _only_steps(samples, stepped, instances, _names(found), narrowed, window)
    scraped, alone = _without_spans(samples, instances, _names(found), narrowed, window)
    return (*found, *scraped), alone, drawn


def _names(replicas: Sequence[Replica]) -> set[str]:
    return {name for replica in replicas for name in (replica.instance, *replica.members)}


def _with_spans(
    served: pl.DataFrame, samples: pl.DataFrame, stepped: pl.DataFrame, instances: list[dict[str, Any]], window: Window
) -> list[Replica]:
    found: list[Replica] = []
    seen: set[str] = set()
    for name in served["instance"].drop_nulls().unique().sort().to_list():
        if name in seen:
            continue
        members = peers(instances, name)
        seen |= set(members)
        engine = served.filter(pl.col("instance").is_in(members))["engine"].drop_nulls()
        own = engine[0] if len(engine) else None
        found.append(_replica(name, own, members, samples, stepped, instances, window, has_spans=True))
    return found


def _only_steps(
    samples: pl.DataFrame,
    stepped: pl.DataFrame,
    instances: list[dict[str, Any]],
    taken: set[str],
    narrowed: set[str] | None,
    window: Window,
) -> list[Replica]:
    """Engines whose steps lie in the window and whose requests do not, yet: all of them are still open, or were cut off."""
    inside = stepped.filter(pl.col("unix_ns").is_between(window.from_unix_ns, window.to_unix_ns, closed="left"))
    found: list[Replica] = []
    for name in inside["instance"].unique().sort().to_list():
        members = peers(instances, name)
        if taken & {name, *members} or (narrowed is not None and not narrowed & {name, *members}):
            continue
        taken = taken | {name, *members}
        found.append(_replica(name, "phasewise", members, samples, stepped, instances, window, has_spans=False))
    return found


def _replica(
    name: str,
    engine: str | None,
    members: Sequence[str],
    samples: pl.DataFrame,
    stepped: pl.DataFrame,
    instances: list[dict[str, Any]],
    window: Window,
    *,
    has_spans: bool,
) -> Replica:
    """Where an engine sends steps, they are its samples: they say the same as scrapes, at every step. What scrapes say after the
    last of them is kept: an engine without work makes no steps."""
    chosen = pl.col("instance").is_in(list(members))
    for one in sample_ranges(instances, name):
        chosen |= (pl.col("instance") == one.scrape) & pl.col("unix_ns").is_between(one.from_unix_ns, one.to_unix_ns)
    scraped = samples.filter(chosen & pl.col("joined").fill_null(True))
    steps = of_instances(stepped, members)
    settings = settings_of(instances, members, window)
    others = tuple(member for member in members if member != name)
    if steps.is_empty():
        return Replica(name, engine, scraped, settings, has_spans, others)
    return Replica(name, engine, with_idle_scrapes(steps, scraped), settings, has_spans, others, scraped)


def settings_of(instances: list[dict[str, Any]], members: Sequence[str], window: Window) -> dict[str, Setting]:
    """What the replica's spans, its scrapes and files about either say in the time of the window, the most believed first."""
    rows = [row for row in instances if row["kind"] != "facts"]
    own = [row for row in rows if row["instance"] in members and row["kind"] == "spans"]
    scrapes = [
        row for row in rows if row["kind"] == "scrape" and (row["joined_to"] in members or row["instance"] in members)
    ]
    inside = [
        row
        for row in scrapes
        if row["first_seen_unix_ns"] < window.to_unix_ns + LIVE_NS
        and row["last_seen_unix_ns"] >= window.from_unix_ns - LIVE_NS
    ]
    names = {*members, *(row["instance"] for row in scrapes)}
    facts = [row for name in sorted(names) for row in _facts_about(instances, name)]
    told = [*(inside or scrapes), *own, *valid_facts(facts, window.to_unix_ns)]
    return as_settings(merged(*(json.loads(row["settings"]) for row in told if row["settings"])))


def _facts_about(instances: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in instances if row["kind"] == "facts" and row["instance"] == name]


def _without_spans(
    samples: pl.DataFrame,
    instances: list[dict[str, Any]],
    taken: set[str],
    narrowed: set[str] | None,
    window: Window,
) -> tuple[list[Replica], tuple[str, ...]]:
    """A scraped process with no request in the window: one that just started, or one whose requests are all still open."""
    found: list[Replica] = []
    alone: set[str] = set()
    for name in samples["instance"].unique().sort().to_list():
        own = samples.filter(pl.col("instance") == name)
        lives = [row for row in instances if row["instance"] == name and row["kind"] == "scrape"] or [{}]
        for life in lives:
            target = life.get("joined_to")
            if name in taken or target in taken or (narrowed is not None and not {name, target} & narrowed):
                continue
            part = (
                own.filter(pl.col("unix_ns").is_between(life["first_seen_unix_ns"], life["last_seen_unix_ns"]))
                if life
                else own
            )
            if part.is_empty():
                continue
            if part["joined"].fill_null(True).all():
                settings = settings_of([*filter(None, [life]), *_facts_about(instances, name)], [name], window)
                found.append(Replica(target or name, part["engine"][0], part, settings, False))
            else:
                alone.add(name)
    return found, tuple(sorted(alone))


def _narrowed(store: Reader, filters: Sequence[Filter]) -> set[str] | None:
    """Instances that requests under these filters ever ran on; None without filters. Requests still open have no span yet,
    so an engine that matched before speaks for them."""
    if not filters:
        return None
    chosen = conditions(filters)
    rows = store.query(
        f"SELECT DISTINCT instance FROM requests WHERE {chosen.sql} AND {SERVED} AND instance IS NOT NULL",
        chosen.parameters,
    )
    named = {value for f in filters if f.key == "instance" and f.op in ("eq", "in") for value in f.value.split(",")}
    return set(rows["instance"].to_list()) | named
