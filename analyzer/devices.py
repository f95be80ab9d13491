"""The devices that were read in a window: how they were used, what slowed them, and which engine has them.

An engine is joined to a device by the pod that has it, by its own readings, or by the host. On a host with several engines
and no pods, all of them are named: which one uses the device is not told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.analyzer.window import Window
from phasewise.collector.devices import throttle_words

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

Devices = Sequence[Mapping[str, Any]]  # as devices_in gives them
_MEANS = (
    "utilization_ratio engine_active_ratio sm_active_ratio tensor_active_ratio dram_active_ratio power_w sm_clock_hz"
).split()


def _mean(name: str) -> str:
    """To nine digits after the point, and the same in whatever order the readings are added."""
    return f'sum(TRY_CAST("{name}" * 1e9 AS BIGINT)) / 1e9 / nullif(count("{name}"), 0) AS "{name}"'


_SQL = f"""
WITH "one" AS (
  SELECT "device", "instance", max("host") AS "host", max("namespace") AS "namespace", max("pod") AS "pod", max("model") AS "model",
    arg_max("source", "unix_ns") AS "source", count(*) AS "readings_n", max("unix_ns") AS "last_unix_ns",
    {", ".join(_mean(name) for name in _MEANS)}, max("memory_used_bytes") AS "memory_used_bytes", max("memory_total_bytes") AS "memory_total_bytes",
    max("temperature_c") AS "temperature_c",
    bit_or("throttle_reasons") AS "throttle_reasons", arg_max("xid", "unix_ns") AS "xid"
  FROM "gpu_samples" WHERE "unix_ns" >= ? AND "unix_ns" < ? GROUP BY "device", "instance"
),
"known" AS (
  SELECT DISTINCT i."instance", coalesce(i."joined_to", i."instance") AS "replica", p."host", p."node", p."namespace", p."pod"
  FROM "instances" i LEFT JOIN "places" p ON p."instance" = i."instance"
),
"joined" AS (
  SELECT o."device", o."instance", k."replica", CASE
    WHEN k."instance" = o."instance" THEN 'resource'
    WHEN k."pod" = o."pod" AND coalesce(k."namespace" = o."namespace", TRUE) THEN 'pod'
    WHEN o."pod" IS NULL AND o."host" IN (k."host", k."node") THEN 'host' END AS "by"
  FROM "one" o, "known" k
),
"told" AS (
  SELECT "device", "instance", list(DISTINCT "replica" ORDER BY "replica") AS "engines", max("by") AS "joined_by" FROM "joined"
  WHERE "by" IS NOT NULL GROUP BY "device", "instance"
)
SELECT o.*, coalesce(t."engines", []) AS "engines", t."joined_by" FROM "one" o LEFT JOIN "told" t USING ("device", "instance")
ORDER BY o."host", o."device", o."instance" LIMIT 1000
"""


def devices_in(store: Reader, window: Window) -> list[dict[str, Any]]:
    """One object a device, and pod that has it: means over the window's readings (the largest memory and temperature, every
    reason for a lower clock), the last error code, the engines it was joined to and by what."""
    rows = store.query(_SQL, (window.from_unix_ns, window.to_unix_ns)).to_dicts()
    for row in rows:
        bits = row["throttle_reasons"]
        row["throttle_reasons"] = None if bits is None else throttle_words(bits)
    return rows


def devices_of(devices: Devices, engines: Sequence[str]) -> Devices:
    """Those that surely belong to some of these engines: on a host with several engines nobody knows whose a device is."""
    known = set(engines)
    return [one for one in devices if one["engines"] and known.issuperset(one["engines"]) and _is_sure(one)]


def _is_sure(device: Mapping[str, Any]) -> bool:
    return device["joined_by"] != "host" or len(device["engines"]) == 1
