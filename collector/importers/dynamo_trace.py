"""Dynamo's request trace (`DYN_REQUEST_TRACE=1`, JSON lines, rotated and gzipped): the records its OTLP sink sends as logs.

They become the same spans as those, so a record that comes both ways is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.attributes import Notes, to_json
from phasewise.collector.importers.record import Unusable
from phasewise.collector.log_scan import NOT_KEPT, PROBLEMS, Unfit, row_of
from phasewise.collector.records import SPAN_SCHEMA, Span

_SCHEMA = "dynamo.request.trace."
_EVENTS = ("request_end", "request_payload", "tool_start", "tool_end", "tool_error")
_NO_RESOURCE = "{}"


def recognises(document: dict[str, Any]) -> bool:
    record = _record(document)
    return str(record.get("schema")).startswith(_SCHEMA) and "event_type" in record


def spans(document: dict[str, Any]) -> Iterator[Span]:
    """The span of a finished request or tool call; none for a start or a payload, whose ends tell the same."""
    record = _record(document)
    if not str(record.get("schema")).startswith(_SCHEMA):
        raise Unusable("schema", f"is {record.get('schema')!r:.80}, not {_SCHEMA}v1")
    event = record.get("event_type")
    notes = Notes()
    try:
        row = row_of(record, _NO_RESOURCE, notes)
    except Unfit as unfit:
        if str(unfit) == NOT_KEPT and event in _EVENTS:
            return
        field = "event_type" if event not in _EVENTS else "request" if event == "request_end" else "tool"
        problem = (
            f"is {event!r:.80}, not one of {', '.join(_EVENTS)}" if field == "event_type" else PROBLEMS[str(unfit)]
        )
        raise Unusable(field, problem) from None
    flags = notes.take()
    yield Span(**dict(zip(SPAN_SCHEMA.names, (*row, to_json(list(flags)) if flags else None, 0), strict=True)))


def _record(document: dict[str, Any]) -> dict[str, Any]:
    """The record, also out of the envelope {"timestamp", "event"} that older releases write."""
    inner = document.get("event")
    return inner if isinstance(inner, dict) and "schema" not in document else document
