"""The engine's wire format: finished requests and scheduler steps as OTLP messages. Pure: no clock, no socket.

A request is a span `llm_request` (SERVER) with one child a phase: `context`, `queue`, `prefill` (with `prefill_chunk` below),
`first_token`, `decode`, and one `external_tool` a call to the outside. Phases follow each other without gaps, so their lengths,
external time taken out of the phase it interrupts, sum to the end-to-end time. A phase that did not begin has no span. When a
request fails, the phase in which it did and the root have an error status; a call to the outside that fails marks itself only.

Scheduler iterations travel as spans `engine.steps` with arrays, all of one instance in one trace, at most `STEPS_PER_SPAN` a span.
Profile: ``rules/engines/phasewise.toml``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

SCOPE = "phasewise.engine"
WIRE_VERSION = "1"
STEPS_PER_SPAN = 256
STEP_SPAN_NS = 10**9
QUEUE_REASONS = ("slot", "kv", "budget", "window", "policy")
PREFILL, DECODE, RECOMPUTE = 1, 2, 3  # phases of a segment

Value = str | int | float | bool | Sequence[int] | Sequence[str]
Interval = tuple[int, int]  # start and end, Unix nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTelemetry:
    """What the engine knows of one finished request. Times are Unix nanoseconds in this order; None: never reached.

    queue_wait_s: seconds waited by reason (QUEUE_REASONS); segments: (phase, first step, last step), inclusive; chunks: the
    request's prefill steps; external: calls to the outside, each inside the request; external_names and external_errors: of
    each of these, or empty. A request whose `error` is set failed in the last phase that began.
    """

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = b""
    request_id: str
    model: str
    arrival_unix_ns: int
    queued_unix_ns: int | None = None  # context preparation ended
    scheduled_unix_ns: int | None = None
    prefilled_unix_ns: int | None = None
    first_token_unix_ns: int | None = None
    finished_unix_ns: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    chunks: tuple[Interval, ...] = ()
    external: tuple[Interval, ...] = ()
    external_names: tuple[str, ...] = ()
    external_errors: tuple[str | None, ...] = ()
    queue_wait_s: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[tuple[int, int, int], ...] = ()
    preemptions: int | None = None
    priority: int | None = None
    tenant: str | None = None
    route: str | None = None
    request_class: str | None = None
    client_request_id: str | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    longest_gap_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    supplement: bool = False  # a plugin's view of another engine's request: fills its row, makes none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTelemetry:
    """One scheduler iteration. None: this engine does not tell."""

    start_unix_ns: int
    duration_ns: int
    prefill_tokens: int
    decode_sequences: int
    context_tokens: int | None = None
    running: int | None = None
    waiting_slot: int | None = None
    waiting_kv: int | None = None
    waiting_budget: int | None = None
    waiting_window: int | None = None
    waiting_policy: int | None = None
    slots_reserved: int | None = None
    kv_blocks_used: int | None = None
    preemptions: int | None = None
    schedule_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanDraft:
    """One span, independent of what carries it. server: the root of a request, else internal. error: message of an error status."""

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = b""
    name: str
    server: bool = False
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None


def export_request(resource: Mapping[str, Value], spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """One OTLP message of one engine process. `resource` should hold service.name, service.instance.id, service.version."""
    scope = ScopeSpans(scope=InstrumentationScope(name=SCOPE, version=WIRE_VERSION), spans=list(spans))
    attributes = [_attribute(key, value) for key, value in resource.items()]
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=Resource(attributes=attributes), scope_spans=[scope])]
    )


def request_spans(request: RequestTelemetry) -> list[Span]:
    """The tree of one request, root first."""
    return [_message(draft) for draft in request_drafts(request)]


def request_drafts(request: RequestTelemetry) -> list[SpanDraft]:
    """The tree of one request, root first, before it is put into messages."""
    root = SpanDraft(
        trace_id=request.trace_id,
        span_id=request.span_id,
        parent_span_id=request.parent_span_id,
        name="llm_request",
        server=True,
        start_unix_ns=request.arrival_unix_ns,
        end_unix_ns=request.finished_unix_ns,
        attributes=_attributes(request),
        error=request.error,
    )
    drafts = [root]
    phases = _phases(request)
    for name, start, end in phases:
        failed = request.error if name == phases[-1][0] else None
        child = _child(request, root.span_id, name, start, end, len(drafts), failed)
        drafts.append(child)
        if name == "prefill":
            for first, last in request.chunks:
                drafts.append(_child(request, child.span_id, "prefill_chunk", first, last, len(drafts)))
    for index, (first, last) in enumerate(request.external):
        named = {"gen_ai.tool.name": request.external_names[index]} if request.external_names else {}
        failed = request.external_errors[index] if request.external_errors else None
        drafts.append(_child(request, root.span_id, "external_tool", first, last, len(drafts), failed, named))
    return drafts


def step_spans(
    instance_trace_id: bytes, first_step: int, steps: Sequence[StepTelemetry], kv_blocks_total: int | None
) -> list[Span]:
    """Spans `engine.steps` of consecutive iterations, cut at STEPS_PER_SPAN steps or one second."""
    return [_message(draft) for draft in step_drafts(instance_trace_id, first_step, steps, kv_blocks_total)]


def step_drafts(
    instance_trace_id: bytes, first_step: int, steps: Sequence[StepTelemetry], kv_blocks_total: int | None
) -> list[SpanDraft]:
    """The same, before they are put into messages."""
    drafts = []
    begin = 0
    for index in range(1, len(steps) + 1):
        whole = index == len(steps)
        full = index - begin >= STEPS_PER_SPAN
        long = not whole and steps[index].start_unix_ns - steps[begin].start_unix_ns >= STEP_SPAN_NS
        if whole or full or long:
            drafts.append(_steps_draft(instance_trace_id, first_step + begin, steps[begin:index], kv_blocks_total))
            begin = index
    return drafts


def _phases(request: RequestTelemetry) -> list[tuple[str, int, int]]:
    """Phases that began, each until the next began; the last until the end of the request."""
    marks = [
        ("context", request.arrival_unix_ns),
        ("queue", request.queued_unix_ns),
        ("prefill", request.scheduled_unix_ns),
        ("first_token", request.prefilled_unix_ns),
        ("decode", request.first_token_unix_ns),
    ]
    begun = [(name, at) for name, at in marks if at is not None]
    ends = [at for _, at in begun[1:]] + [request.finished_unix_ns]
    return [(name, at, end) for (name, at), end in zip(begun, ends, strict=True)]


def _attributes(request: RequestTelemetry) -> dict[str, Value]:
    lengths = {name: end - start for name, start, end in _phases(request)}
    first = request.first_token_unix_ns
    found: dict[str, Value | None] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": request.model,
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "gen_ai.usage.input_tokens": request.input_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "gen_ai.latency.e2e": _seconds(request.finished_unix_ns - request.arrival_unix_ns),
        "gen_ai.latency.time_to_first_token": _seconds(first - request.arrival_unix_ns) if first is not None else None,
        "gen_ai.latency.time_in_queue": _seconds(lengths.get("queue")),
        "gen_ai.latency.time_in_model_prefill": _seconds(lengths.get("prefill")),
        "gen_ai.latency.time_in_model_decode": _seconds(lengths.get("decode")),
        "phasewise.segments": [number for segment in request.segments for number in segment] or None,
        "phasewise.preemptions": request.preemptions,
        "phasewise.priority": request.priority,
        "phasewise.tenant": request.tenant,
        "phasewise.route": request.route,
        "phasewise.request_class": request.request_class,
        "phasewise.client_request_id": request.client_request_id,
        "phasewise.drafted_tokens": request.drafted_tokens,
        "phasewise.accepted_tokens": request.accepted_tokens,
        "phasewise.longest_gap_s": request.longest_gap_s,
        "phasewise.supplement": True if request.supplement else None,
        **{f"phasewise.queue.{reason}_s": request.queue_wait_s.get(reason) for reason in QUEUE_REASONS},
    }
    return {key: value for key, value in found.items() if value is not None}


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def _child(
    request: RequestTelemetry, parent_id: bytes, name: str, start: int, end: int, number: int, error: str | None = None,
    attributes: Mapping[str, Value] | None = None,
) -> SpanDraft:  # fmt: skip
    return SpanDraft(
        trace_id=request.trace_id, span_id=_derived_id(request.trace_id, request.span_id, number), parent_span_id=parent_id,
        name=name, start_unix_ns=start, end_unix_ns=end, attributes=attributes or {}, error=error,
    )  # fmt: skip


def _derived_id(trace_id: bytes, span_id: bytes, number: int) -> bytes:
    """The id of a request's n-th span follows from the request's own, so building a message twice gives the same bytes."""
    return hashlib.blake2b(trace_id + span_id + number.to_bytes(8, "big"), digest_size=8).digest()


def _steps_draft(trace_id: bytes, first: int, steps: Sequence[StepTelemetry], kv_blocks_total: int | None) -> SpanDraft:
    last = steps[-1]
    attributes: dict[str, Value] = {"phasewise.step.first": first}
    if kv_blocks_total is not None:
        attributes["phasewise.step.kv_blocks_total"] = kv_blocks_total
    for column, name in _STEP_ARRAYS.items():
        values = [getattr(step, column) for step in steps]
        if None not in values:
            attributes[f"phasewise.step.{name}"] = values
    return SpanDraft(
        trace_id=trace_id,
        span_id=_derived_id(trace_id, b"engine.steps", first),
        name="engine.steps",
        start_unix_ns=steps[0].start_unix_ns,
        end_unix_ns=last.start_unix_ns + last.duration_ns,
        attributes=attributes,
    )


_STEP_ARRAYS = {
    "start_unix_ns": "start_unix_ns",
    "duration_ns": "duration_ns",
    "prefill_tokens": "prefill_tokens",
    "decode_sequences": "decode_seqs",
    "context_tokens": "context_tokens",
    "running": "running",
    "waiting_slot": "waiting_slot",
    "waiting_kv": "waiting_kv",
    "waiting_budget": "waiting_budget",
    "waiting_window": "waiting_window",
    "waiting_policy": "waiting_policy",
    "slots_reserved": "slots_reserved",
    "kv_blocks_used": "kv_blocks_used",
    "preemptions": "preemptions",
    "schedule_ns": "schedule_ns",
}


def _message(draft: SpanDraft) -> Span:
    span = Span(
        trace_id=draft.trace_id,
        span_id=draft.span_id,
        parent_span_id=draft.parent_span_id,
        name=draft.name,
        kind=Span.SPAN_KIND_SERVER if draft.server else Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=draft.start_unix_ns,
        end_time_unix_nano=draft.end_unix_ns,
        attributes=[_attribute(key, value) for key, value in draft.attributes.items()],
    )
    if draft.error is not None:
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=draft.error))
    return span


def _attribute(key: str, value: Value) -> KeyValue:
    return KeyValue(key=key, value=_any_value(value))


def _any_value(value: Value) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if value and type(value[0]) is int:  # steps are arrays of thousands of numbers, of one kind each
        return AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=item) for item in value]))  # type: ignore[arg-type]
    return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))
