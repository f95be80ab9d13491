"""OTLP written to a file: a request as protobuf, as JSON, or one JSON request a line (the Collector's file exporter)."""

from __future__ import annotations

import json
from typing import Any, Literal

import pyarrow as pa

from phasewise.collector.importers.lines import Lines
from phasewise.collector.metric_scan import scan_metrics
from phasewise.collector.otlp_json import json_to_protobuf
from phasewise.collector.records import Scanned
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed
from phasewise.rules.errors import InputError

Signal = Literal["traces", "metrics"]
_KEYS: dict[str, Signal] = {
    "resourceSpans": "traces",
    "resource_spans": "traces",
    "resourceMetrics": "metrics",
    "resource_metrics": "metrics",
}


def is_otlp(document: dict[str, Any]) -> bool:
    return any(key in document for key in _KEYS)


def read_json(lines: Lines, received_unix_ns: int) -> tuple[pa.Table | None, pa.Table | None]:
    """Spans and metric points of all requests in the file."""
    found: dict[Signal, list[pa.Table]] = {"traces": [], "metrics": []}
    for place, document in lines:
        signal = next((_KEYS[key] for key in document if key in _KEYS), None)
        if signal is None:
            lines.bad(place, "", "is no OTLP request", "write resourceSpans or resourceMetrics")
            continue
        try:
            body = json_to_protobuf(json.dumps(document).encode(), signal)
            scanned = _scan(body, signal, received_unix_ns)
        except Malformed as error:
            lines.bad(place, "", str(error), "write OTLP/JSON as the specification has it")
            continue
        lines.good(scanned.rows.num_rows)
        for _ in range(sum(scanned.rejected.values())):
            lines.bad(place, "", scanned.first_error)
        found[signal].append(scanned.rows)
    lines.require_some("write OTLP requests as JSON")
    spans = pa.concat_tables(found["traces"]) if found["traces"] else None
    metrics = pa.concat_tables(found["metrics"]) if found["metrics"] else None
    return spans, metrics


def read_protobuf(
    body: bytes, name: str, received_unix_ns: int
) -> tuple[Literal["spans", "metrics"], pa.Table, dict[str, int], list[str]]:
    """Rows of one request; traces are tried first."""
    for kind, signal in (("spans", "traces"), ("metrics", "metrics")):
        try:
            scanned = _scan(body, "traces" if signal == "traces" else "metrics", received_unix_ns)
        except Malformed:
            continue
        if scanned.rows.num_rows:
            counts = {"good": scanned.rows.num_rows, "bad": sum(scanned.rejected.values())}
            problems = [f"{name}: {scanned.first_error}"] if scanned.first_error else []
            return ("spans" if kind == "spans" else "metrics"), scanned.rows, counts, problems
    raise InputError(
        name,
        "",
        "is neither text that holds JSON nor an OTLP request",
        "name a file of JSON lines, OTLP JSON or OTLP protobuf",
    )


def _scan(body: bytes, signal: Signal, received_unix_ns: int) -> Scanned:
    return scan_traces(body, received_unix_ns) if signal == "traces" else scan_metrics(body, received_unix_ns)
