"""Traces of other tracing systems to span rows, by way of OTLP: one scanner knows the limits, the flags and what to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa

from phasewise.collector.importers import jaeger_json, tempo_json
from phasewise.collector.importers.lines import Lines
from phasewise.collector.otlp_json import object_to_protobuf
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.scan import scan_traces
from phasewise.collector.wire import Malformed, TooLarge

Form = Literal["jaeger-json", "tempo-json"]
_REMEDIES = {
    "jaeger-json": "write what Jaeger's /api/traces answers",
    "tempo-json": "write what Tempo's /api/traces/ID answers",
}


def read(lines: Lines, form: Form, received_unix_ns: int) -> pa.Table:
    """Rows of SPAN_SCHEMA of all traces in a file, in order; spans that cannot be used are counted and named."""
    remedy = _REMEDIES[form]
    found: list[pa.Table] = []
    for place, trace in _traces(lines, form):
        if trace is None:
            lines.bad(place, "", "holds no trace", remedy)
            continue
        try:
            scanned = scan_traces(object_to_protobuf(trace, "traces"), received_unix_ns)
        except (Malformed, TooLarge) as error:
            lines.bad(place, "", error.problem if isinstance(error, Malformed) else error.told, remedy)
            continue
        lines.good(scanned.rows.num_rows)
        for _ in range(sum(scanned.rejected.values())):
            lines.bad(place, "", scanned.first_error, remedy)
        found.append(scanned.rows)
    lines.require_some(remedy)
    return pa.concat_tables(found).combine_chunks() if found else SPAN_SCHEMA.empty_table()


def _traces(lines: Lines, form: Form) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each trace as an OTLP/JSON request, with its place; None for what is none."""
    for place, document in lines:
        if form == "tempo-json":
            yield place, tempo_json.as_otlp(document) if tempo_json.recognises(document) else None
            continue
        if not jaeger_json.recognises(document):
            yield place, None
        for part, trace in jaeger_json.traces(document):
            where = f"{place}, {part}" if part else place
            yield where, jaeger_json.as_otlp(trace) if isinstance(trace, dict) else None
