"""From a finished run of the engine to rows of a store: what the engine itself sends, and what vLLM would have sent.

Both pass the bytes a receiver or a scraper would get (OTLP through the collector's scan, /metrics text through its reader), so
that a run in memory and a run over sockets end in the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.scan import scan_traces
from phasewise.collector.writer import Writer
from phasewise.instrumented_engine import vllm_view
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.request_telemetry import request_telemetry
from phasewise.instrumented_engine.telemetry import Value, export_request, request_spans, step_spans

MESSAGE_SPANS = 16_384  # of one OTLP message; a request's tree is not divided among two


@dataclass(frozen=True, slots=True)
class Sender:
    """The engine process behind a run. resource: attributes of the process; model: as its spans name it; marks: attributes that
    tell the run from live traffic."""

    instance: str
    model: str
    version: str
    marks: Mapping[str, Value] = field(default_factory=dict)

    @property
    def resource(self) -> Mapping[str, Value]:
        return {
            "service.name": "phasewise-engine",
            "service.instance.id": self.instance,
            "service.version": self.version,
            **self.marks,
        }


def ended_ns(recording: Recording) -> int:
    """When the last request and the last step had ended."""
    steps = [row[0] + row[1] for row in recording.steps[-1:]]
    return max([*steps, *(one.finished_ns or 0 for one in recording.finished)], default=0)


def messages_of(recording: Recording, sender: Sender) -> Iterator[bytes]:
    """OTLP requests with all that an engine with steps sends: the steps, and each request's tree."""
    return _messages(_sent(recording, sender), sender.resource)


def spans_of(recording: Recording, sender: Sender) -> pa.Table:
    """Rows (SPAN_SCHEMA) of the same. Received at the end."""
    return _scanned(messages_of(recording, sender), ended_ns(recording))


def vllm_spans_of(recording: Recording, instance: str) -> pa.Table:
    """Rows of the spans vLLM would have sent."""
    return _scanned([vllm_view.export(recording, instance).SerializeToString()], ended_ns(recording))


def vllm_samples_of(pages: Iterable[tuple[int, str]], profiles: Profiles, scrape: str) -> list[Exposition]:
    """Samples of pages of /metrics, as (nanoseconds, text). scrape: address of the engine, the name of these samples."""
    found = [read_exposition(text, at, profiles, instance=scrape) for at, text in pages]
    return [one for one in found if one is not None]


def hand_over(writer: Writer, spans: pa.Table, samples: Iterable[Exposition] = ()) -> int:
    """Into a store, attributed; the number of requests written. Samples go first, so that attribution has them at once."""
    ready = list(samples)
    if ready:
        writer.add_samples(ready)
    return writer.add_spans(spans)


def _sent(recording: Recording, sender: Sender) -> Iterator[list[Span]]:
    """Steps first, as the engine's own exporter sends them while the requests still run."""
    trace = hashlib.blake2b(sender.instance.encode(), digest_size=16).digest()
    yield step_spans(trace, 0, recording.telemetry(), recording.kv_blocks_total)
    for sequence in recording.finished:
        yield request_spans(request_telemetry(sequence, model=sender.model, instance=sender.instance))


def _messages(trees: Iterable[list[Span]], resource: Mapping[str, Value]) -> Iterator[bytes]:
    some: list[Span] = []
    for tree in trees:
        some += tree
        if len(some) >= MESSAGE_SPANS:
            yield export_request(resource, some).SerializeToString()
            some = []
    if some:
        yield export_request(resource, some).SerializeToString()


def _scanned(messages: Iterable[bytes], received_unix_ns: int) -> pa.Table:
    tables = []
    for body in messages:
        scanned = scan_traces(body, received_unix_ns)
        assert not scanned.rejected, scanned.first_error  # our own bytes
        tables.append(scanned.rows)
    return pa.concat_tables(tables) if tables else SPAN_SCHEMA.empty_table()
