"""Recognising a file by its content, and the one result all importers give."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from phasewise.collector.exchange import SPANS
from phasewise.collector.exposition import Exposition
from phasewise.collector.importers import (
    clients,
    engine_records,
    jaeger_json,
    otlp_file,
    parquet_file,
    prometheus_json,
    scrape_file,
    tempo_json,
    trace_file,
)
from phasewise.collector.importers.lines import Lines
from phasewise.collector.importers.pieces import DOCUMENT_BYTES
from phasewise.collector.importers.streams import Damaged, Stream, decompressed
from phasewise.collector.profiles import Profiles
from phasewise.collector.redact import redact_metrics, redact_spans
from phasewise.rules.errors import InputError
from phasewise.rules.load import load_rulebook

_LOOKED_AT = 100  # objects of a piece: the first may be broken
_KNOWN = (
    "scrapes as JSON lines ({unix_ns, text}) or one page of /metrics, answers of Prometheus' query_range, OTLP traces, metrics or "
    "logs (protobuf, JSON, JSON lines, or as the Collector's file exporter writes them), traces of Jaeger or Tempo as JSON, "
    "request records of SGLang, Dynamo, TensorRT-LLM or llama.cpp, results of vllm bench, AIPerf, GuideLLM or an OpenAI client, "
    "and folders that phasewise export wrote"
)
Kind = Literal["scrapes", "spans", "metrics", "client", "rows", "nothing"]


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file held. kind: what it was; spans, samples, requests: rows of it; rows: of a table that was exported, as they were
    stored; counts: of lines or items, good and bad; problems: the first bad ones, each naming line, field and remedy."""

    kind: Kind
    format: str
    spans: pa.Table | None = None
    metrics: pa.Table | None = None
    samples: list[Exposition] = field(default_factory=list)
    requests: pl.DataFrame | None = None
    table: str = ""
    rows: pa.Table | None = None
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where bytes come from. modified: where a clock that began with its machine ends; received: the time of the import."""

    name: str
    profiles: Profiles | None
    modified_unix_ns: int
    received_unix_ns: int
    dataset: str | None

    def known_profiles(self) -> Profiles:
        return self.profiles or packaged_profiles()


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
    received_unix_ns: int | None = None,
    dataset: str | None = None,
    first_number: int = 1,
    limit_bytes: int = DOCUMENT_BYTES,
) -> Imported:
    """The same from bytes. modified_unix_ns: where files with relative times are placed on the time axis (their end);
    received_unix_ns: when they count as received, by default the same; first_number: of the first line or message of a piece;
    limit_bytes: after decompression."""
    at = modified_unix_ns or time.time_ns()
    source = _Source(name, profiles, at, received_unix_ns or at, dataset)
    try:
        body = decompressed(data, limit_bytes)
    except Damaged as error:
        raise InputError(name, "", str(error), "write it again, or in parts") from None
    if not body.strip():
        raise InputError(name, "", "is empty", "name a file with content")
    if body[:4] == parquet_file.MAGIC:
        table, rows = parquet_file.read(body, name)
        if table == SPANS:  # its writer may have kept content
            rows = redact_spans(rows)[0]
        return Imported("rows", "phasewise", table=table, rows=rows, counts={"good": rows.num_rows, "bad": 0})
    if body.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
        return _imported_page(body, source) if _is_page(body) else _imported_messages(body, source, first_number)
    return _imported_lines(Lines(name, body, first_number), source)


def import_piece(
    data: bytes,
    name: str,
    profiles: Profiles | None = None,
    *,
    modified_unix_ns: int,
    received_unix_ns: int,
    first_number: int,
    limit_bytes: int = DOCUMENT_BYTES,
) -> Imported:
    """A piece of a file (pieces.py): what cannot be used at all is told as a problem, since the pieces behind it may be good."""
    try:
        return import_bytes(
            data,
            name,
            profiles,
            modified_unix_ns=modified_unix_ns,
            received_unix_ns=received_unix_ns,
            first_number=first_number,
            limit_bytes=limit_bytes,
        )
    except InputError as error:
        bad = max(1, sum(1 for line in data.split(b"\n") if line.strip()) if data[:1] in (b"{", b"[") else 1)
        return Imported("nothing", "", counts={"good": 0, "bad": bad}, problems=[str(error)])


def kind_of(path: Path) -> Kind:
    """What kind of file this is, by its first object; InputError when it cannot be told."""
    with Stream(path) as stream:
        head = stream.peek(1 << 20)
        if head[:4] == parquet_file.MAGIC:
            return "rows"
        if head.lstrip()[:1] not in (b"{", b"["):
            return "scrapes" if _is_page(head) else "spans"
        lines = Lines(str(path), head)
        try:
            first = lines.first
        except InputError:
            first = Lines(str(path), stream.read(DOCUMENT_BYTES)).first  # the first object is longer than that
    if otlp_file.is_otlp(first) or _trace_form(first) is not None or engine_records.form_of(first) is not None:
        return "spans"
    if clients.reader_for(first) is not None:
        return "client"
    return "scrapes" if "text" in first or prometheus_json.recognises(first) else "client"


@functools.cache
def packaged_profiles() -> Profiles:
    """The engine profiles of this installation."""
    return Profiles(load_rulebook().engines)


def _imported_lines(lines: Lines, source: _Source) -> Imported:
    """By the first object that any format knows."""
    first = lines.first
    for _, document in list(lines)[:_LOOKED_AT]:
        found = _recognised(document, lines, source)
        if found is not None:
            return found
    keys = ", ".join(sorted(first)[:6])
    place = next(place for place, _ in lines)
    if place == "item 1":
        place = "line 1"
    raise InputError(lines.name, place, f"has a format that is not known (keys: {keys:.200})", f"known are {_KNOWN}")


def _recognised(first: dict[str, Any], lines: Lines, source: _Source) -> Imported | None:
    if (form := _trace_form(first)) is not None:
        spans = redact_spans(trace_file.read(lines, form, source.received_unix_ns))[0]
        return Imported("spans", form, spans=spans, counts=lines.counts, problems=lines.problems)
    if otlp_file.is_otlp(first):
        return _of_otlp("otlp-json", otlp_file.read_json(lines, source.received_unix_ns), lines)
    if prometheus_json.recognises(first):
        samples = prometheus_json.read(lines, source.known_profiles())
        return Imported("scrapes", "prometheus-json", samples=samples, counts=lines.counts, problems=lines.problems)
    if (record := engine_records.form_of(first)) is not None:
        table = engine_records.read(record, lines, source.modified_unix_ns, source.received_unix_ns)
        spans = redact_spans(table)[0]
        return Imported("spans", record.format, spans=spans, counts=lines.counts, problems=lines.problems)
    if (reader := clients.reader_for(first)) is not None:
        rows = clients.read(reader, lines, source.modified_unix_ns, source.dataset)
        return Imported("client", reader.format, requests=rows, counts=lines.counts, problems=lines.problems)
    if "text" in first or "unix_ns" in first:
        samples = scrape_file.read(lines, source.known_profiles())
        return Imported("scrapes", "scrapes", samples=samples, counts=lines.counts, problems=lines.problems)
    return None


def _trace_form(first: dict[str, Any]) -> trace_file.Form | None:
    """The tracing system whose answers a file holds, by its first object."""
    if tempo_json.recognises(first):
        return "tempo-json"
    return "jaeger-json" if jaeger_json.recognises(first) else None


def _imported_messages(body: bytes, source: _Source, first_number: int) -> Imported:
    found, lines = otlp_file.read_messages(body, source.name, source.received_unix_ns, first_number)
    return _of_otlp("otlp-protobuf", found, lines)


def _of_otlp(form: str, rows: otlp_file.Rows, lines: Lines) -> Imported:
    # Of one chunk: what is done to a column is done to each of its chunks, and there may be one a line.
    spans = redact_spans(pa.concat_tables(rows.spans).combine_chunks())[0] if rows.spans else None
    metrics = redact_metrics(pa.concat_tables(rows.metrics).combine_chunks())[0] if rows.metrics else None
    kind: Kind = "metrics" if metrics is not None and not (spans is not None and spans.num_rows) else "spans"
    return Imported(kind, form, spans=spans, metrics=metrics, counts=lines.counts, problems=lines.problems)


def _is_page(body: bytes) -> bool:
    return body.lstrip()[:7] in (b"# HELP ", b"# TYPE ")


def _imported_page(body: bytes, source: _Source) -> Imported:
    """One page of /metrics as it was answered; its time is that of the file."""
    line = {"unix_ns": source.modified_unix_ns, "text": body.decode("utf-8", "replace")}
    lines = Lines.of(source.name, "the page", line)
    samples = scrape_file.read(lines, source.known_profiles())
    return Imported("scrapes", "prometheus-text", samples=samples, counts=lines.counts, problems=lines.problems)
