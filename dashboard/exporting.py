"""Pages of an export, the same for the API and for the command that opens the data itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from phasewise.analyzer.filters import conditions
from phasewise.analyzer.replicas import Reader
from phasewise.analyzer.window import Filter, parse_time
from phasewise.collector import exchange
from phasewise.collector.exchange import SPANS, TABLES, Selection
from phasewise.collector.redact import redact_spans
from phasewise.collector.span_pages import SpanPages
from phasewise.rules.errors import InputError

NAMES = (*TABLES, SPANS)
_SLACK_NS = 3600 * 10**9  # a span is received after it ends, but for clocks that differ


def selection_of(start: str | None, end: str | None, filters: Sequence[Filter], now_unix_ns: int) -> Selection:
    """What is asked for: everything where there is neither a window nor a filter."""
    first = parse_time(start, now_unix_ns, "--from") if start else 0
    last = parse_time(end, now_unix_ns, "--to") if end else 1 << 62
    if first >= last:
        raise InputError("--from", str(start), "is not before --to", "name the earlier time first")
    condition = conditions(filters) if filters else None
    return Selection(first, last, condition.sql if condition else "", condition.parameters if condition else ())


def page_of(
    reader: Reader, data: Path, table: str, chosen: Selection, cursor: str = "", *, with_content: bool = True
) -> tuple[pa.Table, str]:
    """A page of a table and the cursor of the next. Spans are not selected here: whoever collects them knows their requests.

    with_content: spans with the prompts and answers that were kept, if any; otherwise with their lengths.
    """
    if table == SPANS:
        rows, following = SpanPages(data).page(cursor, max(0, chosen.from_unix_ns - _SLACK_NS))
        return (rows if with_content else redact_spans(rows)[0]), following
    if table not in TABLES:
        raise InputError("table", table[:40], "is no table of an export", f"one of {', '.join(NAMES)}")
    return exchange.page(reader.query, table, chosen, cursor)


def to_bytes(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


def of_bytes(body: bytes) -> pa.Table:
    """The inverse of to_bytes."""
    return pa.ipc.open_stream(body).read_all()
