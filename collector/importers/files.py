"""Recognising a file by its content, and the one result all importers give."""

from __future__ import annotations

import functools
import gzip
import io
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from phasewise.collector.exposition import Exposition
from phasewise.collector.importers import (
    clients,
    jaeger_json,
    otlp_file,
    prometheus_json,
    scrape_file,
    tempo_json,
    trace_file,
)
from phasewise.collector.importers.lines import Lines
from phasewise.collector.profiles import Profiles
from phasewise.collector.redact import redact_metrics, redact_spans
from phasewise.rules.errors import InputError
from phasewise.rules.load import load_rulebook

MAX_BYTES = 2 << 30  # of a file after decompression
_KNOWN = (
    "scrapes as JSON lines ({unix_ns, text}), answers of Prometheus' query_range, OTLP traces or metrics (protobuf, JSON or "
    "JSON lines), traces of Jaeger or Tempo as JSON, per-request records of vllm bench, AIPerf or an OpenAI client"
)


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file held. kind: what it was; spans, samples, requests: rows of it; counts: of lines or items, good and bad;
    problems: the first bad ones, each naming line, field and remedy."""

    kind: Literal["scrapes", "spans", "metrics", "client"]
    format: str
    spans: pa.Table | None = None
    metrics: pa.Table | None = None
    samples: list[Exposition] = field(default_factory=list)
    requests: pl.DataFrame | None = None
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def import_file(path: Path, profiles: Profiles | None = None, *, dataset: str | None = None) -> Imported:
    """Read a file. Raises InputError when it cannot be read, is of no known format, or holds nothing good.

    profiles: those of the rulebook; the packaged ones by default. dataset: name for the rows of this import.
    """
    try:
        data = path.read_bytes()
        modified = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(path, "", error.strerror or str(error), "name a file that can be read") from error
    return import_bytes(data, str(path), profiles, modified_unix_ns=modified, dataset=dataset)


def import_bytes(
    data: bytes,
    name: str,
    profiles: Profiles | None = None,
    *,
    modified_unix_ns: int | None = None,
    dataset: str | None = None,
) -> Imported:
    """The same from bytes. modified_unix_ns: where files with relative times are placed on the time axis (their end)."""
    body = _decompressed(data, name)
    at = modified_unix_ns or time.time_ns()
    if not body.strip():
        raise InputError(name, "", "is empty", "name a file with content")
    if body.lstrip()[:1] not in (b"{", b"["):
        return _imported_protobuf(body, name, at)
    lines = Lines(name, body)
    first = lines.first
    if (form := _trace_form(first)) is not None:
        return _imported_traces(lines, form, at)
    if otlp_file.is_otlp(first):
        return _imported_otlp_json(lines, at)
    if prometheus_json.recognises(first):
        samples = prometheus_json.read(lines, profiles or packaged_profiles())
        return Imported("scrapes", "prometheus-json", samples=samples, counts=lines.counts, problems=lines.problems)
    if "text" in first or "unix_ns" in first:
        samples = scrape_file.read(lines, profiles or packaged_profiles())
        return Imported("scrapes", "scrapes", samples=samples, counts=lines.counts, problems=lines.problems)
    reader = clients.reader_for(first)
    if reader is None:
        keys = ", ".join(sorted(first)[:6])
        raise InputError(name, "line 1", f"has a format that is not known (keys: {keys})", f"known are {_KNOWN}")
    rows = clients.read(reader, lines, at, dataset)
    return Imported("client", reader.format, requests=rows, counts=lines.counts, problems=lines.problems)


def kind_of(path: Path) -> Literal["scrapes", "spans", "client"]:
    """What kind of file this is, by its first object; InputError when it cannot be told."""
    try:
        with path.open("rb") as handle:
            head = handle.read(1 << 20)
    except OSError as error:
        raise InputError(path, "", error.strerror or str(error), "name a file that can be read") from error
    if head[:2] == b"\x1f\x8b":
        head = zlib.decompressobj(31).decompress(head, 1 << 20)
    if head.lstrip()[:1] not in (b"{", b"["):
        return "spans"
    try:
        first = Lines(str(path), head).first
    except InputError:
        first = Lines(str(path), path.read_bytes()).first  # the first object is longer than that
    if otlp_file.is_otlp(first) or _trace_form(first) is not None:
        return "spans"
    return "scrapes" if "text" in first or prometheus_json.recognises(first) else "client"


@functools.cache
def packaged_profiles() -> Profiles:
    """The engine profiles of this installation."""
    return Profiles(load_rulebook().engines)


def _imported_protobuf(body: bytes, name: str, at: int) -> Imported:
    kind, rows, counts, problems = otlp_file.read_protobuf(body, name, at)
    if kind == "spans":
        return Imported("spans", "otlp-protobuf", spans=redact_spans(rows)[0], counts=counts, problems=problems)
    return Imported("metrics", "otlp-protobuf", metrics=redact_metrics(rows)[0], counts=counts, problems=problems)


def _trace_form(first: dict[str, Any]) -> trace_file.Form | None:
    """The tracing system whose answers a file holds, by its first object."""
    if tempo_json.recognises(first):
        return "tempo-json"
    return "jaeger-json" if jaeger_json.recognises(first) else None


def _imported_traces(lines: Lines, form: trace_file.Form, at: int) -> Imported:
    spans = redact_spans(trace_file.read(lines, form, at))[0]
    return Imported("spans", form, spans=spans, counts=lines.counts, problems=lines.problems)


def _imported_otlp_json(lines: Lines, at: int) -> Imported:
    spans, metrics = otlp_file.read_json(lines, at)
    kind: Literal["spans", "metrics"] = "spans" if spans is not None and spans.num_rows else "metrics"
    spans = None if spans is None else redact_spans(spans)[0]
    metrics = None if metrics is None else redact_metrics(metrics)[0]
    return Imported(kind, "otlp-json", spans=spans, metrics=metrics, counts=lines.counts, problems=lines.problems)


def _decompressed(data: bytes, name: str) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            body = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(name, "", f"is damaged gzip: {error}", "write it again") from error
    if len(body) > MAX_BYTES:
        raise InputError(name, "", f"holds more than {MAX_BYTES >> 30} GiB", "split it")
    return body
