"""AIPerf `profile_export.jsonl`: one record a request, every metric with its own unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import ClientRecord, Unusable, gaps, seconds, whole

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def recognises(document: dict[str, Any]) -> bool:
    metadata = document.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and "metrics" in document


def records(document: dict[str, Any]) -> Iterator[ClientRecord]:
    """Token counts are those of the server's usage where it sends it, else AIPerf's own."""
    metadata, metrics = document["metadata"], document.get("metrics") or {}
    start = metadata.get("request_start_ns")
    if not isinstance(start, int):
        raise Unusable(
            "metadata.request_start_ns", f"is {start!r}, not nanoseconds", "export records with their metadata"
        )
    end = metadata.get("request_end_ns")
    e2e = _value(metrics, "request_latency")
    if e2e is None and isinstance(end, int):
        e2e = (end - start) / 1e9
    failed = bool(document.get("error"))
    yield ClientRecord(
        start_unix_ns=start,
        e2e_s=seconds(e2e, "metrics.request_latency"),
        end_unix_ns=end if isinstance(end, int) and end >= start else None,
        ttft_s=_value(metrics, "time_to_first_token"),
        tpot_s=_value(metrics, "inter_token_latency"),
        gaps_s=_gaps(metrics),
        input_tokens=_count(metrics, "usage_prompt_tokens", "input_sequence_length"),
        output_tokens=_count(metrics, "usage_completion_tokens", "output_sequence_length"),
        request_id=metadata.get("x_request_id"),
        outcome="aborted" if metadata.get("was_cancelled") else "refused" if failed else "ok",
    )


def _scale(metric: dict[str, Any], name: str) -> float:
    unit = str(metric.get("unit"))
    if unit not in _UNIT_S:
        raise Unusable(f"metrics.{name}.unit", f"is {unit!r}, not a unit of time", f"known: {', '.join(_UNIT_S)}")
    return _UNIT_S[unit]


def _value(metrics: dict[str, Any], name: str) -> float | None:
    metric = metrics.get(name)
    if not isinstance(metric, dict) or metric.get("value") is None:
        return None
    return seconds(metric["value"], f"metrics.{name}") * _scale(metric, name)


def _gaps(metrics: dict[str, Any]) -> list[float] | None:
    metric = metrics.get("inter_chunk_latency")
    if not isinstance(metric, dict):
        return None
    return gaps(metric.get("value"), "metrics.inter_chunk_latency", _scale(metric, "inter_chunk_latency"))


def _count(metrics: dict[str, Any], *names: str) -> int | None:
    for name in names:
        metric = metrics.get(name)
        if isinstance(metric, dict) and (found := whole(metric.get("value"))) is not None:
            return found
    return None
