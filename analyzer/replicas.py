"""The engine replicas of a window: which samples and settings belong to which requests, by the joins the collector made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from phasewise.analyzer.filters import SERVED, conditions
from phasewise.analyzer.step_samples import of_instances, read_step_samples
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.context import Setting
from phasewise.collector.joins import peers, sample_ranges

LIVE_NS = 60 * 10**9  # in-flight evidence looks back this far from the newest data in the window
FAR_NS = 4 * 10**18  # window ends beyond this (about the year 2096) mean "no end"


class Reader(Protocol):
    """What the analyzer needs of a store."""

    def query(self, sql: str, parameters: Sequence[object] = ()) -> pl.DataFrame: ...


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine replica in the window: the samples joined to its spans, or a scraped engine without spans.

    members: further span instances that are the same replica (several API servers in front of one engine).
    """

    instance: str
    engine: str | None
    samples: pl.DataFrame
    settings: Mapping[str, Setting]
    has_spans: bool
    members: tuple[str, ...] = ()

    def own(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows of requests that this replica served."""
        return rows.filter(pl.col("instance").is_in([self.instance, *self.members]))


def read_settings(text: str | None) -> dict[str, Setting]:
    """The settings column of `instances`: a JSON object name -> {"value", "source"}."""
    if not text:
        return {}
    return {name: Setting(one.get("value"), str(one.get("source", ""))) for name, one in json.loads(text).items()}


def read_replicas(
    store: Reader, window: Window, filters: Sequence[Filter], served: pl.DataFrame
) -> tuple[tuple[Replica, ...], tuple[str, ...]]:
    """Replicas with requests in the window, then scraped engines without; and the scrapes that nobody's spans claim."""
    instances = list(store.query("SELECT * FROM instances").iter_rows(named=True))
    low, high = window.from_unix_ns - LIVE_NS, min(window.to_unix_ns, FAR_NS) + LIVE_NS
    samples = store.query(
        "SELECT * FROM engine_samples WHERE unix_ns >= ? AND unix_ns < ? ORDER BY instance, unix_ns", (low, high)
    )
    found = _with_spans(served, samples, read_step_samples(store, low, high), instances)
    taken = {name for replica in found for name in (replica.instance, *replica.members)}
    scraped, alone = _without_spans(samples, instances, taken, _narrowed(store, filters))
    return (*found, *scraped), alone


def _with_spans(
    served: pl.DataFrame, samples: pl.DataFrame, stepped: pl.DataFrame, instances: list[dict[str, Any]]
) -> list[Replica]:
    """An engine that sends steps needs no scrapes: its steps say the same, at every step."""
    found: list[Replica] = []
    seen: set[str] = set()
    for name in served["instance"].drop_nulls().unique().sort().to_list():
        if name in seen:
            continue
        members = peers(instances, name)
        seen |= set(members)
        ranges = sample_ranges(instances, name)
        chosen = pl.col("instance").is_in(members)
        for one in ranges:
            chosen |= (pl.col("instance") == one.scrape) & pl.col("unix_ns").is_between(
                one.from_unix_ns, one.to_unix_ns
            )
        own = of_instances(stepped, members)
        if own.is_empty():
            own = samples.filter(chosen & pl.col("joined").fill_null(True))
        told = [row for row in instances if row["instance"] in members or row["joined_to"] in members]
        settings = {key: one for row in told for key, one in read_settings(row["settings"]).items()}
        engine = served.filter(pl.col("instance").is_in(members))["engine"].drop_nulls()
        others = tuple(member for member in members if member != name)
        found.append(Replica(name, engine[0] if len(engine) else None, own, settings, True, others))
    return found


def _without_spans(
    samples: pl.DataFrame, instances: list[dict[str, Any]], taken: set[str], narrowed: set[str] | None
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
                found.append(
                    Replica(target or name, part["engine"][0], part, read_settings(life.get("settings")), False)
                )
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
