"""The load of `indexing.py`: requests of a few engines, drawn anew, as tables out of the real scanner."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from phasewise.collector.scanners import cache_folder, load

START_UNIX_NS = 1_796_000_000 * 10**9
BODY_SPANS = 512
ENTRY_BODIES = 8  # small requests share a journal entry when many come at once
UNKNOWN_KEYS = 3
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(slots=True)
class Load:
    """shape: spans a request; rate_per_s: spans a second, 0 for all at the beginning."""

    shape: int
    wanted: int
    rate_per_s: float
    instances: int
    start_unix_ns: int = START_UNIX_NS
    requests: int = field(init=False)
    spans: int = field(init=False)

    def __post_init__(self) -> None:
        per_body = BODY_SPANS // self.shape
        bodies = max(1, self.wanted // BODY_SPANS // ENTRY_BODIES) * ENTRY_BODIES
        self.requests = bodies * per_body
        self.spans = self.requests * self.shape

    @property
    def end_unix_ns(self) -> int:
        return self.complete_unix_ns(self.requests - 1)

    def complete_unix_ns(self, request: int) -> int:
        """When the last span of the n-th request is received: bodies come one by one, a body's spans together."""
        per_body = BODY_SPANS // self.shape
        return self._body_unix_ns(request // per_body)

    def entries(self) -> Iterator[tuple[int, pa.Table]]:
        """(when it is durable, its rows) of each journal entry."""
        scan = load(
            cache_folder(Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parents[2] / "build" / "compiled"))
        )
        source = random.Random(1)
        bodies = self.requests * self.shape // BODY_SPANS
        for first in range(0, bodies, ENTRY_BODIES):
            tables = []
            for number in range(first, first + ENTRY_BODIES):
                received = self._body_unix_ns(number)
                body = _body(source, self.shape, number % self.instances, received)
                tables.append(scan(body, received).rows)
            yield self._body_unix_ns(first + ENTRY_BODIES - 1), pa.concat_tables(tables)

    def _body_unix_ns(self, number: int) -> int:
        if not self.rate_per_s:
            return self.start_unix_ns
        return self.start_unix_ns + round((number + 1) * BODY_SPANS / self.rate_per_s * 1e9)


def _body(source: random.Random, shape: int, instance: int, received_unix_ns: int) -> bytes:
    """One OTLP message of one engine: requests that ended within the second before."""
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    named = {
        "service.name": "serving",
        "service.instance.id": f"engine-{instance}",
        "service.version": "0.1.0",
        "host.name": f"node-{instance}",
    }
    for key, value in named.items():
        group.resource.attributes.add(key=key).value.string_value = value
    scope = group.scope_spans.add()
    scope.scope.name = "phasewise.engine" if shape > 1 else "vllm.tracing.otel"
    for _ in range(BODY_SPANS // shape):
        end = received_unix_ns - source.randrange(10**9)
        _request(scope.spans, source, shape, end)
    return message.SerializeToString()


def _request(spans: object, source: random.Random, shape: int, end: int) -> None:
    queue, prefill, decode = (source.expovariate(1 / mean) for mean in (0.05, 0.1, 1.5))
    tokens = 1 + round(decode / 0.02)
    parts = [("context", 0.002), ("queue", queue), ("prefill", prefill), ("first_token", 0.001), ("decode", decode)]
    length = sum(seconds for _, seconds in parts)
    start = end - round(length * 1e9)
    trace = source.randbytes(16)
    root = _span(spans, source, trace, b"", "llm_request", start, end)
    root.kind = Span.SPAN_KIND_SERVER
    texts = {
        "gen_ai.response.model": MODEL,
        "gen_ai.request.id": f"cmpl-{source.randbytes(16).hex()}-0",
        "gen_ai.response.finish_reason": "length",
        "gen_ai.request.service_tier": "default",
    }
    for key, value in texts.items():
        root.attributes.add(key=key).value.string_value = value
    names = ("input_tokens", "output_tokens") if shape > 1 else ("prompt_tokens", "completion_tokens")
    for key, count in zip(names, (source.randrange(16, 4000), tokens), strict=True):
        root.attributes.add(key=f"gen_ai.usage.{key}").value.int_value = count
    root.attributes.add(key="gen_ai.request.max_tokens").value.int_value = 4096
    root.attributes.add(key="gen_ai.request.n").value.int_value = 1
    durations = {
        "e2e": length,
        "time_to_first_token": length - decode,
        "time_in_queue": queue,
        "time_in_model_prefill": prefill,
        "time_in_model_decode": decode,
        "time_in_model_inference": prefill + decode,
    }
    for key, seconds in durations.items():
        root.attributes.add(key=f"gen_ai.latency.{key}").value.double_value = seconds
    root.attributes.add(key="gen_ai.request.temperature").value.double_value = 0.7
    root.attributes.add(key="gen_ai.request.top_p").value.double_value = 0.95
    if shape > 1:
        _children(spans, source, root, parts)


def _children(spans: object, source: random.Random, root: Span, parts: list[tuple[str, float]]) -> None:
    at = root.start_time_unix_nano
    for name, seconds in parts:
        end = at + round(seconds * 1e9)
        child = _span(spans, source, root.trace_id, root.span_id, name, at, end)
        if name == "prefill":
            _span(spans, source, root.trace_id, child.span_id, "prefill_chunk", at, end)
        if name == "decode":
            middle = (at + end) // 2
            _span(spans, source, root.trace_id, root.span_id, "external_tool", at, middle - (end - at) // 4)
        at = end


def _span(spans: object, source: random.Random, trace: bytes, parent: bytes, name: str, start: int, end: int) -> Span:
    span: Span = spans.add()  # type: ignore[attr-defined]
    span.trace_id, span.span_id, span.parent_span_id = trace, source.randbytes(8), parent
    span.name, span.kind = name, Span.SPAN_KIND_INTERNAL
    span.start_time_unix_nano, span.end_time_unix_nano = start, end
    for i in range(UNKNOWN_KEYS):
        span.attributes.add(key=f"site.extra_{i}").value.string_value = "b"
    return span
