"""The committing thread: one sync for many, order kept, counters right, and no sender left waiting when the disk fails."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pytest
from otlp_messages import RECEIVED_UNIX_NS, span_message, trace_request

from phasewise.collector import committer
from phasewise.collector.committer import Committer, QueueFull
from phasewise.collector.journal import JournalFailed, JournalFull, JournalReader, JournalWriter
from phasewise.collector.receipts import Receipts
from phasewise.collector.scan import scan_traces

T = TypeVar("T")


def rows(*names: str) -> pa.Table:
    request = trace_request(*[span_message(name=name) for name in names])
    return scan_traces(request.SerializeToString(), RECEIVED_UNIX_NS).rows


class Bench:
    """A committer on a real journal; `submit` counts the rows in, as the intake does."""

    def __init__(self, directory: Path, queue_rows: int = 1000, limit_bytes: int | None = None) -> None:
        self.directory = directory
        self.journal = JournalWriter(directory, limit_bytes)
        self.receipts = Receipts()
        self.committer = Committer(self.journal, self.receipts, queue_rows, lambda: RECEIVED_UNIX_NS)

    def submit(self, table: pa.Table) -> None:
        self.receipts.scanned("spans", table.num_rows, 0, {}, {}, {})
        self.committer.submit("spans", table).result(timeout=10)

    def names(self) -> list[str]:
        entries = JournalReader(self.directory).read(None)
        return [name for entry in entries for name in entry.rows["name"].to_pylist()]

    def facts(self) -> dict[str, object]:
        found = self.receipts.facts()["spans"]
        assert isinstance(found, dict)
        return {name: value for name, value in found.items() if value}

    def close(self) -> None:
        self.committer.close()
        self.journal.close()


def test_durable_when_the_future_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit(rows("a", "b"))
    assert bench.names() == ["a", "b"]
    bench.close()
    assert bench.facts() == {"received": 2, "stored": 2}


def test_what_piles_up_shares_an_entry_and_keeps_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    real = os.fdatasync
    entered, go = threading.Event(), threading.Event()

    def held(descriptor: int) -> None:
        entered.set()
        go.wait(10)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", held)
    bench.receipts.scanned("spans", 21, 0, {}, {}, {})
    futures = [bench.committer.submit("spans", rows("first"))]
    assert entered.wait(10)
    futures += [bench.committer.submit("spans", rows(str(i))) for i in range(20)]
    go.set()
    for future in futures:
        future.result(timeout=10)
    bench.close()
    assert bench.names() == ["first", *map(str, range(20))]
    assert len(JournalReader(tmp_path).read(None)) == 2


class Held:
    """The first sync waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self._real, self._entered, self._go = os.fdatasync, threading.Event(), threading.Event()
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, descriptor: int) -> None:
        self.syncs += 1
        self._entered.set()
        self._go.wait(10)
        self._real(descriptor)

    def while_entered(self, work: Callable[[], T]) -> T:
        assert self._entered.wait(10)
        done = work()
        self._go.set()
        return done


def batch(name: str, count: int = 300) -> pa.Table:
    return pa.concat_tables([rows(name)] * count)


def entry_sizes(directory: Path) -> list[int]:
    return [entry.rows.num_rows for entry in JournalReader(directory).read(None)]


def two_wait_behind_a_third(bench: Bench, held: Held) -> list[Future[None]]:
    """Three senders of batches: the first is answered, the others wait for its next one."""
    first = bench.committer.submit("spans", batch("first"))
    others = held.while_entered(lambda: [bench.committer.submit("spans", batch(name)) for name in ("second", "third")])
    first.result(timeout=10)
    return others


def test_batches_of_several_senders_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    bench, held = Bench(tmp_path, queue_rows=10_000), Held(monkeypatch)
    waiting = two_wait_behind_a_third(bench, held)
    assert not any(future.done() for future in waiting)
    waiting.append(bench.committer.submit("spans", batch("fourth")))
    assert all(future.result(timeout=10) is None for future in waiting)
    last = bench.committer.submit("spans", batch("fifth"))  # three are expected, and two stay away
    assert not last.done()
    bench.close()
    assert last.result(timeout=0) is None
    assert entry_sizes(tmp_path) == [300, 900, 300]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_senders_that_wait_for_their_answers_are_not_kept_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Nothing but the next batch of each ends the gathering, and a sync is for many of them."""
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    bench, counted = Bench(tmp_path, queue_rows=100_000), Held(monkeypatch)
    everybody, enough, sent = threading.Barrier(count + 1), threading.Event(), [0] * count
    own = batch("sent")

    def send(number: int) -> None:
        last = bench.committer.submit("spans", own)
        everybody.wait(10)
        with contextlib.suppress(QueueFull):  # it was closed
            while last.result(timeout=20) is None:
                sent[number] += 1
                if min(sent) >= 10:
                    enough.set()
                last = bench.committer.submit("spans", own)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    counted.while_entered(lambda: everybody.wait(10))
    assert enough.wait(20), f"{sent} were answered"
    bench.close()
    for thread in threads:
        thread.join(10)
    assert counted.syncs <= sum(sent) / count + 3, "the first, the last, and one of who came in between"


def test_a_sender_that_stays_away_is_waited_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, held = Bench(tmp_path, queue_rows=10_000), Held(monkeypatch)
    for future in two_wait_behind_a_third(bench, held):
        assert future.result(timeout=10) is None
    bench.close()
    assert entry_sizes(tmp_path) == [300, 600]


def test_senders_that_were_refused_are_not_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were told to come later."""
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    bench, held = Bench(tmp_path, queue_rows=10_000), Held(monkeypatch)
    waiting = two_wait_behind_a_third(bench, held)
    with monkeypatch.context() as patch:
        patch.setattr(bench.journal, "append", refuse)
        waiting.append(bench.committer.submit("spans", batch("fourth")))
        for future in waiting:
            assert isinstance(future.exception(timeout=10), JournalFull)
    bench.submit(batch("fifth"))
    bench.close()
    assert entry_sizes(tmp_path) == [300, 300]


