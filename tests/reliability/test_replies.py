"""What a sender is told, over gRPC and HTTP: the table of docs/reliability.md, row for row (F06, F19, F25, F26, S03 to S05)."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from otlp_messages import span_message, trace_request
from receive_process import Receiving, receiving
from shared_data import ROOT
from waiting import wait_for

from phasewise.collector.access_keys import KeyFile, new_key
from phasewise.collector.limits import INTAKE_LIMITS, MIB

pytestmark = pytest.mark.live
PROTOBUF = "application/x-protobuf"
KEYS: dict[str, str] = {}
EXPECTED: Counter[str] = Counter()
Retry = Literal["yes", "no", "must not"]
Transport = Literal["grpc", "http"]
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """With keys, and with faults at will. At the end every span has been accounted for."""
    data = tmp_path_factory.mktemp("replies")
    for name, scopes in (("sender", ("ingest",)), ("reader", ("read",)), ("fast", ("ingest",))):
        key, KEYS[name] = new_key(scopes, now_unix_ns=time.time_ns())
        KeyFile(data).add(key)
    with receiving(data, program=(str(ROOT / "tests" / "faulty_receiver.py"),)) as process:
        yield process
        assert process.process.poll() is None, "the process did not survive"
        told = process.counters()["spans"]
        lost = sum(told["rejected"].values()) + sum(told["refused"].values())
        assert told["received"] == told["stored"] + lost + told["in_flight"]
        assert (told["in_flight"], told["stored"]) == (0, len(process.stored()))


@dataclass(frozen=True)
class Row:
    """One condition: what meets it, and the answer. http 0: the sender is gone; outcome: the counter in `requests` of receive.json,
    or one for each transport."""

    condition: str
    code: grpc.StatusCode | None
    http: int
    retry: Retry
    outcome: str | tuple[str, str]
    span: str = ""  # its name
    body: bytes | None = None
    key: str = "sender"
    headers: tuple[tuple[str, str], ...] = ()
    path: str = "/v1/traces"
    method: str = "POST"
    rejected: int = 0
    message: str = ""
    hint: bool = field(default=False)

    def request(self) -> bytes:
        return (
            trace_request(span_message(name=self.span or "fine")).SerializeToString()
            if self.body is None
            else self.body
        )

    @property
    def line(self) -> str:
        """As the documentation has it."""
        code = "n/a" if self.code is None else self.code.name + (" + RetryInfo" if self.hint else "")
        http = (str(self.http) if self.http else "closed") + (" + Retry-After" if self.hint else "")
        both = (self.outcome,) if isinstance(self.outcome, str) else dict.fromkeys(self.outcome)
        return f"| {self.condition} | {code} | {http} | {self.retry} | {', '.join(f'`{one}`' for one in both)} |"


STORED = trace_request(span_message(name="twice")).SerializeToString()
PARTLY = trace_request(span_message(), span_message(span_id=bytes(8))).SerializeToString()
CHANGED = trace_request(span_message({"long": "x" * 5000})).SerializeToString()
LOGS = ExportLogsServiceRequest()
LOGS.resource_logs.add().scope_logs.add().log_records.add()
TOO_MUCH = bytes(INTAKE_LIMITS.request_bytes + MIB)
OK, LATER = Code.OK, Code.UNAVAILABLE
UNKNOWN_PATH = "/v1/nothing"

ROWS = [
    Row("stored", OK, 200, "no", "ok", body=STORED),
    Row("the same again (the store counts it as a duplicate)", OK, 200, "no", "ok", body=STORED),
    Row("some spans can never be kept", OK, 200, "must not", "partial", body=PARTLY, rejected=1, message="1 spans refused"),
    Row("stored, but changed (said once a minute)", OK, 200, "no", "ok", body=CHANGED, message="stored, but changed"),
    Row("nothing in it", OK, 200, "no", "empty", body=b""),
    Row("log records that are not kept", OK, 200, "must not", "unsupported_signal", body=LOGS.SerializeToString(), path="/v1/logs", rejected=1, message="not kept"),
    Row("cannot be read", Code.INVALID_ARGUMENT, 400, "no", "malformed", body=b"\xff" * 50),
    Row("over 64 MiB, packed or not", Code.RESOURCE_EXHAUSTED, 413, "no", ("unread", "too_large"), body=TOO_MUCH),
    Row("too much waits to be written", LATER, 503, "yes", "refused_queue_full", span="queue-full", hint=True),
    Row("the journal or its disk is full", LATER, 503, "yes", "refused_journal_full", span="journal-full", hint=True),
    Row("the disk fails", LATER, 503, "yes", "refused_journal_failed", span="journal-failed", hint=True),
    Row("the receiver is stopping", LATER, 503, "yes", "refused_draining", span="draining", hint=True),
    Row("no key, or a wrong one", Code.UNAUTHENTICATED, 401, "no", "unauthenticated", key=""),
    Row("a key without the scope `ingest`", Code.PERMISSION_DENIED, 403, "no", "forbidden", key="reader"),
    Row("unknown path or method name", Code.UNIMPLEMENTED, 404, "no", "bad_request", path=UNKNOWN_PATH),
    Row("another HTTP method", None, 405, "no", "bad_request", method="PUT"),
    Row("another content type", None, 415, "no", "bad_request", headers=(("content-type", "text/plain"),)),
    Row("another content encoding", None, 415, "no", "bad_request", headers=(("content-encoding", "zstd"),)),
    Row("a fault of ours (with an id that is in the log)", Code.INTERNAL, 500, "no", "internal", span="bug", message="internal error"),
    Row("the sender goes before its answer (what is under way is stored)", Code.DEADLINE_EXCEEDED, 0, "yes", ("cancelled", "ok"), span="slow"),
    Row("a key sends more than 15 MB/s", LATER, 429, "yes", "refused_rate", key="fast", hint=True),
]  # fmt: skip


@dataclass
class Told:
    code: Any
    hint_s: float | None
    message: str
    rejected: int = 0
    headers: dict[str, str] = field(default_factory=dict)


def partial(body: bytes, path: str) -> tuple[int, str]:
    if path == "/v1/logs":
        logs = ExportLogsServiceResponse.FromString(body).partial_success
        return logs.rejected_log_records, logs.error_message
    told = ExportTraceServiceResponse.FromString(body).partial_success
    return told.rejected_spans, told.error_message


def by_http(running: Receiving, row: Row) -> Told:
    body = row.request()
    headers = {"content-type": PROTOBUF, **dict(row.headers)}
    if row.key:
        headers["authorization"] = f"Bearer {KEYS[row.key]}"
    if not row.http:
        head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "content-length": str(len(body))}.items())
        with socket.create_connection(("127.0.0.1", running.http_port)) as connection:
            connection.sendall(f"POST {row.path} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + body)
            time.sleep(0.2)
        return Told(0, None, "")
    answer = running.ask(row.method, row.path, body, headers)
    hint = answer.headers.get("retry-after")
    seconds = float(hint) if hint else None
    if answer.status == 200:
        rejected, message = partial(answer.body, row.path)
        return Told(200, seconds, message, rejected)
    return Told(answer.status, seconds, Status.FromString(answer.body).message if answer.headers["content-type"] == PROTOBUF else "a text", headers=answer.headers)  # fmt: skip


def by_grpc(running: Receiving, row: Row) -> Told:
    service = {"/v1/logs": "Logs", UNKNOWN_PATH: "Nothing"}.get(row.path, "Trace")
    metadata = (("authorization", f"Bearer {KEYS[row.key]}"),) if row.key else ()
    try:
        body = running.export(row.request(), service, timeout_s=0.3 if row.span == "slow" else 30, metadata=metadata)
    except grpc.RpcError as error:
        raised: Any = error
        trailers = dict(raised.trailing_metadata() or ())
        packed = trailers.get("google.rpc.retryinfo-bin")
        hint = RetryInfo.FromString(packed).retry_delay if packed else None
        if hint:
            assert Status.FromString(trailers["grpc-status-details-bin"]).details
        return Told(raised.code(), hint.seconds + hint.nanos / 1e9 if hint else None, raised.details())
    rejected, message = partial(body, row.path)
    return Told(Code.OK, None, message, rejected)


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.condition))
def test_the_answer(running: Receiving, row: Row, transport: Transport) -> None:
    if transport == "grpc" and row.code is None:
        return  # gRPC has no such request
    outcome = row.outcome if isinstance(row.outcome, str) else row.outcome[transport == "http"]
    if row.key == "fast":  # beyond its burst, by seconds
        spent = running.post(bytes(60 * MIB), authorization=f"Bearer {KEYS['fast']}").status
        EXPECTED["malformed" if spent == 400 else "refused_rate"] += 1
    told = (by_grpc if transport == "grpc" else by_http)(running, row)
    assert told.code == (row.code if transport == "grpc" else row.http)
    assert (told.hint_s is not None) == row.hint
    assert told.hint_s is None or 1 <= told.hint_s <= 8  # over it the Python exporters give up
    assert told.rejected == row.rejected
    if row.message.startswith("stored, but") and transport == "http":
        assert told.message == ""  # said a moment ago
    else:
        assert row.message in told.message
        assert bool(told.message) == bool(row.message or told.code not in (OK, 200, 0))
    if outcome == "cancelled":  # on top of how the request itself ended
        EXPECTED["ok"] += 1
    EXPECTED[outcome] += 1
    if told.code == 405:
        assert told.headers["allow"] == "POST"


def test_each_answer_was_counted(running: Receiving) -> None:
    """And F19: both of the spans whose senders went are stored."""
    wait_for(lambda: running.counters()["requests"] == EXPECTED)  # the one whose sender went is stored a moment later
    assert running.counters()["requests"] == EXPECTED
    assert sum(row["name"] == "slow" for row in running.stored()) == 2 * EXPECTED["cancelled"]


def test_the_documentation_has_this_table() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = re.search(r"^\| condition \|.*?\n\n", text, re.M | re.S)
    assert table
    assert table.group().strip().splitlines()[2:] == [row.line for row in ROWS]
