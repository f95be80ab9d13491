"""Clients that offer many times what the server can take, cheaply: bodies of thousands of spans that are made unique in place, plain
sockets, and an account that holds millions of ids. Who was refused sends the head of the request again, and its body where that is not
refused at once, as the server means it: what is too much is refused unread."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from otlp_messages import span_message, trace_request
from span_ledger import ANSWERED, Ledger, settle

from phasewise.collector.journal import JournalReader
from phasewise.collector.store import Store

BODY_SPANS = 2048
REFUSED_WITHIN_S = 0.2  # that one who comes again waits for the refusal before it sends all it has
_TEXT = "x" * 1800  # under the limit of a value: a body of 4 MiB, so that few spans are much to hold
_HEAD = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\ncontent-length: %d\r\n\r\n"
Ids = NDArray[np.uint64]


class Template:
    """A request of vLLM's spans, and where in it the ids stand."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        ids = [draw.bytes(24) for _ in range(BODY_SPANS)]
        values = ANSWERED | {"text": _TEXT}
        end = time.time_ns()
        spans = [
            span_message(
                values,
                trace_id=one[:16],
                span_id=one[16:],
                start_time_unix_nano=end - 500_000_000,
                end_time_unix_nano=end,
            )
            for one in ids
        ]
        body = trace_request(*spans, resource={"service.name": "vllm-server"}).SerializeToString()
        self.data = np.frombuffer(body, np.uint8)
        self._traces = self._places([one[:16] for one in ids])
        self._spans = self._places([one[16:] for one in ids])

    def _places(self, needles: list[bytes]) -> NDArray[np.int64]:
        body, at, found = self.data.tobytes(), 0, []
        for needle in needles:  # they stand in this order
            at = body.index(needle, at)
            found.append(at)
        return np.array(found)[:, None] + np.arange(len(needles[0]))

    def drawn(self, draw: np.random.Generator) -> Content:
        """What makes a request of its own of it: ids that were never sent before."""
        return Content(draw.integers(1, 256, (BODY_SPANS, 16), np.uint8), draw.integers(1, 256, (BODY_SPANS, 8), np.uint8))  # fmt: skip

    def filled(self, content: Content) -> bytes:
        body = self.data.copy()
        body[self._traces] = content.traces
        body[self._spans] = content.spans
        return body.tobytes()


@dataclass(frozen=True)
class Content:
    """The ids of a request, byte by byte: all that is kept of one that waits to be sent again."""

    traces: NDArray[np.uint8]
    spans: NDArray[np.uint8]

    @property
    def ids(self) -> Ids:
        return self.spans.view(">u8").ravel().astype(np.uint64)


@dataclass
class Phase:
    """What was answered while it lasted."""

    seconds: float = 0.0
    acknowledged: int = 0  # spans
    refused: int = 0  # requests
    unknown: int = 0  # requests without an answer that says
    hinted: int = 0  # refusals that say when to come again
    acknowledged_s: list[float] = field(default_factory=list)

    @property
    def spans_per_s(self) -> float:
        return self.acknowledged / self.seconds

    @property
    def offered_per_s(self) -> float:
        """Spans in all requests that were made, also again."""
        return (self.acknowledged + (self.refused + self.unknown) * BODY_SPANS) / self.seconds

    def add(self, other: Phase) -> None:
        self.seconds += other.seconds
        self.acknowledged += other.acknowledged
        self.refused += other.refused
        self.unknown += other.unknown
        self.hinted += other.hinted
        self.acknowledged_s += other.acknowledged_s


