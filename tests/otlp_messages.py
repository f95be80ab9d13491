"""Builders of OTLP messages for tests of the receiving side: say what matters, the rest is filled in."""

from __future__ import annotations

import gzip
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

START_UNIX_NS = 1_768_435_200_000_000_000
RECEIVED_UNIX_NS = START_UNIX_NS + 5_000_000_000
_IDS = itertools.count(1)


def any_value(value: object) -> AnyValue:
    if isinstance(value, AnyValue):
        return value
    made = AnyValue()
    if isinstance(value, bool):
        made.bool_value = value
    elif isinstance(value, int):
        made.int_value = value
    elif isinstance(value, float):
        made.double_value = value
    elif isinstance(value, str):
        made.string_value = value
    elif isinstance(value, bytes):
        made.bytes_value = value
    elif isinstance(value, Mapping):
        made.kvlist_value.SetInParent()
        made.kvlist_value.values.extend(key_values(value))
    elif isinstance(value, Iterable):
        made.array_value.SetInParent()
        made.array_value.values.extend(any_value(item) for item in value)
    return made


def key_values(attributes: Mapping[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def span_message(attributes: Mapping[str, object] | None = None, **fields: object) -> Span:
    """A valid span of two seconds with fresh ids; `fields` overrides any field by its protobuf name."""
    number = next(_IDS)
    span = Span(
        trace_id=number.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=START_UNIX_NS,
        end_time_unix_nano=START_UNIX_NS + 2_000_000_000,
        attributes=key_values(attributes or {}),
    )
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(span, name).extend(value)
        elif isinstance(value, Message):
            getattr(span, name).CopyFrom(value)
        else:
            setattr(span, name, value)
    return span


def trace_request(
    *spans: Span, resource: Mapping[str, object] | None = None, scope: str = "vllm.tracing.otel"
) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(key_values({"service.name": "vllm-server"} if resource is None else resource))
    scope_spans = group.scope_spans.add()
    scope_spans.scope.name = scope
    scope_spans.spans.extend(spans)
    return request


def metrics_request(*metrics: Metric, resource: Mapping[str, object] | None = None) -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(key_values({"service.name": "vllm-server"} if resource is None else resource))
    group.scope_metrics.add(metrics=metrics).scope.name = "metrics"
    return request


def otlp_json(message: Message) -> dict[str, object]:
    """The message as OTLP/JSON: protobuf's JSON mapping, but ids in hex and enums as numbers."""
    found: dict[str, object] = json_format.MessageToDict(message, use_integers_for_enums=True)
    _hex_ids(found, message)
    return found


def _hex_ids(found: object, message: Message) -> None:
    assert isinstance(found, dict)
    for field, value in message.ListFields():
        if field.name in ("trace_id", "span_id", "parent_span_id"):
            found[field.json_name] = value.hex()
        elif field.message_type is None:
            continue
        elif field.is_repeated:
            for inner, part in zip(found[field.json_name], value, strict=True):
                _hex_ids(inner, part)
        else:
            _hex_ids(found[field.json_name], value)


def captured_bodies(file: Path) -> Iterator[bytes]:
    """Request bodies of a recording (`otlp-traces.ld.gz`): each behind its length, four bytes big-endian."""
    data = gzip.decompress(file.read_bytes())
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length
