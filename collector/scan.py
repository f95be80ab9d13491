"""OTLP traces to columns.

Kept as they came: times, ids, kinds, unknown attributes. A span is refused (counted by reason, its neighbours stay) only when
nothing could ever be done with it: no valid trace or span id, no start, a time beyond signed 64 bits, undecodable bytes.
An end before its start is kept and flagged `negative_duration`: the attributes may still tell the durations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from phasewise.collector.attributes import Notes, Value, cut_text, read_attributes, to_json, to_sorted_json
from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.records import SPAN_SCHEMA, Scanned
from phasewise.collector.wire import Group, Malformed, decoded, groups

_BATCH_ROWS = 4096  # rows held as Python objects before they become columns
_MAX_UNIX_NS = (1 << 63) - 1
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_REPLACED = "\ufffd"
_REMEMBERED, _REMEMBERED_BYTES = 256, 8192  # pairs of resource and scope, and the longest that is remembered


def scan_traces(body: bytes, received_unix_ns: int) -> Scanned:
    """Rows of one ExportTraceServiceRequest (protobuf), in the order they came; columns of records.SPAN_SCHEMA.

    Raises Malformed when the request, or every span in it, cannot be decoded. Flags (column `flags`, counts in `warned`):
    sanitised (text holds U+FFFD: invalid UTF-8, replaced here or by the sender), truncated, attributes_cut, key_dropped,
    duplicate_key, too_deep, events_cut, links_cut, parent_invalid, negative_duration, future.
    Rejected: undecodable, trace_id, span_id, start_missing, time_range.
    """
    reader = SpanReader(received_unix_ns)
    batches = list(_batches(groups(body), reader))
    return reader.scanned(pa.Table.from_batches(batches, schema=SPAN_SCHEMA))


def _batches(found: Iterable[Group], reader: SpanReader) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[object, ...]] = []
    count = 0
    for group in found:
        shared = reader.shared(group.resource, group.scope)
        for data in group.items:
            count += 1
            row = reader.row(data, shared, count)
            if row is None:
                continue
            rows.append(row)
            if len(rows) >= _BATCH_ROWS:
                yield columns(rows)
                rows = []
    if rows:
        yield columns(rows)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the spans of one resource and scope have in common."""

    resource: str
    scope_name: str | None
    scope_version: str | None
    flags: list[str]
    names: frozenset[str]  # of the resource's attributes, at any depth


class SpanReader:
    """Reads one span after the other, and counts what it refused and what it changed."""

    def __init__(self, received_unix_ns: int) -> None:
        self._received_unix_ns = received_unix_ns
        self._notes = Notes()
        self._warned: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._first_error = ""
        self._names: set[str] = set()

    def shared(self, resource: bytes, scope: bytes) -> Shared:
        """Raises Malformed."""
        small = len(resource) + len(scope) <= _REMEMBERED_BYTES
        shared = _remembered(resource, scope) if small else _shared(resource, scope)
        self._names |= shared.names
        return shared

    def row(self, data: bytes, shared: Shared, number: int) -> tuple[object, ...] | None:
        """Columns of SPAN_SCHEMA of the span with this number (from 1) in the request, None where it is refused."""
        span = decoded(Span, data)
        reason, problem = ("undecodable", "cannot be decoded") if span is None else _fault(span)
        if span is None or reason:
            self._rejected[reason] = self._rejected.get(reason, 0) + 1
            name = repr(span.name[:60]) if span is not None else "?"
            self._first_error = self._first_error or f"span {number} ({name}): {problem}"
            return None
        row = _row(span, self._notes, self._received_unix_ns)
        flags = list(dict.fromkeys([*shared.flags, *self._notes.take()]))
        self.warn(flags)
        scope = (shared.scope_name, shared.scope_version, shared.resource)
        return (*row[:9], *scope, *row[9:], flags_json(flags), self._received_unix_ns)

    def warn(self, flags: list[str], spans: int = 1) -> None:
        """So many spans carry these flags."""
        for flag in flags:
            self._warned[flag] = self._warned.get(flag, 0) + spans

    def scanned(self, rows: pa.Table, names: set[str] | None = None) -> Scanned:
        """The result, once everything was read; names: those in the spans, where they are known. Raises Malformed where not one
        span could be decoded."""
        if not rows.num_rows and set(self._rejected) == {"undecodable"}:
            raise Malformed("none of its spans can be decoded")
        every = None if names is None else frozenset(names | self._names)
        return Scanned(rows, self._rejected, self._warned, self._first_error, every)


def flags_json(flags: list[str]) -> str | None:
    return to_json(flags) if flags else None