class Crowd:
    """Connections over HTTP to one port, each with bodies of its own, and every id they sent."""

    def __init__(self, port: int, connections: int, seed: int) -> None:
        self._port = port
        self._template = Template()
        self.body_bytes = len(self._template.data)
        self._draws = [np.random.default_rng((seed, number)) for number in range(connections)]
        self._pending: list[Content | None] = [None] * connections  # refused, to be sent again
        self._lock = threading.Lock()
        self.sent: list[Ids] = []
        self.acknowledged: list[Ids] = []

    @contextlib.contextmanager
    def sending(self, connections: int, again_s: float, spans_per_s: float | None = None) -> Iterator[Phase]:
        """So many of the connections at once, each the next body after an answer, or in its turn where there is a rate; again_s:
        from one try of who is refused to the next, whatever it was told."""
        phase, stop = Phase(), threading.Event()
        every_s = BODY_SPANS * connections / spans_per_s if spans_per_s else 0.0
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._loop, args=(number, phase, stop, again_s, every_s, began + number * every_s / connections))
            for number in range(connections)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            yield phase
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            phase.seconds = time.monotonic() - began

    def _loop(
        self, number: int, phase: Phase, stop: threading.Event, again_s: float, every_s: float, due_s: float
    ) -> None:
        line = _Line(self._port, self._template)
        refused = False
        while not stop.wait(max(0.0, due_s - time.monotonic())):
            content = self._pending[number] = self._pending[number] or self._drawn(number)
            started = time.monotonic()
            status, hinted = line.post(content, REFUSED_WITHIN_S if refused else 0.0)
            refused = status in (429, 503)
            with self._lock:
                if status == 200:
                    phase.acknowledged += BODY_SPANS
                    phase.acknowledged_s.append(time.monotonic() - started)
                    self.acknowledged.append(content.ids)
                    self._pending[number] = None
                    due_s += every_s
                else:
                    phase.refused += refused
                    phase.unknown += not refused
                    phase.hinted += hinted
            if status != 200:
                stop.wait(started + again_s - time.monotonic())
        line.close()

    def _drawn(self, number: int) -> Content:
        content = self._template.drawn(self._draws[number])
        with self._lock:
            self.sent.append(content.ids)
        return content

    def assert_journal(self, data: Path) -> None:
        """Of a receiver without a store: what was acknowledged is in its journal, once."""
        reader = JournalReader(data / "journal")
        after, parts = None, [np.array([], np.uint64)]
        while entries := reader.read(after):  # in portions: millions of spans with their texts are not for memory
            after = entries[-1].position
            parts += [_numbers(entry.rows.column("span_id").to_pylist()) for entry in entries if entry.kind == "spans"]
        self._assert_there(np.concatenate(parts))

    def _assert_there(self, rows: Ids) -> None:
        found, times = np.unique(rows, return_counts=True)
        assert times.max() == 1, "a span is there twice"
        acknowledged, sent = np.concatenate(self.acknowledged), np.concatenate(self.sent)
        lost = np.setdiff1d(acknowledged, found)
        assert not len(lost), f"{len(lost)} of {len(acknowledged)} acknowledged spans are gone"
        assert not len(np.setdiff1d(found, sent))

    def assert_account(self, data: Path, at_most_s: float, also: Ledger | None = None) -> dict[str, Any]:
        """INV, as span_ledger has it, of these clients and those of another ledger. Returns the counters of the store."""
        if also is not None:
            self.acknowledged.append(_numbers(also.acknowledged))
            self.sent.append(_numbers(also.sent))
        health = settle(data, at_most_s)
        with Store(data / "phasewise.duckdb") as store:
            rows = store.query("SELECT CAST('0x' || span_id AS UBIGINT) AS id FROM requests")["id"].to_numpy()
        self._assert_there(rows)
        counters: dict[str, Any] = health["counters"]
        assert counters["spans"] == len(rows)
        assert health["journal"]["corrupt_gaps"] == 0
        return counters


def _numbers(ids: Collection[str]) -> Ids:
    return np.array([int(one, 16) for one in ids], np.uint64)


class _Line:
    """A connection over HTTP that is kept as long as the server keeps it."""

    def __init__(self, port: int, template: Template) -> None:
        self._port = port
        self._template = template
        self._socket: socket.socket | None = None

    def post(self, content: Content, look_s: float) -> tuple[int, bool]:
        """The status, 0 without one, and whether it says when to come again. look_s: to wait for an answer to the head alone."""
        try:
            connection = self._socket = self._socket or socket.create_connection(("127.0.0.1", self._port), 60.0)
            connection.sendall(_HEAD % len(self._template.data))
            if not look_s or not select.select([connection], [], [], look_s)[0]:
                with contextlib.suppress(ConnectionError):  # it may answer before it has read all
                    connection.sendall(self._template.filled(content))
            status, headers = self._answer(connection)
        except (OSError, ValueError):
            self.close()
            return 0, False
        if b"connection: close" in headers:
            self.close()
        return status, b"retry-after:" in headers

    def _answer(self, connection: socket.socket) -> tuple[int, bytes]:
        """Status and headers in lower case; the body is read. Raises ValueError where it ends before."""
        told = b""
        while b"\r\n\r\n" not in told:
            told += _some(connection)
        headers, _, rest = told.partition(b"\r\n\r\n")
        headers = headers.lower() + b"\r\n"
        length = int(headers.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(rest) < length:
            rest += _some(connection)
        return int(headers.split(b" ", 2)[1]), headers

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _some(connection: socket.socket) -> bytes:
    part = connection.recv(1 << 16)
    if not part:
        raise ValueError("it was closed before the answer was complete")
    return part
