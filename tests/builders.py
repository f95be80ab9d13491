"""Rows for tests: a builder fills in whatever the test does not care about."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from phasewise.collector.records import (
    ATTRIBUTION_FIELDS,
    EngineSample,
    Instance,
    Request,
    Span,
    arrow_schema,
)
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column

SECOND_NS = 10**9
# A fixed moment of a fictitious day; tests never depend on the clock.
START_UNIX_NS = 1_764_424_800 * SECOND_NS  # 2025-11-29T14:00:00Z
_numbers = itertools.count(1)


def make_request(*, at_s: Any = 0.0, **fields: object) -> Request:  # Any: tests pass dictionaries of fields
    """A request that arrives `at_s` seconds after START_UNIX_NS; phases and times agree unless a test overrides them."""
    number = next(_numbers)
    queue_s = float(fields.pop("queue_s", 0.01))  # type: ignore[arg-type]
    prefill_s = float(fields.pop("prefill_s", 0.2))  # type: ignore[arg-type]
    first_token_s = float(fields.pop("first_token_s", 0.01))  # type: ignore[arg-type]
    decode_s = float(fields.pop("decode_s", 1.0))  # type: ignore[arg-type]
    output_tokens = int(fields.get("output_tokens") or 101)  # type: ignore[call-overload]
    arrival = START_UNIX_NS + round(at_s * SECOND_NS)
    ttft_s = queue_s + prefill_s + first_token_s
    e2e_s = ttft_s + decode_s
    made = Request(
        request_key=f"{number:032x}",
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
        request_id=f"cmpl-{number}",
        engine="vllm",
        instance="gpu-0",
        model="llama-8b",
        source="otlp",
        input_tokens=500,
        output_tokens=output_tokens,
        arrival_unix_ns=arrival,
        finished_unix_ns=arrival + round(e2e_s * SECOND_NS),
        queued_unix_ns=arrival,
        scheduled_unix_ns=arrival + round(queue_s * SECOND_NS),
        first_token_unix_ns=arrival + round(ttft_s * SECOND_NS),
        e2e_s=e2e_s,
        ttft_s=ttft_s,
        queue_s=queue_s,
        context_s=0.0,
        prefill_s=prefill_s,
        first_token_s=first_token_s,
        decode_s=decode_s,
        tpot_s=decode_s / (output_tokens - 1) if output_tokens > 1 else None,
        residual_s=0.0,
        outcome="ok",
        finish_reason="stop",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def attributed(request: Request, causes: Mapping[str, float] | None = None) -> dict[str, object]:
    """A row of `requests` as the table holds it: the request and its attribution, by default from its phases."""
    if causes is None:
        causes = {
            "queue.slots": request.queue_s or 0.0,
            "prefill.compute": request.prefill_s or 0.0,
            "host": request.first_token_s or 0.0,
            "decode.weights": request.decode_s or 0.0,
        }
    by_class = dict.fromkeys(CLASSES, 0.0)
    for cause, seconds in causes.items():
        by_class[CLASS_OF_CAUSE[cause]] += seconds
    ranked = sorted(by_class, key=lambda name: -by_class[name])
    inside = {cause: seconds for cause, seconds in causes.items() if CLASS_OF_CAUSE[cause] == ranked[0]}
    row: dict[str, object] = asdict(request)
    row |= {cause_column(cause): causes.get(cause, 0.0) for cause in CAUSES}
    row |= dict.fromkeys(ATTRIBUTION_FIELDS)
    row |= {
        "primary_class": ranked[0],
        "cause": max(inside, key=lambda cause: inside[cause]),
        "margin_ratio": (by_class[ranked[0]] - by_class[ranked[1]]) / (request.e2e_s or 1.0),
        "measured_s": request.e2e_s,
        "clamped": False,
        "rules_version": "test",
        "revision": 1,
        "final": True,
    }
    return row


def request_table(rows: Iterable[Request | Mapping[str, object]]) -> pa.Table:
    """Arrow table with the columns of `requests`."""
    plain = [attributed(row) if isinstance(row, Request) else dict(row) for row in rows]
    return pa.Table.from_pylist(plain, schema=arrow_schema(Request))


def make_sample(*, at_s: float = 0.0, **fields: object) -> EngineSample:
    """A scrape `at_s` seconds after START_UNIX_NS."""
    made = EngineSample(
        instance="gpu-0:8000",
        unix_ns=START_UNIX_NS + round(at_s * SECOND_NS),
        engine="vllm",
        model="llama-8b",
        source="scrape",
        running=4.0,
        waiting=0.0,
        kv_usage_ratio=0.3,
        preemptions=0.0,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def make_instance(**fields: object) -> Instance:
    made = Instance(
        instance="gpu-0:8000",
        engine="vllm",
        model="llama-8b",
        kind="scrape",
        joined_to="gpu-0",
        last_seen_unix_ns=2**62,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def make_span(
    *, at_s: float = 0.0, duration_s: float = 1.0, attributes: Mapping[str, object] | None = None, **fields: object
) -> Span:
    """A span that starts `at_s` seconds after START_UNIX_NS."""
    number = next(_numbers)
    start = START_UNIX_NS + round(at_s * SECOND_NS)
    made = Span(
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
        name="llm_request",
        kind=2,
        start_unix_ns=start,
        end_unix_ns=start + round(duration_s * SECOND_NS),
        attributes=json.dumps(dict(attributes or {})),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def record_table(record: type, rows: Sequence[object]) -> pa.Table:
    """Arrow table of rows of one record type."""
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=arrow_schema(record))  # type: ignore[call-overload]
