"""Clients that keep a ledger of every span they sent and what they were told, and the account of it against the store.

The invariant (INV) of every fault test: each span whose request was acknowledged is in the store exactly once, nothing is
there that was never sent, and the counters balance.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import grpc
from otlp_messages import span_message, trace_request
from receive_process import EXPORT
from writing import rulebook

from phasewise.analyzer.attribution import attributor
from phasewise.collector.journal import JournalWriter
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer

Told = Literal["acknowledged", "refused", "rejected", "unknown"]
_BY_STATUS: dict[int, Told] = {200: "acknowledged", 503: "refused", 429: "refused"}
_BY_CODE: dict[Any, Told] = {
    grpc.StatusCode.UNAVAILABLE: "unknown",  # also a connection that broke: told from a refusal by its retry hint
    grpc.StatusCode.INVALID_ARGUMENT: "rejected",
}
SETTLE_S = 60.0


ANSWERED = {  # attributes of a finished request of vLLM
    "gen_ai.latency.e2e": 0.5,
    "gen_ai.latency.time_to_first_token": 0.2,
    "gen_ai.latency.time_in_queue": 0.1,
    "gen_ai.latency.time_in_model_prefill": 0.1,
    "gen_ai.latency.time_in_model_decode": 0.3,
    "gen_ai.usage.prompt_tokens": 100,
    "gen_ai.usage.completion_tokens": 31,
}


@dataclass
class Ledger:
    """What was sent, and what was said of it. Safe to use from any thread."""

    sent: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    answers: Counter[Told] = field(default_factory=Counter)
    acknowledged_s: list[float] = field(
        default_factory=list
    )  # seconds from sending to the reply, of acknowledged requests
    resent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_sent(self, ids: Sequence[str], again: bool) -> None:
        with self._lock:
            self.sent.update(ids)
            self.resent += again

    def note_told(self, ids: Sequence[str], told: Told, seconds: float) -> None:
        with self._lock:
            self.answers[told] += 1
            if told == "acknowledged":
                self.acknowledged.update(ids)
                self.acknowledged_s.append(seconds)


def request_body(spans: int, now_unix_ns: int | None = None, resource: str = "engine-0") -> tuple[bytes, list[str]]:
    """A request of finished vLLM request spans that end about now, and their ids."""
    end = now_unix_ns or time.time_ns()
    made = [
        span_message(
            ANSWERED,
            trace_id=random.randbytes(16),
            span_id=random.randbytes(8),
            start_time_unix_nano=end - 500_000_000,
            end_time_unix_nano=end,
        )
        for _ in range(spans)
    ]
    body = trace_request(*made, resource={"service.name": "vllm-server", "service.instance.id": resource})
    return body.SerializeToString(), [span.span_id.hex() for span in made]


@dataclass
class Sender:
    """One client: sends a request after the other until told to stop, each again until it is acknowledged or given up.

    ports: asked anew for each try, since a server that starts again may have others; wait_s: first pause before a resend,
    doubled each time, as the SDKs do with a second.
    """

    ledger: Ledger
    port: Callable[[], int]
    transport: Literal["grpc", "http"]
    spans: int = 20
    tries: int = 6
    wait_s: float = 0.1
    pause_s: float = 0.0
    timeout_s: float = 5.0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            body, ids = request_body(self.spans)
            for attempt in range(self.tries):
                told = self.send(body, ids, attempt > 0)
                if told in ("acknowledged", "rejected"):
                    break
                if stop.wait(self.wait_s * 2**attempt * random.uniform(0.8, 1.2)):
                    break
            if self.pause_s:
                stop.wait(self.pause_s)

    def send(self, body: bytes, ids: Sequence[str], again: bool = False) -> Told:
        """One try, noted in the ledger."""
        self.ledger.note_sent(ids, again)
        began = time.monotonic()
        told = self._http(body) if self.transport == "http" else self._grpc(body)
        self.ledger.note_told(ids, told, time.monotonic() - began)
        return told

    def _http(self, body: bytes) -> Told:
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=self.timeout_s)
        try:
            connection.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
            status = connection.getresponse().status
            return _BY_STATUS.get(status, "rejected")
        except (OSError, http.client.HTTPException):
            return "unknown"
        finally:
            connection.close()

    def _grpc(self, body: bytes) -> Told:
        with grpc.insecure_channel(f"127.0.0.1:{self.port()}") as channel:
            call: Any = cast(Any, channel).unary_unary(EXPORT.format("trace", "Trace"))
            try:
                call(body, timeout=self.timeout_s)
                return "acknowledged"
            except grpc.RpcError as error:
                failed: Any = error
                hinted = any(key == "google.rpc.retryinfo-bin" for key, _ in failed.trailing_metadata() or ())
                return "refused" if hinted else _BY_CODE.get(failed.code(), "unknown")


@contextmanager
def sending(*senders: Sender) -> Iterator[threading.Event]:
    """All of them at once, until the end."""
    stop = threading.Event()
    threads = [threading.Thread(target=sender.run, args=(stop,)) for sender in senders]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def settle(data: Path, at_most_s: float = SETTLE_S, later_s: float = 0.0) -> dict[str, Any]:
    """Read the journal of a folder that no process has open to its end, as the next start would so many seconds from now;
    the writer's health. Its clock runs ahead by a part of a second a pass, since there is nothing to wait for but time."""
    with JournalWriter(data / "journal"):
        pass  # a torn tail is cut when the receiver starts again
    with Store(data / "phasewise.duckdb") as store:
        rules = rulebook()
        ahead_ns = round(later_s * 1e9)
        writer = Writer(store, data, rules, attributor(rules), clock=lambda: time.time_ns() + ahead_ns)
        until = time.monotonic() + at_most_s
        while True:
            writer.step()
            ahead_ns += round((1.0 if later_s else 0.2) * 1e9)
            health: dict[str, Any] = writer.health()
            provisional = later_s and store.query("SELECT count(*) AS n FROM requests WHERE NOT final")["n"].item()
            if not (health["journal"]["lag_bytes"] or health["open_spans"] or provisional):
                return health
            assert time.monotonic() < until, f"not settled after {at_most_s} s: {health}"


def assert_account(data: Path, ledger: Ledger, at_most_s: float = SETTLE_S) -> dict[str, Any]:
    """INV, for spans that are requests of their own. Returns the counters of the store."""
    health = settle(data, at_most_s)
    with Store(data / "phasewise.duckdb") as store:
        rows = store.query("SELECT span_id, count(*) AS n FROM requests GROUP BY span_id")
    found = dict(rows.iter_rows())
    assert set(found.values()) <= {1}, "a span became two rows"
    lost = ledger.acknowledged - set(found)
    assert not lost, f"{len(lost)} of {len(ledger.acknowledged)} acknowledged spans are gone"
    assert set(found) <= ledger.sent
    counters: dict[str, Any] = health["counters"]
    assert counters.get("spans", 0) == len(found)
    assert health["journal"]["corrupt_gaps"] == 0
    path = data / "receive.json"
    if path.exists():
        told = json.loads(path.read_text())["spans"]
        leaves = told["stored"] + sum(told["rejected"].values()) + sum(told["refused"].values()) + told["in_flight"]
        assert told["received"] == leaves
    return counters
