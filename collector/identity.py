"""Who sent a span: instance, service and version from its resource, read once for each distinct resource."""

from __future__ import annotations

import json

import polars as pl

from phasewise.collector.keys import text_key
from phasewise.collector.tenants import KEY_TENANT

SCHEMA = {
    "resource": pl.String,
    "instance": pl.String,
    "service": pl.String,
    "service_version": pl.String,
    "dataset": pl.String,
    "host": pl.String,
    "key_tenant": pl.String,
}
DATASET = "phasewise.dataset"  # resource attribute of a replayed recording: its rows are never taken for live traffic
HOSTS = ("host.id", "host.name", "k8s.node.name", "k8s.pod.name")


def instance_of(resource: str) -> str:
    """Name of the replica (the engine's process) that a resource describes.

    service.instance.id where it is set (SDKs since 1.45 set it), else the pod, else host and process, else the service's name,
    else a digest of the resource: two processes that say nothing about themselves cannot be told apart.
    """
    facts = json.loads(resource)
    if isinstance(facts.get("service.instance.id"), str) and facts["service.instance.id"]:
        return str(facts["service.instance.id"])
    if facts.get("k8s.pod.name"):
        return f"{facts.get('k8s.namespace.name', 'default')}/{facts['k8s.pod.name']}"
    host = facts.get("host.name") or facts.get("host.id")
    process = facts.get("process.pid") or facts.get("vllm.process_id")
    if host or process:
        return ":".join(str(part) for part in (host, process) if part is not None)
    return str(facts.get("service.name") or f"resource-{text_key(resource)[:12]}")


def identities(resources: pl.Series) -> pl.DataFrame:
    """One row a distinct resource text: instance, service, service_version, dataset, host (whose clock it is), key_tenant (of the
    key it came with)."""
    rows = []
    for resource in resources.unique():
        facts = json.loads(resource)
        service, version = facts.get("service.name"), facts.get("service.version")
        dataset = facts.get(DATASET)
        rows.append(
            (
                resource,
                instance_of(resource),
                None if service is None else str(service),
                None if version is None else str(version),
                None if dataset is None else str(dataset),
                next((str(facts[name]) for name in HOSTS if facts.get(name)), None),
                facts.get(KEY_TENANT),
            )
        )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")
