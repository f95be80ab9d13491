"""The one thread that writes the journal: it takes all that has piled up, appends it, and syncs once for all of them.

A sync costs what reading several requests does, however little it makes durable. Senders of whole batches send their next one when they
are answered: so a commit waits until as many wait as the one before answered or left waiting, but no longer than an entry takes to fill, or
GATHER_S from when that one began. Whoever sends alone, or span by span, waits for nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

from phasewise.collector.journal import JournalFailed, JournalFull, JournalWriter, Kind
from phasewise.collector.receipts import Receipts

log = logging.getLogger("phasewise.receive")
GATHER_S = 0.05
_BATCH_ROWS = 256  # of a commit, from which on it was batches that came together
_ENTRY_ROWS = 8192  # rows of one entry; small requests share one, since an entry has a cost of its own for the reader; larger ones only cost memory


class QueueFull(Exception):
    """More rows wait for the disk than may: the sender should retry."""


@dataclass(slots=True)
class _Waiting:
    kind: Kind
    rows: pa.Table
    done: Future[None] = field(default_factory=Future)
    error: JournalFull | JournalFailed | None = None  # why it is not durable


class Committer:
    """Rows in, durable rows out.

    `submit` never blocks; its future ends when the rows are synced, or with JournalFull or JournalFailed. What is submitted is
    written even if nobody waits for it any more.
    """

    def __init__(self, journal: JournalWriter, receipts: Receipts, queue_rows: int, clock: Callable[[], int]) -> None:
        self._journal = journal
        self._receipts = receipts
        self._queue_rows = queue_rows
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._rows = 0  # waiting or being written
        self._closing = False
        self._gathers = False  # what comes now is waited for: no need to say that it came, before all did
        self._senders = 1  # that are expected to send again at once
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def submit(self, kind: Kind, rows: pa.Table) -> Future[None]:
        """Queue rows (already counted as in flight). Raises QueueFull; rows are let in whenever none wait."""
        waiting = _Waiting(kind, rows)
        waiting.done.set_running_or_notify_cancel()  # from here on it cannot be called back
        with self._changed:
            if self._closing or (self._rows and self._rows + rows.num_rows > self._queue_rows):
                self._receipts.refused(kind, rows.num_rows, "queue_full")
                raise QueueFull
            self._rows += rows.num_rows
            self._waiting.append(waiting)
            if not self._gathers or self._is_gathered():
                self._changed.notify()
        return waiting.done

    def close(self, within_s: float | None = None) -> bool:
        """Write what waits, then end; False where the disk did not answer in that time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began_s = 0.0
        while taken := self._next(began_s):
            began_s = time.monotonic()
            try:
                self._write(taken)
            except Exception as error:  # a bug must not leave senders waiting for ever, nor end this thread
                log.exception("writing the journal failed")
                _fail(taken, JournalFailed(str(error)))
            self._count(taken)
            self._answer(taken)

    def _next(self, began_s: float) -> list[_Waiting]:
        """What is to be written now; nothing once it is closed. began_s: when the commit before began, on the monotonic clock."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            self._gathers = True
            while not self._is_gathered() and (left_s := began_s + GATHER_S - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._gathers = False
            taken, self._waiting = self._waiting, []
            return taken

    def _is_gathered(self) -> bool:
        return self._closing or len(self._waiting) >= self._senders or self._rows >= _ENTRY_ROWS

    def _write(self, taken: list[_Waiting]) -> None:
        """Make it durable, or say in each why it is not."""
        appended: list[_Waiting] = []
        for entry in _entries(taken):
            try:
                # As one batch: many small ones cost writer and reader many times what copying them does.
                rows = pa.concat_tables([waiting.rows for waiting in entry]).combine_chunks()
                self._journal.append(entry[0].kind, rows)
                appended += entry
            except (JournalFull, JournalFailed) as error:
                _fail(entry, error)
        try:
            self._journal.sync()
        except JournalFailed as error:
            _fail(appended, error)

    def _count(self, taken: list[_Waiting]) -> None:
        """Before the answers: who has one may be back at once, and would be counted twice."""
        rows = sum(waiting.rows.num_rows for waiting in taken)
        durable = sum(waiting.error is None for waiting in taken)
        with self._changed:
            self._rows -= rows
            self._senders = durable + len(self._waiting) if rows >= _BATCH_ROWS else 1

    def _answer(self, taken: list[_Waiting]) -> None:
        for waiting in taken:
            if waiting.error is None:
                self._receipts.stored(waiting.kind, waiting.rows.num_rows, self._clock())
                waiting.done.set_result(None)
            else:
                reason = "journal_full" if isinstance(waiting.error, JournalFull) else "journal_failed"
                self._receipts.refused(waiting.kind, waiting.rows.num_rows, reason)
                waiting.done.set_exception(waiting.error)


def _fail(taken: list[_Waiting], error: JournalFull | JournalFailed) -> None:
    for waiting in taken:
        waiting.error = waiting.error or error


def _entries(taken: list[_Waiting]) -> list[list[_Waiting]]:
    """What shares an entry: neighbours of one kind, up to _ENTRY_ROWS; the order of arrival stays within a kind."""
    entries: list[list[_Waiting]] = []
    rows = 0
    for waiting in sorted(taken, key=lambda w: w.kind):
        if not entries or entries[-1][0].kind != waiting.kind or rows + waiting.rows.num_rows > _ENTRY_ROWS:
            entries.append([])
            rows = 0
        entries[-1].append(waiting)
        rows += waiting.rows.num_rows
    return entries
