"""Contexts of engines that send steps: by hand, and of a run of the instrumented engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from analyzer_contexts import frame
from builders import SECOND_NS, START_UNIX_NS, make_request, record_table

from phasewise.analyzer.attribution import attribute_instance
from phasewise.collector.context import Context, Setting
from phasewise.collector.exposition import SAMPLE_SCHEMA
from phasewise.collector.records import EngineStep, Request
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.request_telemetry import request_telemetry
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS, RequestTelemetry
from phasewise.rules.load import load_rulebook
from phasewise.rules.vocabulary import CAUSES, cause_column

INSTANCE = "engine-0"
RULES = load_rulebook()


class Steps:
    """Steps one after another; `ran` adds one and returns its number. Seconds count from START_UNIX_NS."""

    def __init__(self) -> None:
        self.rows: list[EngineStep] = []
        self.now_s = 0.0

    def ran(self, duration_s: float, prefill: int = 0, sequences: int = 0, context: int = 0, **fields: Any) -> int:
        number = len(self.rows)
        self.rows.append(
            EngineStep(
                instance=INSTANCE,
                step=number,
                start_unix_ns=START_UNIX_NS + round(self.now_s * SECOND_NS),
                duration_s=duration_s,
                prefill_tokens=prefill,
                decode_sequences=sequences,
                context_tokens=context,
                **fields,
            )
        )
        self.now_s = round(self.now_s + duration_s, 9)
        return number

    def pause(self, seconds: float) -> None:
        self.now_s = round(self.now_s + seconds, 9)

    def start_s(self, number: int) -> float:
        return (self.rows[number].start_unix_ns - START_UNIX_NS) / SECOND_NS

    def end_s(self, number: int) -> float:
        return self.start_s(number) + (self.rows[number].duration_s or 0.0)


def stepped_request(
    steps: Steps,
    segments: Sequence[tuple[int, int, int]],
    *,
    queued_s: float | None = None,
    finished_s: float | None = None,
    first_step: int | None = None,
    external_s: float = 0.0,
    **fields: Any,
) -> Request:
    """A request that was in these runs of steps. first_step: the one that gave its first token, by default the last before it
    decodes; external_s: of tools after the first token."""
    scheduled = steps.start_s(segments[0][1])
    decoding = [segment for segment in segments if segment[0] == 2]
    prompt = list(segments[: segments.index(decoding[0])]) if decoding else list(segments)
    first = steps.end_s(prompt[-1][2] if first_step is None else first_step)
    end = finished_s if finished_s is not None else steps.end_s(segments[-1][2])
    queued = scheduled if queued_s is None else queued_s
    made = make_request(at_s=queued)

    def at(seconds: float) -> int:
        return START_UNIX_NS + round(seconds * SECOND_NS)

    outputs = 1 + sum(last - low + 1 for _, low, last in decoding)
    whole: dict[str, Any] = {
        "engine": "phasewise",
        "instance": INSTANCE,
        "model": "some-model",
        "arrival_unix_ns": at(queued),
        "queued_unix_ns": at(queued),
        "scheduled_unix_ns": at(scheduled),
        "first_token_unix_ns": at(first),
        "finished_unix_ns": at(end),
        "e2e_s": end - queued,
        "ttft_s": first - queued,
        "queue_s": scheduled - queued,
        "context_s": 0.0,
        "prefill_s": first - scheduled,
        "first_token_s": 0.0,
        "decode_s": end - first - external_s,
        "external_s": external_s or None,
        "output_tokens": outputs,
        "cached_tokens": 0,
        "segments": json.dumps([list(segment) for segment in segments]),
        **fields,
    }
    return replace(made, **whole)


def stepped_context(
    rows: Sequence[Request], steps: Sequence[EngineStep], settings: Mapping[str, object] | None = None
) -> Context:
    table = pl.from_arrow(record_table(EngineStep, steps))
    assert isinstance(table, pl.DataFrame)
    return Context(
        instance=INSTANCE,
        requests=frame(rows),
        samples=pl.DataFrame(schema=SAMPLE_SCHEMA),
        steps=table,
        targets=frozenset(row.request_key for row in rows),
        settings={name: Setting(value, "test") for name, value in (settings or {}).items()},
    )


def recorded_context(
    recording: Recording, model: str, settings: Mapping[str, object] | None = None
) -> tuple[list[Request], list[EngineStep], Context]:
    """What a run sends, as rows: requests in order of their ends, steps, and both as a context."""
    rows = [_row(request_telemetry(one, model=model, instance=INSTANCE)) for one in recording.finished]
    steps = [
        EngineStep(
            instance=INSTANCE,
            step=number,
            start_unix_ns=START_UNIX_NS + one.start_unix_ns,
            duration_s=one.duration_ns / 1e9,
            schedule_s=(one.schedule_ns or 0) / 1e9,
            kv_blocks_total=recording.kv_blocks_total,
            **{name: getattr(one, name) for name in _SAME},
        )
        for number, one in enumerate(recording.telemetry())
    ]
    return rows, steps, stepped_context(rows, steps, settings)


_SAME = (
    "prefill_tokens", "decode_sequences", "context_tokens", "running", "slots_reserved", "kv_blocks_used", "preemptions",
    *(f"waiting_{reason}" for reason in QUEUE_REASONS),
)  # fmt: skip


def _row(sent: RequestTelemetry) -> Request:
    """The columns that normalizing the request's spans would give."""
    marks = [sent.arrival_unix_ns, sent.queued_unix_ns, sent.scheduled_unix_ns, sent.prefilled_unix_ns,
             sent.first_token_unix_ns, sent.finished_unix_ns]  # fmt: skip
    assert all(mark is not None for mark in marks)
    arrival, queued, scheduled, prefilled, first, end = (int(mark or 0) for mark in marks)

    def outside(low: int, high: int) -> int:
        inside = sorted((max(a, low), min(b, high)) for a, b in sent.external)
        total = reached = 0
        for a, b in inside:
            total += max(0, b - max(a, reached))
            reached = max(reached, b)
        return total

    def seconds(low: int, high: int) -> float:
        return (high - low - outside(low, high)) / 1e9

    return Request(
        request_key=sent.span_id.hex() * 2,
        request_id=sent.request_id,
        engine="phasewise",
        instance=INSTANCE,
        model=sent.model,
        input_tokens=sent.input_tokens,
        cached_tokens=sent.cached_tokens,
        output_tokens=sent.output_tokens,
        arrival_unix_ns=START_UNIX_NS + arrival,
        queued_unix_ns=START_UNIX_NS + queued,
        scheduled_unix_ns=START_UNIX_NS + scheduled,
        first_token_unix_ns=START_UNIX_NS + first,
        finished_unix_ns=START_UNIX_NS + end,
        e2e_s=(end - arrival) / 1e9,
        ttft_s=(first - arrival) / 1e9,
        context_s=seconds(arrival, queued),
        queue_s=seconds(queued, scheduled),
        prefill_s=seconds(scheduled, prefilled),
        first_token_s=seconds(prefilled, first),
        decode_s=seconds(first, end),
        external_s=outside(arrival, end) / 1e9 if sent.external else None,
        preemptions=sent.preemptions,
        segments=json.dumps([list(one) for one in sent.segments]),
        outcome="ok",
        **{f"queue_{reason}_s": value for reason, value in sent.queue_wait_s.items()},  # type: ignore[arg-type]
    )


def booked(context: Context, request: Request) -> dict[str, float]:
    """Seconds by cause of one request, zeros left out; they add up to its end-to-end time."""
    row = attribute_instance(context, RULES).filter(pl.col("request_key") == request.request_key).row(0, named=True)
    found = {cause: row[cause_column(cause)] for cause in CAUSES if row[cause_column(cause)] > 1e-9}
    assert sum(found.values()) == pytest.approx(request.e2e_s, abs=1e-9)
    return found


def warm(steps: Steps, count: int, duration_s: float = 0.010, sequences: int = 1, context: int = 500) -> int:
    """Decode steps that are all alike; the number of the last."""
    for _ in range(count):
        last = steps.ran(duration_s, sequences=sequences, context=context)
    return last
