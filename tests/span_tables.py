"""Span tables for tests: a short form of a trace, as the examples of the engine profiles use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from phasewise.collector.records import SPAN_SCHEMA

BASE_UNIX_NS = 1_795_972_000 * 10**9


def at(seconds: float) -> int:
    """Unix nanoseconds of a time in an example."""
    return BASE_UNIX_NS + round(seconds * 1e9)


def span_table(
    spans: Sequence[Mapping[str, Any]], trace_id: str = "0af7651916cd43dd8448eb211c80319c", received_unix_ns: int = 0
) -> pa.Table:
    """Rows of SPAN_SCHEMA from {name, id, parent, scope, kind, status, start_s, end_s, attributes, resource, events}."""
    ids = {span["id"]: f"{index + 1:016x}" for index, span in enumerate(spans) if "id" in span}
    rows = []
    for index, span in enumerate(spans):
        resource = span.get("resource", {"service.instance.id": "i-1", "service.name": "engine"})
        events = [
            {"name": e["name"], "unix_ns": at(e.get("at_s", 0)), "attributes": {}} for e in span.get("events", [])
        ]
        rows.append(
            {
                "trace_id": span.get("trace", trace_id),
                "span_id": span.get("span_id", f"{index + 1:016x}"),
                "parent_span_id": ids.get(span.get("parent"), span.get("parent")),
                "name": span["name"],
                "kind": span.get("kind", 2),
                "start_unix_ns": span.get("start_unix_ns", at(span["start_s"])),
                "end_unix_ns": span.get("end_unix_ns", at(span["end_s"])),
                "status_code": span.get("status", 0),
                "status_message": span.get("message"),
                "scope_name": span.get("scope"),
                "scope_version": None,
                "resource": json.dumps(dict(resource), sort_keys=True, ensure_ascii=False, separators=(",", ":")),
                "attributes": json.dumps(dict(span.get("attributes", {})), ensure_ascii=False, separators=(",", ":")),
                "events": json.dumps(events, ensure_ascii=False, separators=(",", ":")) if events else None,
                "links": None,
                "dropped": span.get("dropped", 0),
                "flags": None,
                "received_unix_ns": received_unix_ns or at(span["end_s"]),
            }
        )
    return pa.Table.from_pylist(rows, schema=SPAN_SCHEMA)


def span_frame(spans: Sequence[Mapping[str, Any]], trace_id: str = "0af7651916cd43dd8448eb211c80319c") -> pl.DataFrame:
    frame = pl.from_arrow(span_table(spans, trace_id))
    assert isinstance(frame, pl.DataFrame)
    return frame
