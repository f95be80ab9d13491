"""Sends the spans of a plan (JSON on stdin) with the OpenTelemetry SDK for Python, as an application would."""

from __future__ import annotations

import json
import sys
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter


def exporter(plan: dict[str, Any]) -> SpanExporter:
    zipped = plan["compression"] == "gzip"
    if plan["protocol"] == "grpc":
        from grpc import Compression

        return GrpcExporter(endpoint=plan["url"], compression=Compression.Gzip if zipped else None)
    return HttpExporter(endpoint=plan["url"], compression=HttpCompression.Gzip if zipped else None)


def nanoseconds(pair: list[int]) -> int:
    """Seconds and nanoseconds, the form that JavaScript wants."""
    return pair[0] * 10**9 + pair[1]


def main() -> None:
    plan = json.load(sys.stdin)
    provider = TracerProvider(resource=Resource.create(plan["resource"]))
    provider.add_span_processor(BatchSpanProcessor(exporter(plan)))
    made: list[trace.Span] = []
    for one in plan["spans"]:
        parent = Context() if one["parent"] is None else trace.set_span_in_context(made[one["parent"]], Context())
        span = provider.get_tracer(one["scope"]).start_span(
            one["name"],
            context=parent,
            kind=trace.SpanKind[one["kind"]],
            start_time=nanoseconds(one["start"]),
            attributes=one["attributes"],
            links=[trace.Link(made[index].get_span_context()) for index in one["links"]],
        )
        for event in one["events"]:
            span.add_event(event["name"], event["attributes"], nanoseconds(event["at"]))
        if one["error"]:
            span.set_status(trace.Status(trace.StatusCode.ERROR, one["error"]))
        made.append(span)
    for index in range(len(made) - 1, -1, -1):
        made[index].end(nanoseconds(plan["spans"][index]["end"]))
    if not provider.force_flush():
        raise SystemExit("not all spans were sent")
    provider.shutdown()


if __name__ == "__main__":
    main()
