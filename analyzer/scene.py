"""All that a verdict looks at: the rows of a window, the samples of its engines, their settings, and the time before.

Reading the store happens here and nowhere else in the analyzer's verdict; what follows is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import polars as pl

from phasewise.analyzer.filters import SERVED, conditions, rows_in
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.context import Setting
from phasewise.rules.vocabulary import CAUSE_COLUMNS

LIVE_NS = 60 * 10**9  # in-flight evidence looks back this far from the newest data in the window
STALE_NS = 5 * 60 * 10**9  # live samples older than this say nothing about now
BASELINE_MAX_NS = 3600 * 10**9
FAR_NS = 4 * 10**18  # window ends beyond this (about the year 2096) mean "no end"


# Columns of `requests` that verdicts look at; a row has twice as many.
ROW_COLUMNS = (
    "request_key trace_id instance engine engine_version model tenant request_class dataset outcome input_tokens cached_tokens"
    " output_tokens arrival_unix_ns queued_unix_ns scheduled_unix_ns finished_unix_ns e2e_s ttft_s queue_s context_s prefill_s"
    " first_token_s decode_s tpot_s external_s entry_e2e_s entry_ttft_s itl_p95_s client_gaps preemptions decode_batch_mean"
    " primary_class cause measured_s clamped missing_signals revision final"
).split() + list(CAUSE_COLUMNS)
_SELECT = f"SELECT {', '.join(ROW_COLUMNS)} FROM requests"


class Reader(Protocol):
    """What the analyzer needs of a store."""

    def query(self, sql: str, parameters: Sequence[object] = ()) -> pl.DataFrame: ...


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine replica in the window: the samples joined to its spans, or a scraped engine without spans."""

    instance: str
    engine: str | None
    samples: pl.DataFrame
    settings: Mapping[str, Setting]
    has_spans: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """requests: served calls; refused, aborted: counts; before: served calls of the baseline window; unjoined: scraped
    instances that nothing tells whose they are."""

    window: Window
    requests: pl.DataFrame
    refused: int
    aborted: int
    replicas: tuple[Replica, ...]
    before: pl.DataFrame
    baseline: Window | None
    now_unix_ns: int
    newest_unix_ns: int | None
    unjoined: tuple[str, ...] = ()
    unmapped_spans: int = 0
    facts: Mapping[str, object] = field(default_factory=dict)


def read_scene(store: Reader, window: Window, filters: Sequence[Filter], now_unix_ns: int) -> Scene:
    """Everything the verdict of a window needs."""
    chosen = rows_in(window, filters, served=False)
    rows = store.query(f"{_SELECT} WHERE {chosen.sql}", chosen.parameters)
    served = rows.filter(~pl.col("outcome").fill_null("ok").is_in(["refused", "aborted"]))
    instances = store.query("SELECT * FROM instances")
    replicas, unjoined = _replicas(store, window, filters, served, instances)
    aborted_counted = int((rows["outcome"] == "aborted").sum()) + _aborted_counters(replicas)
    baseline = _baseline(window, served)
    before = served.clear()
    if baseline is not None:
        earlier = rows_in(baseline, filters)
        before = store.query(f"{_SELECT} WHERE {earlier.sql}", earlier.parameters)
    return Scene(
        window=window,
        requests=served.sort("finished_unix_ns", "request_key"),
        refused=int((rows["outcome"] == "refused").sum()),
        aborted=aborted_counted,
        replicas=replicas,
        before=before,
        baseline=baseline if len(before) else None,
        now_unix_ns=now_unix_ns,
        newest_unix_ns=_newest(served, replicas),
        unjoined=unjoined,
        facts=_facts(store, served),
    )


def read_settings(text: str | None) -> dict[str, Setting]:
    """The settings column of `instances`: a JSON object name -> {"value", "source"}."""
    if not text:
        return {}
    return {name: Setting(one.get("value"), str(one.get("source", ""))) for name, one in json.loads(text).items()}


def _replicas(
    store: Reader, window: Window, filters: Sequence[Filter], served: pl.DataFrame, instances: pl.DataFrame
) -> tuple[tuple[Replica, ...], tuple[str, ...]]:
    # An engine that pushes both spans and metrics stands twice under one name, once a kind.
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in instances.iter_rows(named=True):
        by_name.setdefault(row["instance"], []).append(row)
    spans: list[str] = served["instance"].drop_nulls().unique().sort().to_list()
    scraped_of: dict[str, list[str]] = {}
    for row in instances.iter_rows(named=True):
        if row["kind"] == "scrape" and row["joined_to"]:
            scraped_of.setdefault(row["joined_to"], []).append(row["instance"])
    low, high = window.from_unix_ns - LIVE_NS, min(window.to_unix_ns, FAR_NS) + LIVE_NS
    samples = store.query(
        "SELECT * FROM engine_samples WHERE unix_ns >= ? AND unix_ns < ? ORDER BY instance, unix_ns", (low, high)
    )
    narrowed = _narrowed(store, filters)
    found: list[Replica] = []
    for name in spans:
        names = [name, *scraped_of.get(name, [])]
        own = samples.filter(pl.col("instance").is_in(names) & pl.col("joined").fill_null(True))
        settings: dict[str, Setting] = {}
        for row in (row for known in names for row in by_name.get(known, ())):
            settings |= read_settings(row["settings"])
        engine = served.filter(pl.col("instance") == name)["engine"].drop_nulls()
        found.append(Replica(name, engine[0] if len(engine) else None, own, settings, True))
    taken = {n for name in spans for n in [name, *scraped_of.get(name, [])]}
    alone = []
    for name in samples["instance"].unique().sort().to_list():
        rows = by_name.get(name, [])
        targets = {row["joined_to"] for row in rows if row["joined_to"]}
        if name in taken or targets & taken:
            continue
        if narrowed is not None and not ({name} | targets) & narrowed:
            continue
        own = samples.filter(pl.col("instance") == name)
        if own["joined"].fill_null(True).all():
            stated = {key: one for row in rows for key, one in read_settings(row["settings"]).items()}
            found.append(Replica(name, own["engine"][0], own, stated, False))
        else:
            alone.append(name)
    return tuple(found), tuple(alone)


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


def _baseline(window: Window, served: pl.DataFrame) -> Window | None:
    first = served["arrival_unix_ns"].min()
    if not isinstance(first, int):
        return None
    end = max(window.from_unix_ns, 0)
    if end <= 0:
        return None
    return Window(max(0, end - min(window.to_unix_ns - end, BASELINE_MAX_NS)), end)


def _aborted_counters(replicas: Sequence[Replica]) -> int:
    total = 0.0
    for replica in replicas:
        counter = replica.samples["aborted"].drop_nulls()
        if len(counter) > 1:
            steps = counter.diff().drop_nulls()
            total += float(steps.filter(steps > 0).sum())
    return round(total)


def _newest(served: pl.DataFrame, replicas: Sequence[Replica]) -> int | None:
    times = [served["finished_unix_ns"].max(), *(replica.samples["unix_ns"].max() for replica in replicas)]
    known = [t for t in times if isinstance(t, int)]
    return max(known, default=None)


def _facts(store: Reader, served: pl.DataFrame) -> dict[str, object]:
    """What is known of the recordings behind the rows, for the badge: dataset -> facts."""
    names = served["dataset"].drop_nulls().unique().sort().to_list()
    if not names:
        return {}
    runs = store.query("SELECT name, facts FROM runs WHERE list_contains(?, name)", (names,))
    told = {row["name"]: json.loads(row["facts"] or "{}") for row in runs.iter_rows(named=True)}
    return {name: told.get(name, {}) for name in names}
