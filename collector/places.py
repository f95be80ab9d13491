"""Where instances run, noted once for each resource seen: a device's readings name a host or a pod, not an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import polars as pl

from phasewise.collector.identity import instance_of
from phasewise.collector.records import Place
from phasewise.collector.schemas import polars_schema
from phasewise.collector.transaction import Transaction

_SCHEMA = polars_schema(Place)
_KEYS = {
    "host": ("host.name", "host.id"),
    "node": ("k8s.node.name",),
    "namespace": ("k8s.namespace.name",),
    "pod": ("k8s.pod.name",),
    "pod_uid": ("k8s.pod.uid",),
}
_REMEMBERED = 50_000


def place_of(instance: str, facts: Mapping[str, object]) -> Place | None:
    """Host and pod of an instance by its resource attributes; None where they tell neither."""
    told = {
        name: next((str(facts[key]) for key in keys if isinstance(facts.get(key), str) and facts[key]), None)
        for name, keys in _KEYS.items()
    }
    return Place(instance=instance, **told) if any(told.values()) else None


class Places:
    """Which places are in the store already, so that a resource is read once and a place written once."""

    def __init__(self) -> None:
        self._resources: set[str] = set()
        self._written: set[Place] = set()

    def see_resources(self, transaction: Transaction, resources: pl.Series) -> None:
        """Resources of spans or metric points, as JSON text."""
        new = [text for text in resources.unique().to_list() if text not in self._resources]
        if not new:
            return
        if len(self._resources) + len(new) > _REMEMBERED:  # never emptied otherwise, by senders with ever new names
            self._resources.clear()
        self._resources.update(new)
        self._write(transaction, (place_of(instance_of(text), json.loads(text)) for text in new))

    def see_labels(self, transaction: Transaction, instance: str, labels: Mapping[str, str]) -> None:
        """Labels of a scraped target."""
        if labels:
            self._write(transaction, [place_of(instance, labels)])

    def _write(self, transaction: Transaction, places: Iterable[Place | None]) -> None:
        new = {one for one in places if one is not None} - self._written
        if not new:
            return
        if len(self._written) + len(new) > _REMEMBERED:
            self._written.clear()
        self._written |= new
        rows = pl.DataFrame([asdict(one) for one in new], schema=_SCHEMA, orient="row")
        rows = rows.unique("instance", keep="last")
        transaction.run("DELETE FROM places WHERE instance IN (SELECT instance FROM new_places)", new_places=rows)
        transaction.insert("places", rows)
