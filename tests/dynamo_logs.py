"""Request records of Dynamo as the OTLP log records its sink sends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from otlp_messages import START_UNIX_NS, any_value, key_values

START_MS = START_UNIX_NS // 1_000_000
SCHEMA = "dynamo.request.trace.v1"
SERVED: Mapping[str, Any] = {
    "request_id": "r-1",
    "x_request_id": "x-1",
    "model": "m",
    "input_tokens": 64,
    "output_tokens": 5,
    "cached_tokens": 16,
    "request_received_ms": START_MS,
    "prefill_wait_time_ms": 250.0,
    "prefill_time_ms": 750.0,
    "ttft_ms": 1000.0,
    "total_time_ms": 4250.5,
    "avg_itl_ms": 750.0,
    "replay": {"trace_block_size": 2, "input_length": 4, "input_sequence_hashes": [11, 22]},
    "finish_reason_metadata": {"finish_reason": "stop"},
}


def request_end(**changes: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "event_type": "request_end",
        "event_time_unix_ms": START_MS + 4251,
        "agent_context": {"session_id": "s-1"},
        "request": {**SERVED, **changes},
    }


def tool_end(event: str = "tool_end", **changes: Any) -> dict[str, Any]:
    tool = {
        "tool_call_id": "c-1",
        "tool_class": "search",
        "started_at_unix_ms": START_MS,
        "ended_at_unix_ms": START_MS + 1500,
        "duration_ms": 1500.0,
    }
    return {
        "schema": SCHEMA,
        "event_type": event,
        "event_time_unix_ms": START_MS + 1500,
        "agent_context": {"session_id": "s-1"},
        "tool": {**tool, **changes},
    }


def logs_request(*payloads: object, scope: str = "dynamo.request_trace") -> ExportLogsServiceRequest:
    """One request with a log record a payload; a payload that is text goes as it is."""
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    group.resource.attributes.extend(key_values({"service.name": "dynamo"}))
    scoped = group.scope_logs.add()
    scoped.scope.name = scope
    for payload in payloads:
        event = str(payload.get("event_type")) if isinstance(payload, dict) else "?"
        record = scoped.log_records.add(time_unix_nano=START_UNIX_NS, body=any_value(event))
        text = payload if isinstance(payload, str) else json.dumps(payload)
        record.attributes.extend(key_values({"schema": SCHEMA, "event_type": event, "payload": text}))
    return request
