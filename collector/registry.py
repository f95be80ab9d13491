"""The instances seen: who, when, with which settings, and which scrape belongs to which spans. Kept in memory, stored when changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import polars as pl

from phasewise.collector.context import Setting
from phasewise.collector.joins import Deviation, joined_names, joins_of
from phasewise.collector.records import Instance, columns
from phasewise.collector.schemas import polars_schema
from phasewise.collector.store import Transaction

_FIELDS = list(columns(Instance))


class Registry:
    """Instances by (name, kind).

    stated: settings that the operator states for every engine (accelerator, model); they win over what telemetry says.
    """

    def __init__(self, rows: pl.DataFrame, stated: Mapping[str, object] = MappingProxyType({})) -> None:
        self._instances = {(str(r["instance"]), str(r["kind"])): Instance(**r) for r in rows.iter_rows(named=True)}
        self._changed: set[tuple[str, str]] = set()
        self._unseen = True
        self._stated = stated
        for name, kind in list(self._instances):
            self._see_stated(name, kind)

    @property
    def instances(self) -> Mapping[tuple[str, str], Instance]:
        return self._instances

    def see_requests(self, rows: pl.DataFrame) -> None:
        """Engine replicas behind rows of `requests`."""
        known = rows.filter(pl.col("instance").is_not_null())
        facts = known.group_by("instance").agg(
            pl.col("engine").last(),
            pl.col("engine_version").drop_nulls().last(),
            pl.col("model").drop_nulls().last(),
            pl.col("service").drop_nulls().last(),
            pl.col("arrival_unix_ns").min(),
            pl.col("finished_unix_ns").max(),
        )
        for name, engine, version, model, service, first, last in facts.iter_rows():
            self._see(
                Instance(
                    instance=name,
                    engine=engine,
                    engine_version=version,
                    model=model,
                    service=service,
                    kind="spans",
                    first_seen_unix_ns=first,
                    last_seen_unix_ns=last,
                )
            )
            self._see_stated(name, "spans")

    def see_samples(self, samples: pl.DataFrame) -> None:
        facts = samples.group_by("instance").agg(
            pl.col("engine").last(),
            pl.col("model").drop_nulls().last(),
            pl.col("unix_ns").min().alias("first"),
            pl.col("unix_ns").max().alias("last"),
        )
        for name, engine, model, first, last in facts.iter_rows():
            self._see(
                Instance(
                    instance=name,
                    engine=engine,
                    model=model,
                    kind="scrape",
                    first_seen_unix_ns=first,
                    last_seen_unix_ns=last,
                )
            )

    def see_settings(self, instance: str, kind: str, settings: Mapping[str, object], source: str) -> None:
        """Settings of an instance already seen; the newest value of a name wins."""
        own = self._instances.get((instance, kind))
        if own is None or not settings:
            return
        known = json.loads(own.settings) if own.settings else {}
        merged = {**known, **{name: {"value": value, "source": source} for name, value in settings.items()}}
        if merged != known:
            self._put(replace(own, settings=json.dumps(merged, sort_keys=True)))

    def _see_stated(self, instance: str, kind: str) -> None:
        if kind == "spans":
            self.see_settings(instance, kind, self._stated, "user")

    @property
    def has_new(self) -> bool:
        """Whether an instance came that no join has looked at."""
        return self._unseen

    def join(self, family: Callable[[str | None], str | None], deviation: Deviation) -> set[str]:
        """Join spans and scrapes anew; returns the span instances whose join changed."""
        self._unseen = False
        found = joins_of(list(self._instances.values()), family, deviation)
        by_spans = {join.spans: join for join in found}
        latest: dict[str, str] = {}
        for join in sorted(found, key=lambda j: self._instances[(j.spans, "spans")].last_seen_unix_ns):
            latest[join.scrape] = join.spans
        changed = set()
        for (name, kind), own in list(self._instances.items()):
            if kind == "spans":
                join_of = by_spans.get(name)
                to, by = (join_of.scrape, join_of.by) if join_of else (None, None)
                if (own.joined_to, own.joined_by) != (to, by):
                    changed.add(name)
            else:
                to = latest.get(name)
                by = by_spans[to].by if to else None
            if (own.joined_to, own.joined_by) != (to, by):
                self._put(replace(own, joined_to=to, joined_by=by))
        return changed

    def sample_names(self, spans_instance: str) -> list[str]:
        return joined_names(self._instances, spans_instance)

    def spans_of(self, scrape: str) -> list[str]:
        """Span instances that a scrape of that name belongs to."""
        return [
            name
            for (name, kind), own in self._instances.items()
            if kind == "spans" and (own.joined_to == scrape or name == scrape)
        ]

    def sampled_range(self, spans_instance: str) -> tuple[int, int]:
        """Time that the scrapes of a replica cover; without scrapes, when it was seen itself."""
        scrapes = [
            self._instances[key] for n in self.sample_names(spans_instance) if (key := (n, "scrape")) in self._instances
        ]
        seen = scrapes or [self._instances[(spans_instance, "spans")]]
        return min(i.first_seen_unix_ns for i in seen), max(i.last_seen_unix_ns for i in seen)

    def settings(self, spans_instance: str) -> dict[str, Setting]:
        """Settings of a replica, its scrape's first, its spans' over them."""
        found: dict[str, Setting] = {}
        names = [(name, "scrape") for name in self.sample_names(spans_instance)] + [(spans_instance, "spans")]
        for key in names:
            own = self._instances.get(key)
            if own is not None and own.settings:
                for name, entry in json.loads(own.settings).items():
                    found[name] = Setting(entry["value"], entry["source"])
        return found

    def _ambiguous(self, scrape: Instance, family: Callable[[str | None], str | None]) -> bool:
        """Whether an unnamed scrape cannot be told to belong to one replica."""
        if scrape.joined_to or not scrape.instance.startswith("unnamed:"):
            return False
        same = [i for i in self._instances.values() if family(i.engine) == family(scrape.engine) and i is not scrape]
        return bool(same)

    def unnamed(self, family: Callable[[str | None], str | None]) -> dict[str, bool]:
        """Scrapes without a name -> whether it is known whose they are."""
        return {
            name: not self._ambiguous(own, family)
            for (name, kind), own in self._instances.items()
            if kind == "scrape" and name.startswith("unnamed:")
        }

    def store(self, transaction: Transaction) -> None:
        """Write what changed."""
        if not self._changed:
            return
        rows = [self._instances[key] for key in sorted(self._changed)]
        frame = pl.DataFrame(
            [{name: getattr(row, name) for name in _FIELDS} for row in rows],
            schema=polars_schema(Instance),
            orient="row",
        )
        transaction.run(
            "DELETE FROM instances WHERE EXISTS (SELECT 1 FROM changed c WHERE c.instance = instances.instance "
            "AND c.kind = instances.kind)",
            changed=frame.select("instance", "kind"),
        )
        transaction.insert("instances", frame)
        self._changed.clear()

    def _see(self, seen: Instance) -> None:
        own = self._instances.get((seen.instance, seen.kind))
        if own is None:
            self._unseen = True
            self._put(seen)
            return
        updated = replace(
            own,
            engine=seen.engine or own.engine,
            engine_version=seen.engine_version or own.engine_version,
            model=seen.model or own.model,
            service=seen.service or own.service,
            first_seen_unix_ns=min(own.first_seen_unix_ns, seen.first_seen_unix_ns),
            last_seen_unix_ns=max(own.last_seen_unix_ns, seen.last_seen_unix_ns),
        )
        if updated != own:
            self._put(updated)

    def _put(self, instance: Instance) -> None:
        key = (instance.instance, instance.kind)
        self._instances[key] = instance
        self._changed.add(key)
