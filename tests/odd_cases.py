"""Sends an odd payload (shared/cases/telemetry) as an exporter would, through the real HTTP front to stored rows and verdicts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from writing import Bench, bench, rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.analyzer.report import request_report, window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.archive import SpanArchive
from phasewise.collector.committer import Committer
from phasewise.collector.intake import Intake
from phasewise.collector.journal import JournalReader
from phasewise.collector.limits import INTAKE_LIMITS
from phasewise.collector.receipts import Receipts
from phasewise.collector.receiver_http import HttpFront
from phasewise.collector.redact import RedactionPolicy

Row = dict[str, Any]


def bodies(case: dict[str, Any]) -> Iterator[tuple[bytes, str]]:
    """Each request's bytes and media type."""
    for request in case["requests"]:
        body = (
            base64.b64decode(request["body_base64"])
            if "body_base64" in request
            else json.dumps(request["body"]).encode()
        )
        if expand := request.get("expand"):
            text = (expand["repeat_text"] * expand["times"]).encode()
            body = body.replace(expand["placeholder"].encode(), text)
        yield body, request.get("content_type", case["transport"]["content_type"])


@dataclass(frozen=True, slots=True)
class Sent:
    """A span as its sender wrote it: ids as text, times in nanoseconds, attribute keys."""

    trace_id: str
    span_id: str
    parent_span_id: str
    start_unix_ns: int
    end_unix_ns: int
    keys: tuple[str, ...]

    @property
    def has_hex_ids(self) -> bool:
        try:
            return len(bytes.fromhex(self.trace_id)) == 16 and len(bytes.fromhex(self.span_id)) == 8
        except ValueError:
            return False


def spans_in(body: bytes, media: str) -> Iterator[Sent]:
    """The spans of an OTLP body, read without the product; none of one that is not OTLP."""
    try:
        if media == "application/json":
            document = json.loads(body.decode("utf-8", "replace"))
        else:
            document = json_format.MessageToDict(ExportTraceServiceRequest.FromString(body))
    except (ValueError, DecodeError):
        return
    for resource in document.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield Sent(
                    trace_id=_hex(span.get("traceId", ""), media),
                    span_id=_hex(span.get("spanId", ""), media),
                    parent_span_id=_hex(span.get("parentSpanId") or "", media),
                    start_unix_ns=int(span.get("startTimeUnixNano", 0)),
                    end_unix_ns=int(span.get("endTimeUnixNano", 0)),
                    keys=tuple(one["key"] for one in span.get("attributes", ())),
                )


def _hex(identifier: str, media: str) -> str:
    """As the sender wrote it; protobuf's own JSON writes bytes in base64."""
    return identifier if media == "application/json" else base64.b64decode(identifier).hex()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the exporter got back. told: the partial success, or the error's status object."""

    status: int
    told: dict[str, Any]

    @property
    def rejected(self) -> int:
        return int(self.told.get("partialSuccess", {}).get("rejectedSpans", 0))

    @property
    def message(self) -> str:
        return str(self.told.get("message") or self.told.get("partialSuccess", {}).get("errorMessage") or "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that one case led to. archived: how many spans are stored; spans: these, by span id; rows: of `requests`, by span id; verdict: of all time; journal_bytes: what the
    case took on the disk; unharmed: whether the front answered an empty request after it."""

    case: dict[str, Any]
    sent: tuple[Sent, ...]
    replies: tuple[Reply, ...]
    cut_reply: Reply
    unharmed: bool
    stored: int
    archived: int
    spans: dict[str, Row]
    rows: dict[str, Row]
    turns: list[Row]
    reports: dict[str, Row]
    verdict: dict[str, Any]
    broken_traces: int
    journal_bytes: int

    @property
    def sent_bytes(self) -> int:
        return sum(len(body) for body, _ in bodies(self.case))

    def about(self, span_id: str) -> Row:
        """The row that tells of a span: its own, or that of the one call below it."""
        if span_id in self.rows:
            return self.rows[span_id]
        parent = {name: span["parent_span_id"] for name, span in self.spans.items()}
        below = []
        for name, row in self.rows.items():
            above: str | None = name
            while above is not None and above != span_id:
                above = parent.get(above)
            below += [row] if above == span_id else []
        (row,) = below
        return row


@contextmanager
def front(b: Bench) -> Iterator[HttpFront]:
    """The application that answers exporters, on the bench's journal."""
    receipts = Receipts()
    committer = Committer(b.journal, receipts, INTAKE_LIMITS.queue_rows, b.clock)
    intake = Intake(committer, receipts, INTAKE_LIMITS, RedactionPolicy(), clock=b.clock)
    try:
        yield HttpFront(intake)
    finally:
        intake.close()
        committer.close()


def post(app: HttpFront, body: bytes, media: str) -> Reply:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:4318") as client:
            return await client.post("/v1/traces", content=body, headers={"content-type": media})

    answer = asyncio.run(ask())
    if answer.headers["content-type"] == "application/json":
        return Reply(answer.status_code, answer.json())
    told = ExportTraceServiceResponse if answer.status_code == 200 else Status
    return Reply(answer.status_code, json_format.MessageToDict(told.FromString(answer.content)))


def in_pieces(case: dict[str, Any]) -> dict[str, Any]:
    """The same case with each span in a request of its own, the last one first."""
    alone = [
        {"resourceSpans": [{**resource, "scopeSpans": [{**scope, "spans": [span]}]}]}
        for request in case["requests"]
        for resource in request["body"]["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    return {**case, "requests": [{"body": body} for body in reversed(alone)]}


def has_links(case: dict[str, Any]) -> bool:
    """Whether spans of the case name parents by ids that are told as they should be."""
    if not all("body" in request for request in case["requests"]):
        return False
    return any(one.parent_span_id and one.has_hex_ids for told in bodies(case) for one in spans_in(*told))


def outcome_of(case: dict[str, Any], folder: Path, pause_s: float = 0.0) -> Outcome:
    """Everything sent in order, with a pause after each request; then an hour passes, so that rows are final."""
    with bench(folder, attribute=attributor(rulebook())) as b, front(b) as app:
        replies, sent = [], []
        for body, media in bodies(case):
            replies.append(post(app, body, media))
            sent += list(spans_in(body, media))
            b.run(pause_s)
        cut_reply = post(app, body[: len(body) // 2], media)
        unharmed = post(app, b"{}", "application/json").status == 200
        b.run(1.5)
        b.run(3600.0)
        archive = SpanArchive(b.folder)
        names = {row["trace_id"] for entry in JournalReader(b.folder / "journal").read(None) for row in entry.rows.select(["trace_id"]).to_pylist()}  # fmt: skip
        kept = [one for name in sorted(names) for one in archive.trace(name).to_pylist()]
        rows = b.rows()
        window = Window(0, b.clock.now)
        return Outcome(
            case=case,
            sent=tuple(sent),
            replies=tuple(replies),
            cut_reply=cut_reply,
            unharmed=unharmed,
            stored=b.counter("spans"),
            archived=len(kept),
            spans={one["span_id"]: one for one in kept},
            rows={row["span_id"]: row for row in rows},
            turns=b.rows("SELECT * FROM turns"),
            reports={
                row["span_id"]: one for row in rows for one in request_report(b.store, rulebook(), row["request_key"])
            },
            verdict=window_verdict(b.store, rulebook(), window, now_unix_ns=b.clock.now),
            broken_traces=b.counter("broken_traces"),
            journal_bytes=sum(path.stat().st_size for path in (b.folder / "journal").rglob("*") if path.is_file()),
        )
