"""From a finished sequence to spans, by telemetry.py and by the SDK: the same tree, and phases that sum to the whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_engine import attributes, plain
from machine_speed import slowness
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces
from phasewise.instrumented_engine.export import ExportSettings, SpanExport, StepBatch, protocol_of
from phasewise.instrumented_engine.request_telemetry import Boundary, Caller, ToolRun, request_telemetry
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.instrumented_engine.telemetry import (
    STEPS_PER_SPAN,
    StepTelemetry,
    export_request,
    request_spans,
    step_spans,
)
from phasewise.rules.errors import InputError
from phasewise.rules.load import load_rulebook

START = 1_795_972_000_123_456_789
RESOURCE = {"service.name": "phasewise-engine", "service.instance.id": "e-0", "service.version": "0.1.0"}
PROFILES = Profiles(load_rulebook().engines)
PHASES = ("context_s", "queue_s", "prefill_s", "first_token_s", "decode_s", "external_s")
MARKS = ("queued_ns", "scheduled_ns", "prefilled_ns", "first_token_ns")
nanoseconds = st.integers(min_value=0, max_value=600 * 10**9)


def sequence(*lengths_ns: int, **changes: Any) -> Sequence:
    """A sequence whose phases have these lengths; fewer of them, and it ended in the last."""
    spec: dict[str, Any] = {
        "prompt_tokens": 40,
        "max_output_tokens": 9,
        "priority": 2,
        "tenant": "t",
        **changes.pop("spec", {}),
    }
    made = Sequence(RequestSpec(request_id="r-1", arrival_ns=START, **spec))
    at = START
    for name, length in zip(MARKS, lengths_ns[:-1], strict=False):
        at += length
        setattr(made, name, at)
    made.finished_ns = START + sum(lengths_ns)
    made.last_token_ns = made.finished_ns
    made.finish_reason = "stop"
    made.output_tokens = 5
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def received(spans: list[Span]) -> dict[str, Any]:
    frame = pl.from_arrow(scan_traces(export_request(RESOURCE, spans).SerializeToString(), START).rows)
    assert isinstance(frame, pl.DataFrame)
    return normalize(frame, PROFILES).requests.row(0, named=True)


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def export(memory: InMemorySpanExporter) -> Iterator[SpanExport]:
    made = SpanExport(memory, ExportSettings(), RESOURCE)
    yield made
    made.close(5)


def by_sdk(memory: InMemorySpanExporter, export: SpanExport) -> list[Span]:
    """What the OTLP exporter would put on the wire."""
    assert export.close(10)
    scopes = [
        scope for group in encode_spans(memory.get_finished_spans()).resource_spans for scope in group.scope_spans
    ]
    assert {(scope.scope.name, scope.scope.version) for scope in scopes} <= {("phasewise.engine", "1")}
    return [span for scope in scopes for span in scope.spans]


def told(span: Span) -> dict[str, Any]:
    return {
        "name": span.name, "trace": span.trace_id, "id": span.span_id, "parent": span.parent_span_id, "kind": span.kind,
        "start": span.start_time_unix_nano, "end": span.end_time_unix_nano, "status": (span.status.code, span.status.message),
        "attributes": attributes(span),
    }  # fmt: skip


RICH = {
    "waits_ns": [10, 20, 0, 0, 5], "segments": [[1, 0, 1], [2, 2, 6]], "preemptions": 1, "longest_gap_ns": 7, "cached_tokens": 16,
    "chunks": [(START + 30, START + 35), (START + 36, START + 60)], "external": [(START + 100, START + 150)],
}  # fmt: skip


@pytest.mark.parametrize(
    "finished",
    [
        sequence(10, 20, 30, 40, 100, **RICH),
        sequence(10, 20),
        sequence(10, 20, 30, finish_reason="abort"),
        sequence(10, 20, 30, 40, 50, finish_reason="error", error="the device is lost"),
    ],
)
def test_the_sdk_sends_what_telemetry_says(
    finished: Sequence, memory: InMemorySpanExporter, export: SpanExport
) -> None:
    caller = Caller(
        trace_id=bytes(range(16)), span_id=b"abcdefgh", parent_span_id=b"parentid", client_request_id="x-1", route="/r"
    )
    request = request_telemetry(finished, "m", caller=caller)
    export.request(request)
    assert [told(span) for span in by_sdk(memory, export)] == [told(span) for span in request_spans(request)]


def test_the_sdk_sends_steps_as_telemetry_does(memory: InMemorySpanExporter, export: SpanExport) -> None:
    steps = [
        StepTelemetry(
            start_unix_ns=START + n * 10**6, duration_ns=900_000, prefill_tokens=n, decode_sequences=2, context_tokens=10,
            running=2, waiting_slot=1, waiting_kv=0, waiting_budget=0, waiting_window=0, waiting_policy=0, slots_reserved=2,
            kv_blocks_used=9, preemptions=0, schedule_ns=5,
        )
        for n in range(600)
    ]  # fmt: skip
    batch = StepBatch(export, bytes(range(16)), 100)
    for number, step in enumerate(steps):
        batch.add(number, step)
    batch.flush()
    spans = by_sdk(memory, export)
    assert [told(span) for span in spans] == [told(span) for span in step_spans(bytes(range(16)), 0, steps, 100)]
    assert [len(attributes(span)["phasewise.step.duration_ns"]) for span in spans] == [
        STEPS_PER_SPAN,
        STEPS_PER_SPAN,
        88,
    ]


def test_a_span_of_steps_is_no_longer_than_a_second(memory: InMemorySpanExporter, export: SpanExport) -> None:
    batch = StepBatch(export, bytes(range(16)), 100)
    for number in range(50):
        batch.add(
            number,
            StepTelemetry(
                start_unix_ns=START + number * 10**8, duration_ns=10**8, prefill_tokens=0, decode_sequences=1
            ),
        )
    batch.flush()
    spans = by_sdk(memory, export)
    assert [attributes(span)["phasewise.step.first"] for span in spans] == [0, 10, 20, 30, 40]


def test_what_the_resource_says_goes_with_it(memory: InMemorySpanExporter, export: SpanExport) -> None:
    export.request(request_telemetry(sequence(1, 2, 3, 4, 5), "m"))
    assert export.close(10)
    (group,) = encode_spans(memory.get_finished_spans()).resource_spans
    assert RESOURCE.items() <= {pair.key: plain(pair.value) for pair in group.resource.attributes}.items()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(nanoseconds, min_size=1, max_size=5),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4),
    st.integers(0, 10**9),
)
def test_phases_sum_to_the_whole(lengths: list[int], outside: list[tuple[float, float]], before_ns: int) -> None:
    total = sum(lengths)
    tools = tuple(ToolRun("t", START + int(min(p) * total), START + int(max(p) * total)) for p in outside)
    made = sequence(*lengths)
    boundary = Boundary(
        arrival_ns=START - before_ns, finished_ns=START + total, first_token_ns=made.first_token_ns, tools=tools
    )
    row = received(request_spans(request_telemetry(made, "m", boundary=boundary)))
    assert abs(row["e2e_s"] - (total + before_ns) / 1e9) <= 1e-6
    assert abs(sum(row[name] or 0.0 for name in PHASES) - row["e2e_s"]) <= 1e-6
    assert abs(row["residual_s"]) <= 1e-6


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-(10**6), 10**9), min_size=6, max_size=6))
def test_marks_of_two_threads_never_make_a_phase_negative(moments: list[int]) -> None:
    made = sequence(1, 1, 1, 1, 1)
    for name, moment in zip(MARKS[:3], moments, strict=False):
        setattr(made, name, START + moment)
    boundary = Boundary(
        arrival_ns=START + moments[3], finished_ns=START + moments[4], first_token_ns=START + moments[5]
    )
    request = request_telemetry(made, "m", boundary=boundary)
    spans = request_spans(request)
    root = spans[0]
    assert all(
        root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano <= root.end_time_unix_nano
        for s in spans
    )
    lengths = [span.end_time_unix_nano - span.start_time_unix_nano for span in spans]
    assert sum(lengths[1:]) == lengths[0]


def names_and_errors(finished: Sequence, **boundary: Any) -> dict[str, str]:
    told: Mapping[str, Any] = {"arrival_ns": START, "finished_ns": finished.finished_ns, **boundary}
    spans = request_spans(request_telemetry(finished, "m", boundary=Boundary(**told)))
    return {span.name: span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "" for span in spans}


def test_a_failure_marks_the_root_and_the_phase_it_came_in() -> None:
    failed = sequence(1, 2, 3, finish_reason="error", error="lost")
    assert names_and_errors(failed) == {"llm_request": "lost", "context": "", "queue": "", "prefill": "lost"}


def test_a_cancelled_request_says_so() -> None:
    assert names_and_errors(sequence(5, 5, finish_reason="abort"))["llm_request"] == "cancelled by the client"


def test_a_failed_tool_marks_itself_only() -> None:
    tool = ToolRun("search", START + 8, START + 9, "no answer")
    found = names_and_errors(sequence(1, 2, 3, 4, 5), first_token_ns=START + 10, tools=(tool,))
    assert {name for name, error in found.items() if error} == {"external_tool"}
    assert found["external_tool"] == "no answer"


def test_a_sequence_that_runs_has_no_telemetry() -> None:
    with pytest.raises(ValueError, match="has not ended"):
        request_telemetry(
            Sequence(RequestSpec(request_id="r", arrival_ns=0, prompt_tokens=1, max_output_tokens=1)), "m"
        )


def test_ids_of_a_simulation_follow_from_its_names() -> None:
    one, again = (request_telemetry(sequence(1, 2, 3, 4, 5), "m", instance="a") for _ in range(2))
    other = request_telemetry(sequence(1, 2, 3, 4, 5), "m", instance="b")
    assert one.trace_id == again.trace_id != other.trace_id


# --- sending ---------------------------------------------------------------------------------------------------------


def many(count: int) -> list[Any]:
    return [
        request_telemetry(
            sequence(1, 2, 3, 4, 5), "m", caller=Caller(trace_id=n.to_bytes(16, "big"), span_id=n.to_bytes(8, "big"))
        )
        for n in range(1, count + 1)
    ]


def test_a_sampling_ratio_keeps_whole_requests_and_all_steps(memory: InMemorySpanExporter) -> None:
    export = SpanExport(memory, ExportSettings(sampling_ratio=0.5), RESOURCE)
    for n in range(200):
        trace = (n * 2**128 // 200 + 1).to_bytes(16, "big")
        # The sampler looks at the lower half of the id.
        caller = Caller(trace_id=trace[8:] + trace[:8], span_id=(n + 1).to_bytes(8, "big"))
        export.request(request_telemetry(sequence(1, 2, 3, 4, 5), "m", caller=caller))
    StepBatch(export, b"\xff" * 16, 1).flush()
    export.steps(
        b"\xff" * 16, 0, [StepTelemetry(start_unix_ns=START, duration_ns=1, prefill_tokens=0, decode_sequences=1)], 1
    )
    spans = by_sdk(memory, export)
    trees: dict[bytes, set[str]] = {}
    for span in spans:
        trees.setdefault(span.trace_id, set()).add(span.name)
    assert trees.pop(b"\xff" * 16) == {"engine.steps"}
    assert 90 <= len(trees) <= 110
    assert all(
        names == {"llm_request", "context", "queue", "prefill", "first_token", "decode"} for names in trees.values()
    )


@pytest.mark.parametrize("sampled", [True, False])
def test_a_caller_decides_for_its_requests(memory: InMemorySpanExporter, sampled: bool) -> None:
    export = SpanExport(memory, ExportSettings(sampling_ratio=0.0 if sampled else 1.0), RESOURCE)
    caller = Caller(trace_id=bytes(range(16)), span_id=b"abcdefgh", parent_span_id=b"parentid")
    export.request(request_telemetry(sequence(1, 2, 3, 4, 5), "m", caller=caller), parent_sampled=sampled)
    assert bool(by_sdk(memory, export)) is sampled


class Stuck(InMemorySpanExporter):
    """A receiver that does not answer before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.go.wait(30)
        return super().export(spans)


