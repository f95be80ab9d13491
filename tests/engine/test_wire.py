"""The engine's wire format, from message to rows: nothing is lost, and the phases sum to the end-to-end time."""

from __future__ import annotations

import json

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from phasewise.collector.normalize import Normalized, normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces
from phasewise.instrumented_engine.telemetry import (
    STEPS_PER_SPAN,
    RequestTelemetry,
    StepTelemetry,
    export_request,
    request_spans,
    step_spans,
)
from phasewise.rules.load import load_rulebook

START = 1_795_972_000_123_456_789
PROFILES = Profiles(load_rulebook().engines)
RESOURCE = {"service.name": "phasewise-engine", "service.instance.id": "e-0", "service.version": "0.1.0"}
PHASES = ("context_s", "queue_s", "prefill_s", "first_token_s", "decode_s", "external_s")


def received(spans: list[Span]) -> Normalized:
    body = export_request(RESOURCE, spans).SerializeToString()
    frame = pl.from_arrow(scan_traces(body, START).rows)
    assert isinstance(frame, pl.DataFrame)
    return normalize(frame, PROFILES)


def request(*steps_ns: int, **changes: object) -> RequestTelemetry:
    """A request whose phases have these lengths, in order."""
    at = [START]
    for length in steps_ns:
        at.append(at[-1] + length)
    names = ["queued_unix_ns", "scheduled_unix_ns", "prefilled_unix_ns", "first_token_unix_ns"]
    times = dict(zip(names, at[1:-1], strict=False))
    fields: dict[str, object] = {
        "trace_id": bytes(range(16)),
        "span_id": b"12345678",
        "request_id": "r-1",
        "model": "m",
        "arrival_unix_ns": START,
        "finished_unix_ns": at[-1],
        **times,
        **changes,
    }
    return RequestTelemetry(**fields)  # type: ignore[arg-type]


lengths = st.integers(min_value=0, max_value=3_600 * 10**9)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=5, max_size=5), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4))
def test_phases_sum_to_the_end_to_end_time(parts: list[int], outside: list[tuple[float, float]]) -> None:
    total = sum(parts)
    external = tuple((START + int(min(a, b) * total), START + int(max(a, b) * total)) for a, b in outside)
    row = received(request_spans(request(*parts, external=external, output_tokens=9))).requests.row(0, named=True)
    explained = sum(row[name] or 0.0 for name in PHASES)
    assert abs(row["e2e_s"] - total / 1e9) <= 1e-6
    assert abs(explained - row["e2e_s"]) <= 1e-6
    assert abs(row["residual_s"]) <= 1e-6
    assert row["combined_s"] is None


def test_every_field_arrives() -> None:
    made = request(
        10**9, 2 * 10**9, 3 * 10**9, 10**8, 4 * 10**9,
        input_tokens=64, cached_tokens=16, output_tokens=9, preemptions=1, priority=3, tenant="t", route="/r",
        request_class="interactive", client_request_id="x-9", drafted_tokens=8, accepted_tokens=5, longest_gap_s=0.5,
        finish_reason="stop", queue_wait_s={"slot": 1.5, "kv": 0.5}, segments=((1, 3, 4), (3, 6, 6), (2, 7, 14)),
        chunks=((START + 3 * 10**9, START + 4 * 10**9), (START + 4 * 10**9, START + 6 * 10**9)),
    )  # fmt: skip
    row = received(request_spans(made)).requests.row(0, named=True)
    assert [row[name] for name in PHASES[:5]] == [1.0, 2.0, 3.0, 0.1, 4.0]
    assert row["ttft_s"] == 6.1
    assert row["tpot_s"] == 0.5
    assert row["queued_unix_ns"] == made.queued_unix_ns
    assert row["scheduled_unix_ns"] == made.scheduled_unix_ns
    assert row["first_token_unix_ns"] == made.first_token_unix_ns
    assert row["finished_unix_ns"] == made.finished_unix_ns
    assert (row["input_tokens"], row["cached_tokens"], row["output_tokens"]) == (64, 16, 9)
    assert (row["queue_slot_s"], row["queue_kv_s"], row["queue_budget_s"]) == (1.5, 0.5, None)
    assert (row["preemptions"], row["priority"], row["drafted_tokens"], row["accepted_tokens"]) == (1, 3, 8, 5)
    assert (row["tenant"], row["route"], row["request_class"]) == ("t", "/r", "interactive")
    assert (row["client_request_id"], row["finish_reason"]) == ("x-9", "stop")
    assert json.loads(row["segments"]) == [[1, 3, 4], [3, 6, 6], [2, 7, 14]]
    assert (row["engine"], row["engine_version"], row["instance"]) == ("phasewise", "0.1.0", "e-0")


def test_a_phase_that_never_began_has_no_span() -> None:
    made = request(10**9, 2 * 10**9, error="out of memory")
    made_spans = request_spans(made)
    assert [span.name for span in made_spans] == ["llm_request", "context", "queue"]
    row = received(made_spans).requests.row(0, named=True)
    assert (row["context_s"], row["queue_s"], row["prefill_s"], row["decode_s"]) == (1.0, 2.0, None, None)
    assert row["outcome"] == "error"


def test_building_a_message_twice_gives_the_same_ids() -> None:
    first, second = (request_spans(request(1, 1, 1, 1, 1)) for _ in range(2))
    assert [span.span_id for span in first] == [span.span_id for span in second]
    assert len({span.span_id for span in first}) == len(first)


def test_a_supplement_is_kept_apart() -> None:
    done = received(request_spans(request(1, 1, 1, 1, 1, supplement=True, preemptions=4)))
    assert done.requests.is_empty()
    assert done.supplements["preemptions"].to_list() == [4]


def steps(count: int, every_ns: int = 10**6) -> list[StepTelemetry]:
    return [
        StepTelemetry(
            start_unix_ns=START + i * every_ns, duration_ns=every_ns, prefill_tokens=i, decode_sequences=2, running=3,
            waiting_kv=1, schedule_ns=500,
        )
        for i in range(count)
    ]  # fmt: skip


def test_steps_arrive_as_rows() -> None:
    made = step_spans(bytes(16)[:-1] + b"\x01", 7, steps(600), 24)
    assert len(made) == 3
    rows = received(made).steps
    assert rows.height == 600
    assert rows["step"].to_list() == list(range(7, 607))
    row = rows.row(300, named=True)
    assert (row["instance"], row["start_unix_ns"], row["duration_s"]) == ("e-0", START + 300 * 10**6, 0.001)
    assert (row["prefill_tokens"], row["decode_sequences"], row["running"], row["waiting_kv"]) == (300, 2, 3, 1)
    assert row["kv_blocks_total"] == 24
    assert abs(row["schedule_s"] - 5e-7) < 1e-15
    assert row["context_tokens"] is None


def test_steps_are_cut_by_count_and_by_time() -> None:
    assert len(step_spans(b"t" * 16, 0, steps(STEPS_PER_SPAN + 1), None)) == 2
    assert len(step_spans(b"t" * 16, 0, steps(10, every_ns=4 * 10**8), None)) == 4
    assert step_spans(b"t" * 16, 0, [], None) == []


def test_steps_of_unequal_length_are_counted_not_guessed() -> None:
    made = step_spans(b"t" * 16, 0, steps(3), None)
    array = next(a for a in made[0].attributes if a.key == "phasewise.step.running")
    del array.value.array_value.values[0]
    done = received(made)
    assert done.steps.is_empty()
    assert done.broken_steps == 1
