"""Spans a second that one core scans, plain and compiled: `python tests/benchmarks/scan.py`.

512 spans a request as vLLM's, with their attributes as JSON text; the last line is one JSON object. Exit code 1 where the two do not
read the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from phasewise.collector.records import Scanned
from phasewise.collector.scan import scan_traces
from phasewise.collector.scanners import cache_folder, load

_PACKAGES = ("phasewise", "numba", "pyarrow", "protobuf")
_BATCH_SPANS = 512
_START_UNIX_NS = 1_768_435_200_000_000_000


def batch(source: random.Random, unknown_keys: int = 3) -> bytes:
    """One request of 512 spans as vLLM's: 4 texts, 5 integers and 11 doubles, 923 bytes a span, and some keys nobody knows."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    for key, value in (("service.name", "vllm-server"), ("host.name", "node-7"), ("telemetry.sdk.language", "python")):
        group.resource.attributes.add(key=key).value.string_value = value
    scope = group.scope_spans.add()
    scope.scope.name = "vllm.tracing.otel"
    for _ in range(_BATCH_SPANS):
        _fill(scope.spans.add(), source, unknown_keys)
    return request.SerializeToString()


def _fill(span: Span, source: random.Random, unknown_keys: int) -> None:
    start = _START_UNIX_NS + source.randrange(10**12)
    span.trace_id, span.span_id = source.randbytes(16), source.randbytes(8)
    span.parent_span_id = source.randbytes(8)
    span.name, span.kind = "llm_request", Span.SPAN_KIND_SERVER
    span.start_time_unix_nano, span.end_time_unix_nano = start, start + source.randrange(10**10)
    texts = {
        "gen_ai.response.model": "meta-llama/Llama-3.1-8B-Instruct",
        "gen_ai.request.id": f"cmpl-{source.randbytes(16).hex()}-0",
        "gen_ai.response.finish_reason": "length",
        "gen_ai.request.service_tier": "default",
    }
    for key, value in texts.items():
        span.attributes.add(key=key).value.string_value = value
    for key in (
        "usage.prompt_tokens",
        "usage.completion_tokens",
        "request.max_tokens",
        "request.n",
        "usage.num_sequences",
    ):
        span.attributes.add(key=f"gen_ai.{key}").value.int_value = source.randrange(1, 5000)
    for key in ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode"):
        span.attributes.add(key=f"gen_ai.latency.{key}").value.double_value = source.expovariate(1.0)
    for key in ("time_in_model_inference", "time_in_scheduler", "time_in_model_forward", "time_in_tokenizer"):
        span.attributes.add(key=f"gen_ai.latency.{key}").value.double_value = source.expovariate(10.0)
    for key, number in (("gen_ai.request.temperature", 0.7), ("gen_ai.request.top_p", 0.95)):
        span.attributes.add(key=key).value.double_value = number
    for i in range(unknown_keys):
        span.attributes.add(key=f"site.extra_{i}").value.string_value = "b"


def spans_per_s(scanner: Callable[[bytes, int], Scanned], bodies: list[bytes], seconds: float) -> float:
    """Median over the batches, in CPU time of this thread."""
    scanner(bodies[0], _START_UNIX_NS)
    rates: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for body in bodies:
            started = time.thread_time()
            rows = scanner(body, _START_UNIX_NS + 10**12).rows
            rates.append(rows.num_rows / (time.thread_time() - started))
    return statistics.median(rates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each scanner")
    parser.add_argument("--unknown-keys", type=int, default=3)
    chosen = parser.parse_args(arguments)
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parents[2] / "build" / "compiled")
    started = time.monotonic()
    compiled = load(cache_folder(folder))
    print(f"compiled or loaded in {time.monotonic() - started:.1f} s")
    source = random.Random(1)
    bodies = [batch(source, chosen.unknown_keys) for _ in range(16)]
    for body in bodies:
        if not scan_traces(body, _START_UNIX_NS).rows.equals(compiled(body, _START_UNIX_NS).rows):
            raise SystemExit("the two scanners do not read the same")
    figures = {
        "benchmark": "scan",
        "span_bytes": round(statistics.mean(map(len, bodies)) / _BATCH_SPANS),
        "plain_spans_per_s": round(spans_per_s(scan_traces, bodies, chosen.seconds)),
        "scan_spans_per_s": round(spans_per_s(compiled, bodies, chosen.seconds)),
        **machine(_PACKAGES),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