@pytest.mark.alone
def test_a_receiver_that_hangs_costs_spans_and_no_time() -> None:
    stuck = Stuck()
    export = SpanExport(stuck, ExportSettings(queue_spans=600, delay_s=0.01), RESOURCE)
    began = time.monotonic()
    for request in many(1000):
        export.request(request)
    assert time.monotonic() - began < 2.0 * slowness()
    limit = time.monotonic() + 10
    while export.dropped < 5400 and time.monotonic() < limit:
        time.sleep(0.01)
    stuck.go.set()
    assert export.close(10)
    assert (export.sent, export.dropped) == (600, 5400)
    assert export.sent == len(stuck.get_finished_spans())
    trees: dict[int, int] = {}
    for span in stuck.get_finished_spans():
        assert span.context is not None
        trees[span.context.trace_id] = trees.get(span.context.trace_id, 0) + 1
    assert set(trees.values()) == {6}  # whole requests or none


def test_what_a_receiver_refuses_is_counted() -> None:
    class Refusing(InMemorySpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.FAILURE

    export = SpanExport(Refusing(), ExportSettings(), RESOURCE)
    export.request(many(1)[0])
    assert export.close(10)
    assert (export.sent, export.failed, export.dropped) == (0, 6, 0)


@pytest.mark.parametrize(
    ("given", "environment", "protocol"),
    [
        ({}, {}, None),
        ({"endpoint": "http://h:4317"}, {}, "grpc"),
        ({"endpoint": "http://h:4318/v1/traces"}, {}, "http/protobuf"),
        ({"endpoint": "http://h:9/v1/traces/"}, {}, "http/protobuf"),
        ({"endpoint": "http://h:4318/"}, {}, "http/protobuf"),
        ({"endpoint": "http://h:4318"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"}, "grpc"),
        ({"protocol": "http/protobuf"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, "http/protobuf"),
    ],
)
def test_how_spans_are_sent(given: Any, environment: dict[str, str], protocol: str | None) -> None:
    assert protocol_of(ExportSettings(**given), environment) == protocol


def test_a_protocol_nobody_speaks_is_refused() -> None:
    with pytest.raises(InputError, match="grpc and http/protobuf"):
        protocol_of(ExportSettings(endpoint="http://h"), {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