def columns(rows: list[tuple[object, ...]]) -> pa.RecordBatch:
    """The rows, at least one, as columns of SPAN_SCHEMA."""
    values = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(values, SPAN_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SPAN_SCHEMA)


def _shared(resource: bytes, scope: bytes) -> Shared:
    """Raises Malformed."""
    notes = Notes()
    decoded_resource = decoded(Resource, resource)
    if decoded_resource is None:
        raise Malformed("one of its resources cannot be decoded")
    attributes = read_attributes(decoded_resource.attributes, notes, SPAN_LIMITS.resource_attributes)
    text = to_sorted_json(attributes)
    if _REPLACED in text:
        notes.add("sanitised")
    flags = notes.take()
    found = decoded(InstrumentationScope, scope) or InstrumentationScope()
    name, version = cut_text(found.name, notes) or None, cut_text(found.version, notes) or None
    return Shared(text, name, version, list(dict.fromkeys([*flags, *notes.take()])), frozenset(_keys(attributes)))


# A sender's resource and scope come with each of its requests.
_remembered = lru_cache(_REMEMBERED)(_shared)


def _keys(value: Value) -> Iterator[str]:
    """The keys of maps, at any depth."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _keys(item)


def _fault(span: Span) -> tuple[str, str]:
    """Reason and sentence why a span cannot be kept; two empty texts where it can."""
    trace_id, span_id = span.trace_id, span.span_id
    if len(trace_id) != 16 or trace_id == _NO_TRACE:
        what = "is all zero" if trace_id == _NO_TRACE else f"has {len(trace_id)} bytes, not 16"
        return "trace_id", f"traceId {what}"
    if len(span_id) != 8 or span_id == _NO_SPAN:
        what = "is all zero" if span_id == _NO_SPAN else f"has {len(span_id)} bytes, not 8"
        return "span_id", f"spanId {what}"
    if not span.start_time_unix_nano:
        return "start_missing", "startTimeUnixNano is missing or 0"
    if span.start_time_unix_nano > _MAX_UNIX_NS or span.end_time_unix_nano > _MAX_UNIX_NS:
        return "time_range", "startTimeUnixNano or endTimeUnixNano lies beyond the year 2262"
    return "", ""


def _row(span: Span, notes: Notes, received_unix_ns: int) -> tuple[object, ...]:
    """Columns of the span itself; those of resource and scope, the flags and the receipt are the caller's."""
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    if end < start:
        notes.add("negative_duration")
    if start - received_unix_ns > SPAN_LIMITS.future_s * 1e9:
        notes.add("future")
    name = cut_text(span.name, notes)
    attributes = to_json(read_attributes(span.attributes, notes)) if span.attributes else "{}"
    events = _events_json(span, notes) if span.events else None
    links = _links_json(span, notes) if span.links else None
    message = cut_text(span.status.message, notes) or None
    if any(text is not None and _REPLACED in text for text in (name, attributes, events, links, message)):
        notes.add("sanitised")
    return (
        span.trace_id.hex(),
        span.span_id.hex(),
        _parent(span, notes),
        name,
        span.kind,
        start,
        end,
        span.status.code,
        message,
        attributes,
        events,
        links,
        span.dropped_attributes_count + span.dropped_events_count + span.dropped_links_count,
    )


def _parent(span: Span, notes: Notes) -> str | None:
    """None for a root; eight zero bytes mean the same, and anything but eight bytes is no id at all."""
    parent: bytes = span.parent_span_id
    if not parent or parent == _NO_SPAN:
        return None
    if len(parent) != 8:
        notes.add("parent_invalid")
        return None
    return parent.hex()


def _events_json(span: Span, notes: Notes) -> str:
    events: list[Value] = []
    for event in span.events[: SPAN_LIMITS.events]:
        if event.time_unix_nano > _MAX_UNIX_NS:
            notes.add("events_cut")
            continue
        events.append(
            {
                "name": cut_text(event.name, notes),
                "unix_ns": event.time_unix_nano,
                "attributes": read_attributes(event.attributes, notes),
            }
        )
    if len(span.events) > SPAN_LIMITS.events:
        notes.add("events_cut")
    return to_json(events)


def _links_json(span: Span, notes: Notes) -> str:
    links: list[Value] = []
    for link in span.links[: SPAN_LIMITS.links]:
        if len(link.trace_id) != 16 or len(link.span_id) != 8:
            notes.add("links_cut")
            continue
        attributes = read_attributes(link.attributes, notes)
        links.append({"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex(), "attributes": attributes})
    if len(span.links) > SPAN_LIMITS.links:
        notes.add("links_cut")
    return to_json(links)
