"""A trace as Tempo's API and Grafana's download give it: OTLP under older names (`batches`), ids in base64 or hex."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GROUPS = ("batches", "resourceSpans", "resource_spans")
_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "instrumentation_library_spans", "ilSpans")


def recognises(document: Mapping[str, Any]) -> bool:
    """`{"batches": [...]}`, or the second version of the API: `{"trace": {...}}`."""
    trace = document.get("trace")
    return "batches" in document or (isinstance(trace, dict) and any(key in trace for key in _GROUPS))


def as_otlp(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same as an OTLP/JSON request; what has another shape is left as it is, for the scanner to refuse by name."""
    trace = document.get("trace")
    held = trace if isinstance(trace, dict) else document
    groups: Any = next((held[key] for key in _GROUPS if key in held), [])
    if not isinstance(groups, list):
        return {"resourceSpans": groups}
    return {"resourceSpans": [_group(group) if isinstance(group, dict) else group for group in groups]}


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    scopes: Any = next((group[key] for key in _SCOPES if key in group), [])
    if isinstance(scopes, list):
        scopes = [_scope(scope) if isinstance(scope, dict) else scope for scope in scopes]
    return {"resource": group.get("resource"), "scopeSpans": scopes}


def _scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    named = scope.get("scope", scope.get("instrumentationLibrary", scope.get("instrumentation_library")))
    return {"scope": named, "spans": scope.get("spans", [])}
