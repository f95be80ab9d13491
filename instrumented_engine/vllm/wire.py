"""Finished requests and steps of vLLM as spans of the wire format (see ``instrumented_engine/telemetry.py``). Pure.

A request's span has `phasewise.supplement` and the engine's id of the request: it fills empty columns of the row that vLLM's own
span makes, and makes none. Arrays of steps hold known values only: where one is unknown a new span begins, without that array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from phasewise.instrumented_engine.vllm.readings import Finished, Step

SCOPE = "phasewise.engine"
WIRE_VERSION = "1"
STEPS_PER_SPAN = 256
STEP_SPAN_NS = 10**9
ARRAYS = tuple(field.name for field in fields(Step) if field.name != "number")

Value = str | int | float | bool | list[int] | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A span before the SDK makes it one. server: a request, else a piece of the instance's own trace."""

    trace_id: int
    span_id: int
    name: str
    server: bool
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, Value]


def request_draft(request: Finished, model: str | None, instance: bytes, number: int) -> Draft:
    """instance: of this engine process and no other; number: of the request in it."""
    found: dict[str, Value | None] = {
        "phasewise.supplement": True,
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "gen_ai.usage.input_tokens": request.input_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "gen_ai.latency.e2e": (request.finished_unix_ns - request.arrival_unix_ns) / 1e9,
        "phasewise.preemptions": request.preemptions,
    }
    trace_id = _number(16, instance, b"request", request.request_id.encode(errors="replace"), b"%d" % number)
    return Draft(
        trace_id=trace_id,
        span_id=_number(8, b"%d" % trace_id),
        name="llm_request",
        server=True,
        start_unix_ns=request.arrival_unix_ns,
        end_unix_ns=request.finished_unix_ns,
        attributes={key: value for key, value in found.items() if value is not None},
    )


def step_drafts(steps: Iterable[Step], kv_blocks_total: int | None, instance: bytes) -> list[Draft]:
    """Spans of steps in their order: cut at STEPS_PER_SPAN, a second, a missing number, and where other things are known."""
    drafts: list[Draft] = []
    held: list[Step] = []
    for step in steps:
        if held and not _fits(held, step):
            drafts.append(_steps_draft(held, kv_blocks_total, instance))
            held = []
        held.append(step)
    if held:
        drafts.append(_steps_draft(held, kv_blocks_total, instance))
    return drafts


def _fits(held: Sequence[Step], step: Step) -> bool:
    return (
        len(held) < STEPS_PER_SPAN
        and step.number == held[-1].number + 1
        and step.start_unix_ns - held[0].start_unix_ns < STEP_SPAN_NS
        and _known(step) == _known(held[0])
    )


def _known(step: Step) -> tuple[str, ...]:
    return tuple(name for name in ARRAYS if getattr(step, name) is not None)


def _steps_draft(steps: Sequence[Step], kv_blocks_total: int | None, instance: bytes) -> Draft:
    first, last = steps[0], steps[-1]
    attributes: dict[str, Value] = {"phasewise.step.first": first.number}
    if kv_blocks_total is not None:
        attributes["phasewise.step.kv_blocks_total"] = kv_blocks_total
    for name in _known(first):
        attributes[f"phasewise.step.{name}"] = [getattr(step, name) for step in steps]
    return Draft(
        trace_id=_number(16, instance, b"engine.steps"),
        span_id=_number(8, instance, b"engine.steps", b"%d" % first.number),
        name="engine.steps",
        server=False,
        start_unix_ns=first.start_unix_ns,
        end_unix_ns=max(first.start_unix_ns, last.start_unix_ns + (last.duration_ns or 0)),
        attributes=attributes,
    )


def _number(size: int, *parts: bytes) -> int:
    """An id: follows from what it names, so that building a span twice gives the same; 0 would be no id."""
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1
