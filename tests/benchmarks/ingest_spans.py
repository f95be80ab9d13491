"""Bodies for the load generator: OTLP batches built once and made unique in place, so that sending costs no encoding.

Two shapes, each with three keys that no profile knows: `tree`, eight spans a request as Phasewise's own engine sends them, and
`single`, one span a request as vLLM does. A patch gives every span new ids, every request a new `gen_ai.request.id`, and moves all times
of the body so that its last request ends now.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from phasewise.instrumented_engine.telemetry import RequestTelemetry, request_spans

Shape = Literal["tree", "single"]
SPANS_PER_REQUEST: dict[Shape, int] = {"tree": 8, "single": 1}
SCOPES: dict[Shape, str] = {"tree": "phasewise.engine", "single": "vllm.tracing.otel"}
BATCH_SPANS = 512
UNKNOWN_KEYS = 3
_BASE_UNIX_NS = 1_768_435_200_000_000_000
_SPREAD_NS = 1_000_000_000  # over which the ends of one body's requests lie
_INSTANCE = b"replica-000"
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_MODEL = "meta-llama/Llama-3.1-8B-Instruct"


Places = tuple[
    NDArray[np.int64], NDArray[np.int64]
]  # positions of each byte [places, bytes], and what stands there [places]


class Template:
    """A body, and where in it the ids and times stand; built once for all connections."""

    def __init__(self, shape: Shape, seed: int, spans: int = BATCH_SPANS) -> None:
        source = random.Random(seed)
        self.requests = max(1, spans // SPANS_PER_REQUEST[shape])
        made = [_TREES[shape](source) for _ in range(self.requests)]
        spans_of_all = [span for tree in made for span in tree]
        self.spans = len(spans_of_all)
        self.data = _message(shape, made)
        stamps = sorted({t for span in spans_of_all for t in (span.start_time_unix_nano, span.end_time_unix_nano)})
        traces = [tree[0].trace_id for tree in made]
        self.instance = _places(self.data, [_INSTANCE])
        self.traces = _places(self.data, traces)
        self.names = _places(self.data, [trace.hex().encode() for trace in traces])
        self.ids = _places(self.data, [span.span_id for span in spans_of_all])
        self.stamps = _places(self.data, [stamp.to_bytes(8, "little") for stamp in stamps])
        self.stamp_values = np.array(stamps, np.uint64)


class Batch:
    """The body of one sender, which can be sent again and again. Not for two threads at once."""

    def __init__(self, template: Template, number: int, seed: int) -> None:
        self._template = template
        self._data = np.frombuffer(template.data, np.uint8).copy()
        self._random = np.random.default_rng((seed, number))
        self._put(template.instance, np.frombuffer(b"replica-%03d" % number, np.uint8)[None])
        self.spans, self.requests = template.spans, template.requests

    def unique(self, now_unix_ns: int | None = None) -> bytes:
        """The body with ids that were never sent before, its last request ending now."""
        template = self._template
        now = time.time_ns() if now_unix_ns is None else now_unix_ns
        traces = self._random.integers(1, 256, (self.requests, 16), np.uint8)
        texts = np.stack((_HEX[traces >> 4], _HEX[traces & 15]), 2).reshape(self.requests, 32)
        stamps = template.stamp_values + (np.uint64(now) - template.stamp_values[-1])
        self._put(template.traces, traces)
        self._put(template.names, texts)
        self._put(template.ids, self._random.integers(1, 256, (self.spans, 8), np.uint8))
        self._put(template.stamps, stamps.view(np.uint8).reshape(-1, 8))
        return self._data.tobytes()

    def _put(self, where: Places, values: NDArray[np.uint8]) -> None:
        places, owners = where
        self._data[places] = values[owners]


def _message(shape: Shape, made: list[list[Span]]) -> bytes:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    resource = {"service.name": "bench", "host.name": "node-7", "service.version": "1"}
    for key, value in (resource | {"service.instance.id": _INSTANCE.decode()}).items():
        group.resource.attributes.add(key=key).value.string_value = value
    scope = group.scope_spans.add()
    scope.scope.name = SCOPES[shape]
    if shape == "tree":
        scope.scope.version = "1"
    scope.spans.extend(span for tree in made for span in tree)
    return request.SerializeToString()


def _places(data: bytes, needles: list[bytes]) -> Places:
    """Where these stand, all of one length."""
    width = len(needles[0])
    numbers = {needle: number for number, needle in enumerate(needles)}
    begins, owners = [], []
    for at in range(len(data) - width + 1):
        number = numbers.get(data[at : at + width])
        if number is not None:
            begins.append(at)
            owners.append(number)
    return np.array(begins, np.int64)[:, None] + np.arange(width, dtype=np.int64), np.array(owners, np.int64)


def _moments(source: random.Random) -> tuple[int, int, int, int, int, int]:
    """Arrival, queued, scheduled, prefilled, first token, finished; the ends lie within _SPREAD_NS."""
    parts = [source.uniform(0.001, 0.01), source.expovariate(4), source.uniform(0.02, 0.3), source.uniform(0.001, 0.02)]
    parts.append(source.expovariate(0.8) + 0.05)
    at = _BASE_UNIX_NS - source.randrange(_SPREAD_NS) - sum(round(part * 1e9) for part in parts)
    found = [at]
    for part in parts:
        found.append(found[-1] + round(part * 1e9))
    first, queued, scheduled, prefilled, token, finished = found
    return first, queued, scheduled, prefilled, token, finished


def _tree(source: random.Random) -> list[Span]:
    arrival, queued, scheduled, prefilled, token, finished = _moments(source)
    trace_id = source.randbytes(16)
    middle = (scheduled + prefilled) // 2
    spans = request_spans(
        RequestTelemetry(
            trace_id=trace_id,
            span_id=source.randbytes(8),
            request_id=trace_id.hex(),
            model=_MODEL,
            arrival_unix_ns=arrival,
            queued_unix_ns=queued,
            scheduled_unix_ns=scheduled,
            prefilled_unix_ns=prefilled,
            first_token_unix_ns=token,
            finished_unix_ns=finished,
            input_tokens=source.randrange(10, 4000),
            cached_tokens=source.randrange(10),
            output_tokens=source.randrange(2, 600),
            chunks=((scheduled, middle), (middle, prefilled)),
            finish_reason="stop",
        )
    )
    assert len(spans) == SPANS_PER_REQUEST["tree"]
    for span in spans:
        _add_unknown(span)
    return spans


def _single(source: random.Random) -> list[Span]:
    arrival, queued, scheduled, prefilled, token, finished = _moments(source)
    trace_id = source.randbytes(16)
    span = Span(
        trace_id=trace_id,
        span_id=source.randbytes(8),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=arrival,
        end_time_unix_nano=finished,
    )
    texts = {"gen_ai.request.id": trace_id.hex(), "gen_ai.response.model": _MODEL}
    numbers = {
        "gen_ai.usage.prompt_tokens": source.randrange(10, 4000),
        "gen_ai.usage.completion_tokens": source.randrange(2, 600),
        "gen_ai.request.max_tokens": 600,
        "gen_ai.request.n": 1,
    }
    seconds = {
        "gen_ai.latency.time_in_queue": (scheduled - queued) / 1e9,
        "gen_ai.latency.time_to_first_token": (token - arrival) / 1e9,
        "gen_ai.latency.e2e": (finished - arrival) / 1e9,
        "gen_ai.latency.time_in_model_prefill": (prefilled - scheduled) / 1e9,
        "gen_ai.latency.time_in_model_decode": (finished - token) / 1e9,
        "gen_ai.latency.time_in_model_inference": (prefilled - scheduled + finished - token) / 1e9,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.95,
    }
    for key, text in texts.items():
        span.attributes.add(key=key).value.string_value = text
    for key, number in numbers.items():
        span.attributes.add(key=key).value.int_value = number
    for key, value in seconds.items():
        span.attributes.add(key=key).value.double_value = value
    _add_unknown(span)
    return [span]


def _add_unknown(span: Span) -> None:
    for number in range(UNKNOWN_KEYS):
        span.attributes.add(key=f"site.extra_{number}").value.string_value = "blue"


_TREES: dict[Shape, Callable[[random.Random], list[Span]]] = {"tree": _tree, "single": _single}
