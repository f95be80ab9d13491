"""From a sequence that has ended to what goes on the wire about it; the same for a live engine and for a simulation.

All moments stay whole nanoseconds, so that the phases sum to the end-to-end time exactly. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass

from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.telemetry import QUEUE_REASONS, RequestTelemetry

CANCELLED = "cancelled by the client"


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One call to the outside that was made. error: why it failed."""

    name: str
    start_ns: int
    end_ns: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What the server saw of a request at its own edge, nanoseconds of the engine's clock: when the call came in, and when the
    bytes of the first and of the last token were handed to the socket. None: nothing was handed over."""

    arrival_ns: int
    finished_ns: int
    first_token_ns: int | None = None
    longest_gap_ns: int | None = None
    tools: tuple[ToolRun, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a request stands in its caller's trace, and what the caller named it."""

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = b""
    request_id: str | None = None  # the response's id; None: the sequence's own
    client_request_id: str | None = None
    route: str | None = None


def request_telemetry(
    sequence: Sequence,
    model: str,
    *,
    instance: str = "",
    caller: Caller | None = None,
    boundary: Boundary | None = None,
) -> RequestTelemetry:
    """Of a finished sequence (raises ValueError for one that has not ended).

    caller: None gives ids that follow from instance and request id. boundary: None takes the engine's own moments, which are
    the boundary where there is no server.
    """
    spec = sequence.spec
    if boundary is None:
        if sequence.finished_ns is None:
            raise ValueError(f"request {spec.request_id} has not ended")
        runs = tuple(ToolRun("", start, end) for start, end in sequence.external)
        longest_ns = sequence.longest_gap_ns if sequence.output_tokens > 1 else None
        boundary = Boundary(
            arrival_ns=spec.arrival_ns, finished_ns=sequence.finished_ns, first_token_ns=sequence.first_token_ns,
            longest_gap_ns=longest_ns, tools=runs,
        )  # fmt: skip
    caller = caller or Caller(trace_id=_id(instance, spec.request_id, 16), span_id=_id(instance, spec.request_id, 8))
    end = boundary.finished_ns
    # Each mark no earlier than the one before and no later than the end: threads of one process read one clock, but a mark may
    # be read before the event it belongs to is seen by the other thread.
    marks: list[int | None] = []
    floor = boundary.arrival_ns
    for mark in (sequence.queued_ns, sequence.scheduled_ns, sequence.prefilled_ns, boundary.first_token_ns):
        if mark is not None:
            floor = mark = min(max(mark, floor), max(end, floor))
        marks.append(mark)
    end = max(end, floor)
    inside = [_inside(run, boundary.arrival_ns, end) for run in boundary.tools]
    return RequestTelemetry(
        trace_id=caller.trace_id,
        span_id=caller.span_id,
        parent_span_id=caller.parent_span_id,
        request_id=caller.request_id or spec.request_id,
        model=model,
        arrival_unix_ns=boundary.arrival_ns,
        queued_unix_ns=marks[0],
        scheduled_unix_ns=marks[1],
        prefilled_unix_ns=marks[2],
        first_token_unix_ns=marks[3],
        finished_unix_ns=end,
        input_tokens=spec.prompt_tokens or None,  # 0: it ended before its prompt was known
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.output_tokens,
        chunks=tuple(_within(sequence.chunks, marks[1], marks[2] if marks[2] is not None else end)),
        external=tuple(inside),
        external_names=tuple(run.name for run in boundary.tools) if any(run.name for run in boundary.tools) else (),
        external_errors=tuple(run.error for run in boundary.tools) if any(run.error for run in boundary.tools) else (),
        queue_wait_s={
            reason: wait / 1e9
            for reason, wait in zip(QUEUE_REASONS, sequence.waits_ns, strict=True)
            if marks[0] is not None
        },
        segments=tuple((phase, first, last) for phase, first, last in sequence.segments),
        preemptions=sequence.preemptions,
        priority=spec.priority,
        tenant=spec.tenant,
        route=caller.route,
        request_class=spec.request_class,
        client_request_id=caller.client_request_id,
        longest_gap_s=boundary.longest_gap_ns / 1e9 if boundary.longest_gap_ns is not None else None,
        finish_reason=sequence.finish_reason,
        error=boundary.error or sequence.error or (CANCELLED if sequence.finish_reason == "abort" else None),
    )


def _inside(run: ToolRun, start: int, end: int) -> tuple[int, int]:
    first = min(max(run.start_ns, start), end)
    return first, min(max(run.end_ns, first), end)


def _within(chunks: Items[tuple[int, int]], start: int | None, end: int) -> list[tuple[int, int]]:
    """The prompt's own steps; what was computed again after a preemption lies behind the prefill."""
    return [(first, last) for first, last in chunks if start is not None and first >= start and last <= end]


def _id(instance: str, request_id: str, size: int) -> bytes:
    return hashlib.blake2b(f"{instance}\n{request_id}".encode(), digest_size=size).digest()
