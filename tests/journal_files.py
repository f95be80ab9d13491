"""Rows for a journal, and what is read of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from phasewise.collector.journal import (
    JournalReader,
    JournalWriter,
    Position,
)
from phasewise.collector.records import METRIC_SCHEMA, SPAN_SCHEMA


def span_rows(*names: str) -> pa.Table:
    blank = {field.name: 0 if field.type == pa.int64() else "" for field in SPAN_SCHEMA}
    return pa.Table.from_pylist([{**blank, "name": name} for name in names], schema=SPAN_SCHEMA)


def metric_rows(count: int) -> pa.Table:
    return pa.Table.from_pylist([{"name": f"m{i}", "kind": "gauge", "unix_ns": i} for i in range(count)], METRIC_SCHEMA)


def write(directory: Path, *batches: str, **options: Any) -> list[Position]:
    """One entry a name, all synced, in one run of a writer."""
    with JournalWriter(directory, **options) as writer:
        positions = [writer.append("spans", span_rows(name)) for name in batches]
        writer.sync()
    return positions


def names_in(directory: Path, after: Position | None = None) -> list[str]:
    entries = JournalReader(directory).read(after)
    return [name for entry in entries for name in entry.rows["name"].to_pylist()]
