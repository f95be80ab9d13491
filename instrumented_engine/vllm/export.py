"""Drafts to spans of the OpenTelemetry SDK, and those to its OTLP exporter, under the resource of vLLM's own spans."""

from __future__ import annotations

from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from phasewise.instrumented_engine.vllm.facts import EngineFacts
from phasewise.instrumented_engine.vllm.settings import Settings
from phasewise.instrumented_engine.vllm.wire import SCOPE, WIRE_VERSION, Draft

_UNLIMITED = SpanLimits(max_span_attributes=SpanLimits.UNSET, max_attribute_length=SpanLimits.UNSET)
BATCH_SPANS = 512


class Export(Protocol):
    """Where drafts go."""

    def send(self, drafts: list[Draft]) -> int:
        """How many were taken."""
        ...

    def shutdown(self) -> None: ...


class SpanExport:
    """One per engine: its spans must have the resource of vLLM's, so that both are told as one instance. Used by one thread."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._ids = _GivenIds()
        self._ended = _Ended()
        # Ids, order and time are given; sampling here would only tear holes into vLLM's own choice of requests.
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource,
            id_generator=self._ids,
            span_limits=_UNLIMITED,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(SCOPE, WIRE_VERSION)

    def send(self, drafts: list[Draft]) -> int:
        """Spans that the other side has taken."""
        taken = 0
        for start in range(0, len(drafts), BATCH_SPANS):
            spans = [self._span(draft) for draft in drafts[start : start + BATCH_SPANS]]
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                taken += len(spans)
        return taken

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _span(self, draft: Draft) -> ReadableSpan:
        self._ids.trace_id, self._ids.span_id = draft.trace_id, draft.span_id
        kind = trace.SpanKind.SERVER if draft.server else trace.SpanKind.INTERNAL
        span = self._tracer.start_span(
            draft.name, context=Context(), kind=kind, attributes=draft.attributes, start_time=draft.start_unix_ns
        )
        span.end(draft.end_unix_ns)
        return self._ended.take()


def open_export(settings: Settings, facts: EngineFacts) -> SpanExport:
    """The exporter of these settings. Raises ImportError where its package is missing."""
    return SpanExport(_exporter(settings), _resource(facts))


def _exporter(settings: Settings) -> SpanExporter:
    """Addresses, headers and certificates are read by the exporter from OTEL_EXPORTER_OTLP_*."""
    if settings.protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    bare = "://" not in (settings.endpoint or "")
    return GrpcExporter(insecure=True) if bare else GrpcExporter()  # vLLM takes a bare host:port as insecure


def _resource(facts: EngineFacts) -> Resource:
    """That of the tracer which vLLM has set up, without one what the environment says; and how the engine is set."""
    found = getattr(trace.get_tracer_provider(), "resource", None)
    own = found if isinstance(found, Resource) else Resource.create()
    resource = own.merge(Resource(dict(facts.settings)))
    if facts.engine_index is None:
        return resource
    name = resource.attributes.get("service.instance.id") or resource.attributes.get("service.name")
    # Ranks behind one front end share its process; their steps are numbered by each, so each needs a name.
    return resource.merge(Resource({"service.instance.id": f"{name}/engine-{facts.engine_index}"}))


class _GivenIds(IdGenerator):
    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Ended(SpanProcessor):
    """Keeps the span that ended last."""

    def __init__(self) -> None:
        self._last: ReadableSpan | None = None

    def on_end(self, span: ReadableSpan) -> None:
        self._last = span

    def take(self) -> ReadableSpan:
        """Raises RuntimeError where no span came, for example after the SDK was shut down."""
        span, self._last = self._last, None
        if span is None:
            raise RuntimeError("the SDK made no span")
        return span
