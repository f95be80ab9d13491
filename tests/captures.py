"""Reads the capture folders of the shared data: recorded telemetry of real engines (their README tells the format)."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def bodies(folder: Path, signal: str = "traces") -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each OTLP request body with its record in the index (transport, time of arrival)."""
    raw = gzip.decompress((folder / f"otlp-{signal}.ld.gz").read_bytes())
    for line in (folder / "otlp-index.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["signal"] == signal:
            start = record["offset"] + 4
            (length,) = struct.unpack(">I", raw[start - 4 : start])
            yield record, raw[start : start + length]


def scrapes(folder: Path) -> Iterator[tuple[int, str]]:
    """Each read of /metrics: Unix nanoseconds and the whole text."""
    page: list[str] = []
    for line in gzip.decompress((folder / "metrics-scrapes.jsonl.gz").read_bytes()).decode().splitlines():
        record = json.loads(line)
        if "error" in record:
            continue
        if "body" in record:
            page = record["body"].split("\n")
        for number, text in record.get("changed", {}).items():
            page[int(number)] = text
        yield record["scrape_unix_ns"], "\n".join(page)
