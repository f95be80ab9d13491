"""Calls of a client to an engine, each in a trace of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_messages import span_message, trace_request


def tree(number: int, start_unix_ns: int) -> list[Span]:
    """A client call around a request of an engine, with random lengths."""
    draw = random.Random(number)
    queue_s, prefill_s, decode_s = draw.uniform(0, 2), draw.uniform(0.05, 0.5), draw.uniform(0.5, 3)
    e2e_s = queue_s + prefill_s + decode_s
    trace, client, server = draw.randbytes(16), draw.randbytes(8), draw.randbytes(8)
    attributes = {
        "gen_ai.latency.e2e": e2e_s,
        "gen_ai.latency.time_to_first_token": queue_s + prefill_s,
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.usage.prompt_tokens": draw.randrange(10, 4000),
        "gen_ai.usage.completion_tokens": draw.randrange(2, 400),
    }
    ends = start_unix_ns + round(e2e_s * 1e9)
    call = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    outer = span_message(call, trace_id=trace, span_id=client, name="chat m", kind=Span.SPAN_KIND_CLIENT)
    outer.start_time_unix_nano, outer.end_time_unix_nano = start_unix_ns - 5_000_000, ends + 5_000_000
    inner = span_message(attributes, trace_id=trace, span_id=server, parent_span_id=client)
    inner.start_time_unix_nano, inner.end_time_unix_nano = start_unix_ns, ends
    return [outer, inner]


def body(spans: Sequence[Span]) -> bytes:
    resource = {"service.name": "vllm-server", "service.instance.id": "engine-0"}
    return trace_request(*spans, resource=resource).SerializeToString()
