"""OTLP log records to rows: of all logs only the request records of Dynamo, which are the spans of what they tell.

A record says when its request (or tool call) began and ended, so it is kept as a span of its own trace, whose ids come from
the record: sent again it is the same span. Prompts and answers (`request_payload`) never get past here; of the others only
the names listed below are read.
"""

from __future__ import annotations

import hashlib
import json
import math

import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from phasewise.collector.attributes import Notes, Value, cut_text, read_attributes, to_json, to_sorted_json
from phasewise.collector.limits import SPAN_LIMITS
from phasewise.collector.records import SPAN_SCHEMA, Scanned
from phasewise.collector.wire import Malformed, decoded, groups

SCOPE = "dynamo.request_trace"
NOT_KEPT = "not_kept"
_MAX_UNIX_NS = (1 << 63) - 1
_MS_NS = 1_000_000
_REQUEST_KEYS = (
    "request_id", "x_request_id", "model", "input_tokens", "output_tokens", "cached_tokens", "prefill_wait_time_ms",
    "prefill_time_ms", "ttft_ms", "total_time_ms", "avg_itl_ms", "kv_hit_rate", "kv_transfer_estimated_latency_ms",
    "queue_depth",
)  # fmt: skip
_TOOL_KEYS = ("tool_call_id", "tool_class", "duration_ms", "status", "output_tokens", "error_type")
PROBLEMS = {
    "undecodable": "cannot be decoded",
    NOT_KEPT: "is of a kind that is not kept: send traces, metrics and request records of Dynamo",
    "payload": "has no attribute payload with a request record in it",
    "start_missing": "does not say when it began",
    "time_range": "has a time beyond the year 2262",
}


class Unfit(Exception):
    """A record that cannot be kept; the reason, a key of PROBLEMS, is its text."""


def scan_logs(body: bytes, received_unix_ns: int) -> Scanned:
    """Rows of one ExportLogsServiceRequest (protobuf), columns of records.SPAN_SCHEMA, one a finished request or tool call.

    Raises Malformed. Rejected: undecodable, not_kept, payload, start_missing, time_range.
    """
    rows: list[tuple[object, ...]] = []
    rejected: dict[str, int] = {}
    warned: dict[str, int] = {}
    first_error = ""
    notes = Notes()
    count = 0
    for group in groups(body):
        resource = decoded(Resource, group.resource)
        if resource is None:
            raise Malformed("one of its resources cannot be decoded")
        resource_json = to_sorted_json(read_attributes(resource.attributes, notes, SPAN_LIMITS.resource_attributes))
        scope = decoded(InstrumentationScope, group.scope) or InstrumentationScope()
        notes.take()
        for data in group.items:
            count += 1
            try:
                row = _row(scope.name, data, resource_json, notes)
                flags = notes.take()
                rows.append((*row, to_json(list(flags)) if flags else None, received_unix_ns))
                for flag in flags:
                    warned[flag] = warned.get(flag, 0) + 1
            except Unfit as unfit:
                reason = str(unfit)
                rejected[reason] = rejected.get(reason, 0) + 1
                first_error = first_error or f"log record {count} {PROBLEMS[reason]}"
            notes.take()
    if not rows and set(rejected) == {"undecodable"}:
        raise Malformed("none of its log records can be decoded")
    columns = zip(*rows, strict=True) if rows else ([] for _ in SPAN_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SPAN_SCHEMA, strict=True)]
    return Scanned(pa.Table.from_arrays(arrays, schema=SPAN_SCHEMA), rejected, warned, first_error)


def _row(scope: str, data: bytes, resource_json: str, notes: Notes) -> tuple[object, ...]:
    if scope != SCOPE:
        raise Unfit(NOT_KEPT)
    log = decoded(LogRecord, data)
    if log is None:
        raise Unfit("undecodable")
    return row_of(_payload(log), resource_json, notes)


def row_of(record: dict[str, object], resource_json: str, notes: Notes) -> tuple[object, ...]:
    """Columns of a record's span but its flags and its receipt, which are the caller's. Raises Unfit."""
    event = record.get("event_type")
    request, tool = record.get("request"), record.get("tool")
    context = record.get("agent_context")
    session = context.get("session_id") if isinstance(context, dict) else None
    if event == "request_end" and isinstance(request, dict):
        found = kept(request, _REQUEST_KEYS, notes)
        finish = request.get("finish_reason_metadata")
        found |= kept(finish, ("finish_reason",), notes) if isinstance(finish, dict) else {}
        start, end = _interval(request.get("request_received_ms"), None, request.get("total_time_ms"), record)
        name, identity, failed = "request_end", f"{request.get('request_id')}", False
    elif event in ("tool_end", "tool_error") and isinstance(tool, dict):
        found = kept(tool, _TOOL_KEYS, notes)
        start, end = _interval(
            tool.get("started_at_unix_ms"), tool.get("ended_at_unix_ms"), tool.get("duration_ms"), record
        )
        name, identity, failed = "tool_end", f"{session}/{tool.get('tool_call_id')}", event == "tool_error"
    else:
        raise Unfit(NOT_KEPT if event in ("request_payload", "tool_start") else "payload")
    if isinstance(session, str):
        found["session_id"] = cut_text(session, notes)
    trace_id, span_id = _ids(f"{SCOPE}/{name}/{identity}/{start}")
    return (
        trace_id,
        span_id,
        None,
        name,
        1,
        start,
        end,
        2 if failed else 0,
        None,
        SCOPE,
        None,
        resource_json,
        to_json(found),
        None,
        None,
        0,
    )


def _payload(log: LogRecord) -> dict[str, object]:
    text = next((pair.value.string_value for pair in log.attributes if pair.key == "payload"), "")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise Unfit("payload") from None
    if not isinstance(record, dict):
        raise Unfit("payload")
    return record


def kept(source: dict[str, object], keys: tuple[str, ...], notes: Notes) -> dict[str, Value]:
    """The members of these names that are finite numbers or texts; what is absent or anything else is left out."""
    found: dict[str, Value] = {}
    for key in keys:
        value = source.get(key)
        if isinstance(value, str):
            found[key] = cut_text(value.encode("utf-8", "replace").decode(), notes)
        elif _is_number(value):
            assert isinstance(value, int | float)
            found[key] = value
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)


def _interval(start_ms: object, end_ms: object, length_ms: object, record: dict[str, object]) -> tuple[int, int]:
    """Start and end in Unix nanoseconds; the record's own time is the end where nothing else says it."""
    length = _ns(length_ms)
    end = _ns(end_ms)
    if end is None:
        end = _ns(record.get("event_time_unix_ms"))
    start = _ns(start_ms)
    if start is None and end is not None and length is not None:
        start = end - length
    if start is not None and length is not None:
        end = start + length
    if not start or end is None or start < 0:
        raise Unfit("start_missing")
    if max(start, end) > _MAX_UNIX_NS or end < 0:
        raise Unfit("time_range")
    return start, end


def _ns(milliseconds: object) -> int | None:
    if not _is_number(milliseconds):
        return None
    assert isinstance(milliseconds, int | float)
    least, most = (
        -_MAX_UNIX_NS - 1,
        _MAX_UNIX_NS + 1,
    )  # a finite number of milliseconds may be no finite one of nanoseconds
    return round(min(max(milliseconds * _MS_NS, least), most))


def _ids(identity: str) -> tuple[str, str]:
    digest = hashlib.blake2b(identity.encode("utf-8", "replace"), digest_size=24).hexdigest()
    return digest[:32], digest[32:]
