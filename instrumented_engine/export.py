"""The engine's telemetry through opentelemetry-sdk and its OTLP exporter. It never blocks the engine.

Requests and steps are handed to a thread of its own, which builds the spans of `telemetry.py` with the SDK's tracer; the SDK
batches and sends them. Both queues are bounded: what finds no room is left out as a whole, never half a request, and counted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import Attributes

from phasewise.instrumented_engine.request_telemetry import Boundary, Caller, ToolRun, request_telemetry
from phasewise.instrumented_engine.telemetry import (
    SCOPE,
    STEP_SPAN_NS,
    STEPS_PER_SPAN,
    WIRE_VERSION,
    RequestTelemetry,
    SpanDraft,
    StepTelemetry,
    Value,
    request_drafts,
    step_drafts,
)
from phasewise.rules.errors import InputError

__all__ = [
    "Boundary", "Caller", "ExportSettings", "SpanExport", "ToolRun", "make_exporter", "protocol_of", "request_telemetry",
]  # fmt: skip

Protocol = Literal["grpc", "http/protobuf"]
SEND_TIMEOUT_S = 5.0
_UNLIMITED = SpanLimits(max_span_attributes=SpanLimits.UNSET, max_attribute_length=SpanLimits.UNSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """endpoint: None takes OTEL_EXPORTER_OTLP_ENDPOINT, and where that is not set either nothing is sent. sampling_ratio: of the
    requests without a sampled parent; steps are always sent. queue_spans: spans that may wait to be sent."""

    endpoint: str | None = None
    protocol: Protocol | None = None
    sampling_ratio: float = 1.0
    queue_spans: int = 16_384
    delay_s: float = 0.5

    def __post_init__(self) -> None:
        """Raises InputError naming the setting."""
        if not 0 <= self.sampling_ratio <= 1:
            raise InputError("telemetry settings", "sampling_ratio", f"{self.sampling_ratio} is not within 0 to 1")
        if self.queue_spans < 512:
            raise InputError(
                "telemetry settings", "queue_spans", f"{self.queue_spans} is below one batch", "give 512 or more"
            )


def protocol_of(settings: ExportSettings, environment: Mapping[str, str] = os.environ) -> Protocol | None:
    """How spans are sent; None: nowhere. Raises InputError for a protocol the exporter does not speak."""
    given = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not (settings.endpoint or given):
        return None
    named = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = settings.protocol or ("http/protobuf" if _over_http(settings.endpoint) else named) or "grpc"
    if protocol == "grpc":
        return "grpc"
    if protocol == "http/protobuf":
        return "http/protobuf"
    raise InputError("OTEL_EXPORTER_OTLP_PROTOCOL", "", f"{protocol!r} is not known", "grpc and http/protobuf are")


def _over_http(endpoint: str | None) -> bool:
    """A whole path says it, and so does the port that is OTLP's for HTTP, where gRPC would only time out."""
    address = (endpoint or "").rstrip("/")
    return address.endswith(("/v1/traces", ":4318"))


def make_exporter(settings: ExportSettings) -> SpanExporter | None:
    """The OTLP exporter of these settings and of the environment's; None where nothing is to be sent."""
    protocol = protocol_of(settings)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=settings.endpoint, timeout=SEND_TIMEOUT_S)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        # With an endpoint of its own the exporter wants the whole path; without, it adds it to the environment's.
        endpoint = settings.endpoint and http_path(settings.endpoint, "traces")
        return HttpExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
    return None


def http_path(endpoint: str, signal: Literal["traces", "metrics"]) -> str:
    """Where a signal goes over HTTP; `endpoint` may be that of traces already."""
    return f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/{signal}"


