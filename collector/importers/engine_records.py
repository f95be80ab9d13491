"""Requests as engines themselves write them to files, to the spans of what they tell: their profiles stand in `rules/engines`.

The ids of such a span come from the record, so that a file read twice, or a record that was received as well, is one span.
Prompts and answers are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from phasewise.collector.importers import dynamo_trace, llama_timings, sglang_metrics, trtllm_metrics
from phasewise.collector.importers.lines import Lines
from phasewise.collector.importers.record import Unusable
from phasewise.collector.records import SPAN_SCHEMA, Span


@dataclass(frozen=True, slots=True)
class Form:
    """A format. relative: its times only order its records: the last ends when the file was written."""

    format: str
    recognises: Callable[[dict[str, Any]], bool]
    spans: Callable[[dict[str, Any]], Iterator[Span]]
    remedy: str
    relative: bool = False


FORMS = (
    Form("dynamo-trace", dynamo_trace.recognises, dynamo_trace.spans, "write what DYN_REQUEST_TRACE=1 writes"),
    Form(
        "sglang-metrics",
        sglang_metrics.recognises,
        sglang_metrics.spans,
        "start SGLang with --enable-metrics --export-metrics-to-file",
    ),
    Form("trtllm-metrics", trtllm_metrics.recognises, trtllm_metrics.spans, "write what /perf_metrics answers", True),
    Form("llama-timings", llama_timings.recognises, llama_timings.spans, "write whole answers of llama.cpp", True),
)


def form_of(document: dict[str, Any]) -> Form | None:
    return next((form for form in FORMS if form.recognises(document)), None)


def read(form: Form, lines: Lines, modified_unix_ns: int, received_unix_ns: int) -> pa.Table:
    """Rows of SPAN_SCHEMA, in order; records that cannot be used are counted and named."""
    found: list[Span] = []
    for place, document in lines:
        try:
            found += form.spans(document)
            lines.good()
        except Unusable as error:
            lines.bad(place, error.field, error.problem, error.remedy)
    lines.require_some(form.remedy)
    shift_ns = 0
    if form.relative:
        timed = [span.end_unix_ns for span in found if span.end_unix_ns < trtllm_metrics.CLOCKS_END_NS]
        shift_ns = modified_unix_ns - max(timed, default=modified_unix_ns)
    rows = [asdict(replace(_shifted(span, shift_ns), received_unix_ns=received_unix_ns)) for span in found]
    return pa.Table.from_pylist(rows, SPAN_SCHEMA)


def _shifted(span: Span, shift_ns: int) -> Span:
    """A span of a clock that began with its machine, on the time axis; one that has real times stays."""
    if span.end_unix_ns >= trtllm_metrics.CLOCKS_END_NS:
        return span
    return replace(span, start_unix_ns=span.start_unix_ns + shift_ns, end_unix_ns=span.end_unix_ns + shift_ns)
