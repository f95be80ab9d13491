"""OTLP written to a file: a request as protobuf, as JSON, one JSON request a line, or messages with their lengths in front
(the Collector's file exporter, compressed or not)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from phasewise.collector.importers import framing
from phasewise.collector.importers.lines import PROBLEMS, Lines
from phasewise.collector.importers.streams import Damaged, decompressed
from phasewise.collector.log_scan import NOT_KEPT, scan_logs
from phasewise.collector.metric_scan import scan_metrics
from phasewise.collector.otlp_json import Signal, object_to_protobuf
from phasewise.collector.records import Scanned
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed, TooLarge
from phasewise.rules.errors import InputError

_KEYS: dict[str, Signal] = {
    "resourceSpans": "traces",
    "resource_spans": "traces",
    "resourceMetrics": "metrics",
    "resource_metrics": "metrics",
    "resourceLogs": "logs",
    "resource_logs": "logs",
}
_SIGNALS: tuple[Signal, ...] = ("traces", "metrics", "logs")


@dataclass(slots=True)
class Rows:
    """Tables of spans (of traces, and of the log records that tell of requests) and of metric points."""

    spans: list[pa.Table] = field(default_factory=list)
    metrics: list[pa.Table] = field(default_factory=list)

    def add(self, signal: Signal, scanned: Scanned) -> None:
        (self.metrics if signal == "metrics" else self.spans).append(scanned.rows)


def is_otlp(document: Mapping[str, Any]) -> bool:
    return any(key in document for key in _KEYS)


def read_json(lines: Lines, received_unix_ns: int) -> Rows:
    """Spans and metric points of all requests in the file."""
    found = Rows()
    for place, document in lines:
        _take_json(found, lines, place, document, received_unix_ns)
    lines.require_some("write OTLP requests as JSON")
    return found


def read_messages(body: bytes, name: str, received_unix_ns: int, first_number: int = 1) -> tuple[Rows, Lines]:
    """Rows of one protobuf request, or of many with their lengths in front, and how many were good or bad.

    Raises InputError where nothing is.
    """
    found, told = Rows(), Lines(name, b"")
    for number, message in enumerate(framing.messages(body), first_number):
        place = f"message {number}"
        try:
            content = decompressed(message, framing.LONGEST_BYTES)
        except Damaged as error:
            told.bad(place, "", str(error))
            continue
        if content[:1] == b"{":
            _take_json_text(found, told, place, content, received_unix_ns)
        else:
            _take_protobuf(found, told, place, content, received_unix_ns)
    if not told.counts["good"] and (framing.kind_of(body) is None or not told.problems):
        raise InputError(
            name,
            "",
            "is neither text that holds JSON nor an OTLP request",
            "name a file of JSON lines, OTLP JSON or OTLP protobuf",
        )
    told.require_some("write OTLP requests, each with its length in front")
    return found, told


def _take_json_text(found: Rows, told: Lines, place: str, content: bytes, received_unix_ns: int) -> None:
    try:
        document = json.loads(content.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        _take_json(found, told, place, document, received_unix_ns)
    else:
        told.bad(place, "", "is not JSON", "write OTLP/JSON")


def _take_json(found: Rows, lines: Lines, place: str, document: dict[str, Any], received_unix_ns: int) -> None:
    signal = next((_KEYS[key] for key in document if key in _KEYS), None)
    if signal is None:
        lines.bad(place, "", "is no OTLP request", "write resourceSpans, resourceMetrics or resourceLogs")
        return
    try:
        scanned = _scan(object_to_protobuf(document, signal), signal, received_unix_ns)
    except (Malformed, TooLarge) as error:
        lines.bad(place, "", str(error), "write OTLP/JSON as the specification has it")
        return
    _count(lines, place, signal, scanned)
    found.add(signal, scanned)


def _take_protobuf(found: Rows, told: Lines, place: str, content: bytes, received_unix_ns: int) -> None:
    """The signal whose scan finds something: they are not told apart by their bytes."""
    tried: list[tuple[Signal, Scanned]] = []
    for signal in _SIGNALS:
        try:
            scanned = _scan(content, signal, received_unix_ns)
        except (Malformed, TooLarge):
            continue
        if scanned.rows.num_rows:
            _count(told, place, signal, scanned)
            found.add(signal, scanned)
            return
        tried.append((signal, scanned))
    if any(signal == "logs" and set(scanned.rejected) == {NOT_KEPT} for signal, scanned in tried):
        return  # log records of others than Dynamo
    first = next((scanned.first_error for _, scanned in tried if scanned.first_error), "")
    told.bad(place, "", first or "is no OTLP request")


def _count(lines: Lines, place: str, signal: Signal, scanned: Scanned) -> None:
    """Log records that are not kept are nothing bad: a collector writes all of them."""
    rejected = dict(scanned.rejected)
    if signal == "logs":
        rejected.pop(NOT_KEPT, None)
    lines.good(scanned.rows.num_rows)
    bad = sum(rejected.values())
    for _ in range(min(bad, PROBLEMS)):
        lines.bad(place, "", scanned.first_error)
    lines.counts["bad"] += max(0, bad - PROBLEMS)


def _scan(body: bytes, signal: Signal, received_unix_ns: int) -> Scanned:
    if signal == "logs":
        return scan_logs(body, received_unix_ns)
    return scan_traces(body, received_unix_ns) if signal == "traces" else scan_metrics(body, received_unix_ns)
