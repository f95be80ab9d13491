"""Traces as Jaeger's query API and its download button give them, to OTLP/JSON.

Ids are hex whose leading zeros may be missing; times are microseconds; tags are typed; a process is the resource. What OTLP
exporters hide in tags (kind, status, scope) is put back in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_STATUS = {"OK": 1, "ERROR": 2}
_SCOPE_NAMES = ("otel.scope.name", "otel.library.name")
_SCOPE_VERSIONS = ("otel.scope.version", "otel.library.version")
_STATUS_TEXTS = ("otel.status_description", "status.message")
_PLACED = ("span.kind", "otel.status_code", "w3c.tracestate", "internal.span.format")
_MOVED = frozenset((*_PLACED, *_SCOPE_NAMES, *_SCOPE_VERSIONS, *_STATUS_TEXTS))


def recognises(document: Mapping[str, Any]) -> bool:
    """`{"data": [trace, ...]}` or one trace."""
    return ("spans" in document and bool({"traceID", "processes"} & set(document))) or _is_answer(document)


def _is_answer(document: Mapping[str, Any]) -> bool:
    data = document.get("data")
    if not isinstance(data, list):
        return False
    return {"total", "limit"} <= set(document) or any(isinstance(trace, dict) and "spans" in trace for trace in data)


def traces(document: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Each trace of a document with its place in it ("trace 2"); a document that is one trace has none."""
    if "spans" in document:
        yield "", document
        return
    data = document.get("data")
    for number, trace in enumerate(data if isinstance(data, list) else [], 1):
        yield f"trace {number}", trace


def as_otlp(trace: Mapping[str, Any]) -> dict[str, Any]:
    """One trace as an OTLP/JSON request. What cannot be understood stays unset: the scanner refuses that span and says why."""
    processes = trace.get("processes")
    known = processes if isinstance(processes, dict) else {}
    groups: list[dict[str, Any]] = []
    spans = trace.get("spans")
    for span in spans if isinstance(spans, list) else []:
        if not isinstance(span, dict):
            groups.append({"scopeSpans": [{"spans": [{}]}]})
            continue
        process = span.get("process") or known.get(str(span.get("processID")))
        tags = _tags(span.get("tags"))
        scope = {"name": _text(tags, _SCOPE_NAMES), "version": _text(tags, _SCOPE_VERSIONS)}
        groups.append(
            {"resource": _resource(process), "scopeSpans": [{"scope": scope, "spans": [_span(span, tags, trace)]}]}
        )
    return {"resourceSpans": groups}


def _span(span: Mapping[str, Any], tags: Sequence[Mapping[str, Any]], trace: Mapping[str, Any]) -> dict[str, Any]:
    trace_id = _id(span.get("traceID") or trace.get("traceID"), 32)
    start_us, duration_us = _whole(span.get("startTime")), _whole(span.get("duration"))
    parent, links = _references(span, trace_id)
    return {
        "traceId": trace_id,
        "spanId": _id(span.get("spanID"), 16),
        "parentSpanId": parent,
        "name": span.get("operationName"),
        "kind": _KINDS.get(str(_text(tags, ("span.kind",))).lower(), 0),
        "startTimeUnixNano": None if start_us is None else start_us * 1000,
        "endTimeUnixNano": None if start_us is None else (start_us + (duration_us or 0)) * 1000,
        "traceState": _text(tags, ("w3c.tracestate",)),
        "status": _status(tags),
        "attributes": [_attribute(tag) for tag in tags if tag.get("key") not in _MOVED],
        "events": [_event(log) for log in _objects(span.get("logs"))],
        "links": links,
    }


def _references(span: Mapping[str, Any], trace_id: str) -> tuple[str, list[dict[str, Any]]]:
    """Parent and links: the parent is the first CHILD_OF in this trace, else the first FOLLOWS_FROM in it."""
    found = [
        (str(reference.get("refType")), _id(reference.get("traceID") or trace_id, 32), _id(reference.get("spanID"), 16))
        for reference in _objects(span.get("references"))
    ]
    own = [
        reference for kind in ("CHILD_OF", "FOLLOWS_FROM") for reference in found if reference[:2] == (kind, trace_id)
    ]
    parent = own[0] if own else None
    links = [
        {
            "traceId": trace,
            "spanId": identifier,
            "attributes": [{"key": "opentracing.ref_type", "value": {"stringValue": kind.lower()}}],
        }
        for kind, trace, identifier in found
        if (kind, trace, identifier) != parent
    ]
    if parent is not None:
        return parent[2], links
    legacy = span.get("parentSpanID")  # before references were there
    return (_id(legacy, 16) if legacy and str(legacy).strip("0") else ""), links


def _status(tags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As OTLP exporters write it, else the OpenTracing tag `error`."""
    code = _STATUS.get(str(_text(tags, ("otel.status_code",))).upper(), 0)
    if not code and any(tag.get("key") == "error" and _truth(tag.get("value")) for tag in tags):
        code = 2
    return {"code": code, "message": _text(tags, _STATUS_TEXTS)}


def _resource(process: object) -> dict[str, Any]:
    if not isinstance(process, dict):
        return {}
    own = [_attribute(tag) for tag in _tags(process.get("tags"))]
    name = process.get("serviceName")
    if isinstance(name, str) and name:
        own = [{"key": "service.name", "value": {"stringValue": name}}, *(a for a in own if a["key"] != "service.name")]
    return {"attributes": own}


def _event(log: Mapping[str, Any]) -> dict[str, Any]:
    """A log line; its name is the field `event`, else `message`."""
    fields = _tags(log.get("fields"))
    key = next((name for name in ("event", "message") if _text(fields, (name,)) is not None), None)
    at_us = _whole(log.get("timestamp"))
    return {
        "timeUnixNano": None if at_us is None else at_us * 1000,
        "name": _text(fields, (key,)) if key else "",
        "attributes": [_attribute(field) for field in fields if field.get("key") != key],
    }


def _attribute(tag: Mapping[str, Any]) -> dict[str, Any]:
    """A tag by its type; without one the JSON value tells it."""
    kind, value = str(tag.get("type") or "").lower(), tag.get("value")
    if not kind:
        kind = {bool: "bool", int: "int64", float: "float64"}.get(type(value), "string")
    if kind == "bool":
        typed: dict[str, Any] = {"boolValue": _truth(value)}
    elif kind in ("int64", "int"):
        typed = {"intValue": value}
    elif kind in ("float64", "float", "double"):
        typed = {"doubleValue": value}
    elif kind == "binary":
        typed = {"bytesValue": value}
    else:
        typed = {"stringValue": value if isinstance(value, str) else "" if value is None else str(value)}
    return {"key": tag.get("key"), "value": typed}


def _truth(value: object) -> bool:
    return value is True or str(value).lower() == "true"


def _tags(found: object) -> list[dict[str, Any]]:
    """Tags as a list of {key, type, value}; search indexes keep them as an object of texts."""
    if isinstance(found, dict):
        return [{"key": key, "value": value} for key, value in found.items()]
    return _objects(found)


def _objects(found: object) -> list[dict[str, Any]]:
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _text(tags: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str | None:
    for key in keys:
        for tag in tags:
            if tag.get("key") == key and isinstance(tag.get("value"), str):
                return str(tag["value"])
    return None


def _id(value: object, digits: int) -> str:
    """Hex with its leading zeros; text that is no id stays as it is and is refused later."""
    text = str(value) if isinstance(value, str) else ""
    return text.rjust(digits, "0") if text else ""


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None
