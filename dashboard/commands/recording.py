"""Recorded telemetry: read from `dashboard/samples`, moved in time, made distinguishable from live traffic.

The format stands in `dashboard/samples/README.md`. Everything here is a function of its arguments but `load`.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

NAMES = ("vllm-overload", "vllm-kv-starvation")
DATASET = "phasewise.dataset"
DATASET_FACTS = "phasewise.dataset.facts"
_TIME_LINE = re.compile(r"^((?:process_start_time_seconds|\w+_created)(?:\{[^}]*\})? )(\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class Traces:
    """One OTLP request body as it came in."""

    unix_ns: int
    transport: str  # http or grpc
    body: bytes


@dataclass(frozen=True, slots=True)
class Scrape:
    """One read of /metrics."""

    unix_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a recording; `expect` is what a verdict must say (field to allowed values)."""

    name: str
    title: str
    engine: str
    machine: str
    model: str
    settings: str
    load: str
    recorded: str
    requests: int
    bottleneck: str
    expect: Mapping[str, tuple[str, ...]]

    @property
    def badge(self) -> str:
        """One line that tells a replay from live traffic."""
        return f"recorded {self.recorded}: {self.engine} on {self.machine}, {self.model}, {self.requests} requests"

    @property
    def text(self) -> str:
        """What travels with the data and is shown wherever its rows are: JSON. The known answer does not travel."""
        told = {name: getattr(self, name) for name in ("engine", "machine", "model", "load", "requests", "badge")}
        return json.dumps(told)


@dataclass(frozen=True, slots=True)
class Recording:
    """Facts, and events in the order of time."""

    facts: Facts
    events: tuple[Traces | Scrape, ...]

    @property
    def from_unix_ns(self) -> int:
        return self.events[0].unix_ns

    @property
    def to_unix_ns(self) -> int:
        return self.events[-1].unix_ns


def load(name: str) -> Recording:
    """A packaged recording."""
    folder = resources.files("phasewise.dashboard.samples")
    told = json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"))
    told["expect"] = {key: tuple(allowed) for key, allowed in told["expect"].items()}
    lines = gzip.decompress(folder.joinpath(f"{name}.jsonl.gz").read_bytes()).decode().splitlines()
    return Recording(Facts(**told), tuple(_events(lines)))


def _events(lines: list[str]) -> Iterator[Traces | Scrape]:
    """Rebuilds the scrapes, which are kept as changed lines."""
    page: list[str] = []
    for line in lines:
        told = json.loads(line)
        if "traces" in told:
            yield Traces(told["unix_ns"], told["transport"], base64.b64decode(told["traces"]))
            continue
        if "scrape" in told:
            page = told["scrape"].split("\n")
        for number, text in told.get("changed", {}).items():
            page[int(number)] = text
        yield Scrape(told["unix_ns"], "\n".join(page))


def replayed(body: bytes, shift_ns: int, salt: bytes, resource_attributes: Mapping[str, str]) -> bytes:
    """The same traces at another time under other ids.

    shift_ns is added to every span and event time; ids are combined with the 16 bytes of salt, so that a second replay is not
    taken for a resend of the first; resource attributes are set (or replaced) on every resource.
    """
    request = ExportTraceServiceRequest.FromString(body)
    for group in request.resource_spans:
        kept = [attribute for attribute in group.resource.attributes if attribute.key not in resource_attributes]
        del group.resource.attributes[:]
        group.resource.attributes.extend(kept)
        for key, value in resource_attributes.items():
            added = KeyValue(key=key)
            added.value.string_value = value
            group.resource.attributes.append(added)
        for scope in group.scope_spans:
            for span in scope.spans:
                _move(span, shift_ns, salt)
    return request.SerializeToString()


def _move(span: Span, shift_ns: int, salt: bytes) -> None:
    span.start_time_unix_nano += shift_ns
    span.end_time_unix_nano += shift_ns
    for event in span.events:
        event.time_unix_nano += shift_ns
    span.trace_id = _salted(span.trace_id, salt)
    span.span_id = _salted(span.span_id, salt)
    span.parent_span_id = _salted(span.parent_span_id, salt)
    for link in span.links:
        link.trace_id = _salted(link.trace_id, salt)
        link.span_id = _salted(link.span_id, salt)


def _salted(identifier: bytes, salt: bytes) -> bytes:
    """Empty stays empty: a root keeps having no parent."""
    return bytes(a ^ b for a, b in zip(identifier, salt, strict=False))


def instance_of(body: bytes) -> str | None:
    """The engine process that sent a body, as its resource names it."""
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        for attribute in group.resource.attributes:
            if attribute.key == "service.instance.id":
                return attribute.value.string_value
    return None


def moved_page(text: str, shift_ns: int) -> str:
    """A metrics page whose own times (start of the process, creation of counters) are moved too."""
    return _TIME_LINE.sub(lambda match: f"{match[1]}{float(match[2]) + shift_ns / 1e9!r}", text)


def scrape_line(unix_ns: int, text: str, instance: str) -> bytes:
    """One line of the format of `ingest --scrapes`."""
    return json.dumps({"unix_ns": unix_ns, "text": text, "instance": instance}).encode() + b"\n"
