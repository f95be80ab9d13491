"""Where a request is read: what takes a millisecond by the loop itself, what takes longer by a thread."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from otlp_messages import span_message, trace_request

from phasewise.collector import intake
from phasewise.collector.committer import Committer
from phasewise.collector.intake import Body, Intake
from phasewise.collector.journal import JournalReader, JournalWriter, Kind
from phasewise.collector.limits import INTAKE_LIMITS
from phasewise.collector.receipts import Receipts
from phasewise.collector.records import Scanned
from phasewise.collector.redact import RedactionPolicy
from phasewise.collector.scan import scan_traces

BODY = trace_request(span_message(name="one")).SerializeToString()


class Desk:
    """An intake on a real journal that notes which thread reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.journal = JournalWriter(directory)
        self.receipts = Receipts()
        self.committer = Committer(self.journal, self.receipts, INTAKE_LIMITS.queue_rows, time.time_ns)
        self.quick = True
        self.busy_s = 0.0  # of the processor, on top of what reading takes
        self.readers: list[str] = []
        policy = RedactionPolicy()
        self.intake = Intake(
            self.committer, self.receipts, INTAKE_LIMITS, policy, scan=self.scan, is_quick=lambda: self.quick
        )

    def scan(self, body: bytes, received_unix_ns: int) -> Scanned:
        until_s = time.thread_time() + self.busy_s
        while time.thread_time() < until_s:
            pass
        self.readers.append("loop" if threading.current_thread() is threading.main_thread() else "thread")
        return scan_traces(body, received_unix_ns)

    def take(self, *bodies: Body) -> list[str]:
        """The answers."""

        async def all_of_them() -> list[str]:
            return [(await self.intake.take(body)).status for body in bodies]

        return asyncio.run(all_of_them())

    def close(self) -> None:
        self.intake.close()
        self.committer.close()
        self.journal.close()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(intake, "LONG_S", 3600.0)  # the first spans that a process reads take longer
    found = Desk(tmp_path)
    yield found
    found.close()


def test_a_small_request_is_read_by_the_loop_and_durable_when_answered(desk: Desk) -> None:
    assert desk.take(Body("traces", BODY), Body("traces", b"\xff")) == ["ok", "malformed"]
    assert desk.readers == ["loop", "loop"]
    assert [entry.rows["name"].to_pylist() for entry in JournalReader(desk.directory).read(None)] == [["one"]]


def test_what_takes_longer_is_read_by_a_thread(desk: Desk) -> None:
    many = trace_request(*[span_message(name="n" * 2000) for _ in range(400)]).SerializeToString()
    assert len(many) > 512 << 10
    packed = Body("traces", gzip.compress(BODY), encoding="gzip")
    assert desk.take(packed, Body("traces", many)) == ["ok", "ok"]
    desk.quick = False
    assert desk.take(Body("traces", BODY)) == ["ok"]
    assert desk.readers == ["thread"] * 3


def test_odd_spans_hold_up_the_loop_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "THREADS_FOR_S", 3600.0)
    monkeypatch.setattr(intake, "LONG_S", 0.02)
    desk.busy_s = 0.03
    assert desk.take(*[Body("traces", BODY)] * 3) == ["ok"] * 3
    assert desk.readers == ["loop", "thread", "thread"]


def reading_at_once(desk: Desk, bodies: int, busy_s: float) -> int:
    """How many threads read at one moment, at most."""
    lock, reading, most = threading.Lock(), 0, 0

    def scan(body: bytes, received_unix_ns: int) -> Scanned:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        time.sleep(busy_s)
        with lock:
            reading -= 1
        return scan_traces(body, received_unix_ns)

    async def all_of_them() -> list[str]:
        replies = await asyncio.gather(*[one.take(Body("traces", BODY)) for _ in range(bodies)])
        return [reply.status for reply in replies]

    one = Intake(desk.committer, desk.receipts, INTAKE_LIMITS, RedactionPolicy(), scan=scan)
    try:
        assert asyncio.run(all_of_them()) == ["ok"] * bodies
    finally:
        one.close()
    return most


def test_bodies_are_read_one_after_the_other_but_not_behind_a_long_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "TURN_S", 30.0)
    assert reading_at_once(desk, 8, 0.005) == 1
    monkeypatch.setattr(intake, "TURN_S", 0.02)
    assert reading_at_once(desk, 2, 0.2) == 2


def test_rows_that_wait_count_unpacked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes packed is little; what waits for the disk is not."""
    many = trace_request(*[span_message(name="n" * 2000) for _ in range(100)]).SerializeToString()
    packed = Body("traces", gzip.compress(many), encoding="gzip")
    assert len(packed.data) * 10 < len(many)
    limits = replace(INTAKE_LIMITS, queue_bytes=2 * len(many), small_bytes=0)
    desk.intake.close()
    desk.intake = Intake(desk.committer, desk.receipts, limits, RedactionPolicy(), scan=desk.scan)
    waiting: list[Future[None]] = []

    def submit(kind: Kind, rows: pa.Table) -> Future[None]:
        waiting.append(Future())
        return waiting[-1]

    async def three() -> list[str]:
        tasks = [asyncio.create_task(desk.intake.take(packed)) for _ in range(3)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status for task in done] == ["refused"]
        for future in waiting:
            future.set_result(None)
        return sorted([(await task).status for task in tasks])

    with monkeypatch.context() as patched:
        patched.setattr(desk.committer, "submit", submit)
        assert asyncio.run(three()) == ["ok", "ok", "refused"]
    assert desk.take(packed) == ["ok"], "and their room is given back"
    facts = desk.receipts.facts()
    assert facts["requests"] == {"refused_queue_full": 1, "ok": 3}
    assert cast(Any, facts["spans"])["refused"] == {"queue_full": 100}


def test_a_sender_that_goes_leaves_its_spans(desk: Desk) -> None:
    async def go_away() -> None:
        task = asyncio.create_task(desk.intake.take(Body("traces", BODY)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await desk.intake.drain(10)

    asyncio.run(go_away())
    assert desk.receipts.facts()["requests"] == {"ok": 1, "cancelled": 1}
