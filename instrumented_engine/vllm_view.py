"""What vLLM 0.32 would have sent of the same run: one span a finished request, and nothing that only our engine knows.

Where each boundary of a real vLLM lies (recorded spans of 0.32.0, and the sources named in ``rules/engines/vllm_v1.toml``):

- Its span begins when the request reaches the API server. Loading a history, retrieval and tools before the call belong to
  the application, which sends no span here, so the context stage is outside; a tool after the last token is outside too.
- The engine marks a request queued between two steps: one that arrives while a step runs waits for its end first, and that
  wait is in no phase (it is in the time to first token, but neither in queue nor in prefill).
- Queue ends when the request is first scheduled, prefill when the step that finishes the prompt ends. What preemption costs
  lies inside the decode, and so does a tool that works while the sequence keeps its seat.
- The span ends when it is written, a little after the last token. Aborted, failed and refused requests send no span.
- Attributes: no model, no cached tokens, no preemptions, no finish reason, no temperature where it is 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from phasewise.instrumented_engine.metrics import SERVED
from phasewise.instrumented_engine.recording import Ints, Recording
from phasewise.instrumented_engine.sequence import Sequence

SCOPE = "vllm.tracing.otel"
WRITTEN_NS = (
    2_000_000  # from last token to the end of the span: median of 187 recorded spans under light and normal load
)


@dataclass(frozen=True, slots=True)
class VllmTimes:
    """One request between vLLM's boundaries, nanoseconds; in this order."""

    arrival_ns: int
    queued_ns: int
    scheduled_ns: int
    prefilled_ns: int
    first_token_ns: int
    last_token_ns: int


def request_id(engine_id: str) -> str:
    """The id vLLM's completions endpoint makes of a client's x-request-id."""
    return f"cmpl-{engine_id}-0"


def resource(instance: str) -> Mapping[str, str]:
    """As the tracer of a vLLM started without OTEL_SERVICE_NAME describes its process."""
    return {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": "1.45.2",
        "service.instance.id": instance,
        "vllm.instrumenting_module_name": "vllm.llm_engine",
        "vllm.process_id": str(int.from_bytes(_digest(instance, 2), "big") + 1000),
        "service.name": "unknown_service:python",
    }


def marked_queued_ns(recording: Recording, arrivals_ns: Ints) -> Ints:
    """When the engine takes up requests that reach it at these moments: at once, or at the end of the step that runs then."""
    steps = recording.step_columns()
    if not len(steps["start_ns"]):
        return arrivals_ns
    # A request that arrives in the very moment a step begins is in time for it.
    running = np.searchsorted(steps["start_ns"], arrivals_ns, side="left") - 1
    end = (steps["start_ns"] + steps["duration_ns"])[np.maximum(running, 0)]
    return np.where((running >= 0) & (end > arrivals_ns), end, arrivals_ns)


def times(recording: Recording) -> list[tuple[Sequence, VllmTimes]]:
    """The requests of which vLLM sends a span (those in SERVED), in the order they ended."""
    served = [one for one in recording.finished if one.finish_reason in SERVED and one.error is None]
    arrivals = np.array([_required(one.queued_ns) for one in served], dtype=np.int64)
    found = []
    for one, arrival, taken in zip(
        served, arrivals.tolist(), marked_queued_ns(recording, arrivals).tolist(), strict=True
    ):
        scheduled = _required(one.scheduled_ns)
        found.append(
            (
                one,
                VllmTimes(
                    arrival_ns=arrival,
                    queued_ns=min(taken, scheduled),
                    scheduled_ns=scheduled,
                    prefilled_ns=_required(one.prefilled_ns),
                    first_token_ns=_required(one.first_token_ns),
                    last_token_ns=_required(one.last_token_ns),
                ),
            )
        )
    return sorted(found, key=lambda pair: pair[1].last_token_ns)


def export(recording: Recording, instance: str) -> ExportTraceServiceRequest:
    """All spans of a run as one OTLP message of one vLLM process."""
    scope = ScopeSpans(scope=InstrumentationScope(name=SCOPE), spans=spans(times(recording)))
    attributes = [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in resource(instance).items()]
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=Resource(attributes=attributes), scope_spans=[scope])]
    )


def spans(requests: Iterable[tuple[Sequence, VllmTimes]]) -> list[Span]:
    return [_span(sequence, at) for sequence, at in requests]


def _span(sequence: Sequence, at: VllmTimes) -> Span:
    spec = sequence.spec
    name = request_id(spec.request_id)
    span = Span(
        trace_id=_digest(name, 16),
        span_id=_digest(name, 8),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=at.arrival_ns,
        end_time_unix_nano=at.last_token_ns + WRITTEN_NS,
    )
    decoded_ns = at.last_token_ns - at.first_token_ns
    for key, length_ns in (
        ("gen_ai.latency.time_to_first_token", at.first_token_ns - at.arrival_ns),
        ("gen_ai.latency.e2e", at.last_token_ns - at.arrival_ns),
        ("gen_ai.latency.time_in_queue", at.scheduled_ns - at.queued_ns),
    ):
        _add(span, key, AnyValue(double_value=length_ns / 1e9))
    _add(span, "gen_ai.usage.prompt_tokens", AnyValue(int_value=spec.prompt_tokens))
    _add(span, "gen_ai.usage.completion_tokens", AnyValue(int_value=sequence.output_tokens))
    for key, length_ns in (
        ("gen_ai.latency.time_in_model_prefill", at.prefilled_ns - at.scheduled_ns),
        ("gen_ai.latency.time_in_model_decode", decoded_ns),
        ("gen_ai.latency.time_in_model_inference", at.prefilled_ns - at.scheduled_ns + decoded_ns),
    ):
        _add(span, key, AnyValue(double_value=length_ns / 1e9))
    _add(span, "gen_ai.request.id", AnyValue(string_value=name))
    _add(span, "gen_ai.request.top_p", AnyValue(double_value=1.0))
    _add(span, "gen_ai.request.max_tokens", AnyValue(int_value=spec.max_output_tokens))
    _add(span, "gen_ai.request.n", AnyValue(int_value=1))
    return span


def _add(span: Span, key: str, value: AnyValue) -> None:
    span.attributes.append(KeyValue(key=key, value=value))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def _required(moment_ns: int | None) -> int:
    assert moment_ns is not None, "a served request passed every phase"
    return moment_ns