class SpanExport:
    """Where the engine puts what is to be sent. sent, failed, dropped: spans."""

    def __init__(self, exporter: SpanExporter, settings: ExportSettings, resource: Mapping[str, Value]) -> None:
        self.sent = 0
        self.failed = 0
        self.dropped = 0
        self._waiting = 0
        self._limit = settings.queue_spans
        self._lock = threading.Lock()
        self._ids = _GivenIds()
        described = dict(resource)
        if os.environ.get("OTEL_SERVICE_NAME"):
            described.pop("service.name", None)
        self._provider = TracerProvider(
            sampler=_EngineSampler(settings.sampling_ratio),
            resource=Resource.create(described),
            id_generator=self._ids,
            span_limits=_UNLIMITED,
            shutdown_on_exit=False,
        )
        counting = _Counting(exporter, self._done)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                counting,
                max_queue_size=self._limit,
                schedule_delay_millis=settings.delay_s * 1000,
                max_export_batch_size=512,
            )
        )
        self._tracer = self._provider.get_tracer(SCOPE, WIRE_VERSION)
        self._items: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=4096)
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        self._thread.start()

    def request(self, request: RequestTelemetry, *, parent_sampled: bool = True) -> None:
        """Any thread, returns at once. parent_sampled: the flag of the caller's traceparent."""
        self._hand_over(lambda: self._emit(request_drafts(request), parent_sampled), 8)

    def steps(
        self, instance_trace_id: bytes, first_step: int, steps: Sequence[StepTelemetry], kv_blocks_total: int
    ) -> None:
        """Consecutive steps from number `first_step` on."""
        kept = list(steps)
        self._hand_over(lambda: self._emit(step_drafts(instance_trace_id, first_step, kept, kv_blocks_total), True), 1)

    def close(self, timeout_s: float) -> bool:
        """Sends what waits; False where time was up before."""
        with contextlib.suppress(queue.Full):
            self._items.put(None, timeout=timeout_s)
        # The SDK's own shutdown waits up to half a minute for a receiver that does not answer.
        ending = threading.Thread(target=self._end, name="telemetry-end", daemon=True)
        ending.start()
        ending.join(timeout_s)
        return not ending.is_alive()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._thread.join()
        self._provider.shutdown()

    def _hand_over(self, item: Callable[[], None], spans: int) -> None:
        try:
            self._items.put_nowait(item)
        except queue.Full:
            with self._lock:
                self.dropped += spans

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            item()

    def _emit(self, drafts: Sequence[SpanDraft], parent_sampled: bool) -> None:
        with self._lock:
            if self._waiting + len(drafts) > self._limit:
                self.dropped += len(drafts)
                return
        made: dict[bytes, SpanContext] = {}
        for draft in drafts:
            context = self._start(draft, made.get(draft.parent_span_id), parent_sampled)
            if not context.trace_flags.sampled:
                return  # the root decides for all below
            made[draft.span_id] = context

    def _start(self, draft: SpanDraft, parent: SpanContext | None, parent_sampled: bool) -> SpanContext:
        if parent is None and draft.parent_span_id:
            flags = TraceFlags(TraceFlags.SAMPLED if parent_sampled else TraceFlags.DEFAULT)
            parent = SpanContext(
                _number(draft.trace_id), _number(draft.parent_span_id), is_remote=True, trace_flags=flags
            )
        self._ids.trace_id, self._ids.span_id = _number(draft.trace_id), _number(draft.span_id)
        span = self._tracer.start_span(
            draft.name,
            context=set_span_in_context(NonRecordingSpan(parent), Context()) if parent else Context(),
            kind=SpanKind.SERVER if draft.server else SpanKind.INTERNAL,
            attributes=dict(draft.attributes),
            start_time=draft.start_unix_ns,
        )
        if draft.error is not None:
            span.set_status(Status(StatusCode.ERROR, draft.error))
        if span.is_recording():
            with self._lock:
                self._waiting += 1
        span.end(draft.end_unix_ns)
        return span.get_span_context()

    def _done(self, spans: int, sent: bool) -> None:
        with self._lock:
            self._waiting -= spans
            if sent:
                self.sent += spans
            else:
                self.failed += spans


class StepBatch:
    """Steps until they fill a span: STEPS_PER_SPAN of them, or a second."""

    def __init__(self, export: SpanExport, instance_trace_id: bytes, kv_blocks_total: int) -> None:
        self._export = export
        self._trace_id = instance_trace_id
        self._kv_blocks_total = kv_blocks_total
        self._first = 0
        self._steps: list[StepTelemetry] = []

    def add(self, number: int, step: StepTelemetry) -> None:
        """The next step of the engine; numbers follow each other."""
        held = self._steps
        if held and (len(held) == STEPS_PER_SPAN or step.start_unix_ns - held[0].start_unix_ns >= STEP_SPAN_NS):
            self.flush()
        if not self._steps:
            self._first = number
        self._steps.append(step)

    def flush(self) -> None:
        if self._steps:
            self._export.steps(self._trace_id, self._first, self._steps, self._kv_blocks_total)
            self._steps = []


class _GivenIds(IdGenerator):
    """Ids that were chosen before the span is started; used by one thread."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


@dataclass(slots=True)
class _EngineSampler(Sampler):
    """Steps always; requests as their parent was, else this share of them by trace id."""

    ratio: float
    _requests: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self._requests = ParentBased(TraceIdRatioBased(self.ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        chosen = ALWAYS_ON if name == "engine.steps" else self._requests
        return chosen.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def get_description(self) -> str:
        return f"steps always, requests {self._requests.get_description()}"


class _Counting(SpanExporter):
    def __init__(self, inner: SpanExporter, done: Callable[[int, bool], None]) -> None:
        self._inner = inner
        self._done = done

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self._done(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _number(identity: bytes) -> int:
    return int.from_bytes(identity, "big")