def refuse(kind: str, table: pa.Table) -> None:
    raise JournalFull("no room")


def test_a_full_entry_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    monkeypatch.setattr(committer, "_ENTRY_ROWS", 900)
    bench, held = Bench(tmp_path, queue_rows=10_000), Held(monkeypatch)
    waiting = [*two_wait_behind_a_third(bench, held), bench.committer.submit("spans", batch("fourth"))]
    for future in waiting:
        future.result(timeout=10)
    waiting = [bench.committer.submit("spans", batch(name, count)) for name, count in (("fifth", 300), ("sixth", 600))]
    for future in waiting:
        future.result(timeout=10)
    bench.close()
    assert entry_sizes(tmp_path) == [300, 900, 900]


def back_at_once(bench: Bench, done: Future[None], table: pa.Table) -> Future[None]:
    """What a sender sends in the very moment of its answer; it ends as the first does where it is refused."""
    again: Future[None] = Future()

    def send(_: Future[None]) -> None:
        try:
            bench.receipts.scanned("spans", table.num_rows, 0, {}, {}, {})
            bench.committer.submit("spans", table).add_done_callback(lambda own: again.set_result(own.result()))
        except QueueFull as error:
            again.set_exception(error)

    done.add_done_callback(send)
    return again


def test_who_is_back_at_once_is_one_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    bench, held = Bench(tmp_path, queue_rows=10_000), Held(monkeypatch)
    again = back_at_once(bench, bench.committer.submit("spans", batch("first")), batch("third"))
    second = held.while_entered(lambda: bench.committer.submit("spans", batch("second")))
    assert [future.result(timeout=10) for future in (second, again)] == [None, None]
    bench.close()
    assert entry_sizes(tmp_path) == [300, 600]


def test_what_is_durable_takes_no_room_of_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, held = Bench(tmp_path, queue_rows=30), Held(monkeypatch)
    bench.receipts.scanned("spans", 20, 0, {}, {}, {})
    first = bench.committer.submit("spans", batch("first", 20))
    again = held.while_entered(lambda: back_at_once(bench, first, batch("second", 20)))
    assert again.result(timeout=10) is None
    bench.close()
    assert bench.facts() == {"received": 40, "stored": 40}


@pytest.mark.parametrize("size", [1, 300])
def test_whoever_sends_alone_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    bench = Bench(tmp_path)
    for number in range(4):
        bench.submit(rows(*[str(number)] * size))
    bench.close()
    assert entry_sizes(tmp_path) == [size] * 4


def test_single_spans_of_several_senders_wait_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "GATHER_S", 3600.0)
    bench, held = Bench(tmp_path), Held(monkeypatch)
    bench.committer.submit("spans", rows("first"))
    held.while_entered(lambda: bench.committer.submit("spans", rows("second"))).result(timeout=10)
    bench.submit(rows("third"))
    bench.close()
    assert entry_sizes(tmp_path) == [1, 1, 1]


def test_a_full_queue_refuses_but_never_an_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, queue_rows=3)
    bench.submit(rows(*"abcdef"))
    go = threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (go.wait(10), real(descriptor)))
    bench.receipts.scanned("spans", 4, 0, {}, {}, {})
    waiting = bench.committer.submit("spans", rows("x", "y"))
    with pytest.raises(QueueFull):
        bench.committer.submit("spans", rows("z", "z"))
    go.set()
    waiting.result(timeout=10)
    bench.close()
    assert bench.facts() == {"received": 10, "stored": 8, "refused": {"queue_full": 2}}


def test_a_full_journal_is_told_and_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit_bytes=10)
    with pytest.raises(JournalFull):
        bench.submit(rows("a"))
    bench.close()
    assert bench.facts() == {"received": 1, "refused": {"journal_full": 1}}


def test_a_failing_disk_is_told_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(JournalFailed):
            bench.submit(rows("doubtful"))
    bench.submit(rows("kept"))
    bench.close()
    assert bench.facts() == {"received": 2, "stored": 1, "refused": {"journal_failed": 1}}
    assert bench.names()[-1] == "kept"


def test_a_bug_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(bench.journal, "append", lambda kind, table: 1 / 0)
        with pytest.raises(JournalFailed):
            bench.submit(rows("a"))
    bench.submit(rows("b"))
    bench.close()
    assert bench.names() == ["b"]


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.receipts.scanned("spans", 50, 0, {}, {}, {})
    for i in range(50):
        bench.committer.submit("spans", rows(str(i)))
    bench.close()
    assert bench.names() == list(map(str, range(50)))
    with pytest.raises(QueueFull):
        bench.committer.submit("spans", rows("late"))
