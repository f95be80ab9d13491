"""Clients that send more than the server can take, cheaply: bodies of thousands of spans that are made unique in place, and an account
of them that holds millions of ids."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
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
_TEXT = "x" * 1800  # under the limit of a value: a body of 4 MiB, so that few spans are much to hold
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

    def unique(self, draw: np.random.Generator) -> tuple[bytes, Ids]:
        """The body with ids that were never sent before, and those of its spans."""
        body = self.data.copy()
        body[self._traces] = draw.integers(1, 256, (BODY_SPANS, 16), np.uint8)
        ids = draw.integers(1, 256, (BODY_SPANS, 8), np.uint8)
        body[self._spans] = ids
        return body.tobytes(), ids.view(">u8").ravel().astype(np.uint64)


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
        self._pending: list[tuple[bytes, Ids] | None] = [None] * connections  # refused, to be sent again
        self._lock = threading.Lock()
        self.sent: list[Ids] = []
        self.acknowledged: list[Ids] = []

    @contextlib.contextmanager
    def sending(self, connections: int, again_s: float, spans_per_s: float | None = None) -> Iterator[Phase]:
        """So many of the connections at once, each the next body after an answer, or in its turn where there is a rate; again_s:
        until one that was refused comes again, whatever it was told."""
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
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60.0)
        while not stop.wait(max(0.0, due_s - time.monotonic())):
            body, ids = self._pending[number] or self._made(number)
            self._pending[number] = body, ids
            started = time.monotonic()
            status, hinted = _posted(connection, body)
            with self._lock:
                if status == 200:
                    phase.acknowledged += len(ids)
                    phase.acknowledged_s.append(time.monotonic() - started)
                    self.acknowledged.append(ids)
                    self._pending[number] = None
                    due_s += every_s
                else:
                    phase.refused += status in (429, 503)
                    phase.unknown += status not in (429, 503)
                    phase.hinted += hinted
            if status != 200:
                stop.wait(again_s)
        connection.close()

    def _made(self, number: int) -> tuple[bytes, Ids]:
        body, ids = self._template.unique(self._draws[number])
        with self._lock:
            self.sent.append(ids)
        return body, ids

    def assert_journal(self, data: Path) -> None:
        """Of a receiver without a store: what was acknowledged is in its journal, once."""
        entries = JournalReader(data / "journal").read(None, limit=10**9, limit_rows=10**9)
        ids = [entry.rows.column("span_id").to_pylist() for entry in entries if entry.kind == "spans"]
        self._assert_there(np.array([int(one, 16) for part in ids for one in part], np.uint64))

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


def _numbers(ids: set[str]) -> Ids:
    return np.array([int(one, 16) for one in ids], np.uint64)


def _posted(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bool]:
    """The status, 0 without one, and whether it says when to come again."""
    with contextlib.suppress(OSError):  # it may answer before it has read all
        connection.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
    try:
        answer = connection.getresponse()
        hinted = answer.headers.get("retry-after") is not None
        answer.read()
        if answer.headers.get("connection") == "close":
            connection.close()
        return answer.status, hinted
    except (OSError, http.client.HTTPException):
        connection.close()
        return 0, False
