"""The one thread that writes the journal: it takes all that has piled up, appends it, and syncs once for all of them.

A sync costs what reading several requests does, however little it makes durable. So while several senders of whole batches are at it,
two of them begin GATHER_S apart, or when an entry is full. Whoever sends alone, or span by span, waits for nobody.
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
        self._gathering = False  # what comes now is waited for: no need to say that it came
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
            if not self._gathering or self._rows >= _ENTRY_ROWS:
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
        began_s, several = 0.0, False
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                if several:
                    self._gather(began_s + GATHER_S)
                taken, self._waiting = self._waiting, []
            began_s = time.monotonic()
            try:
                self._commit(taken)
            except Exception as error:  # a bug must not leave senders waiting for ever, nor end this thread
                log.exception("writing the journal failed")
                self._fail([w for w in taken if not w.done.done()], JournalFailed(str(error)))
            with self._changed:
                rows = sum(waiting.rows.num_rows for waiting in taken)
                self._rows -= rows
                several = rows >= _BATCH_ROWS and (len(taken) > 1 or bool(self._waiting))

    def _gather(self, until_s: float) -> None:
        """Wait for more, with `_changed` held, which is let go meanwhile."""
        self._gathering = True
        while not self._closing and self._rows < _ENTRY_ROWS and (left_s := until_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
        self._gathering = False

    def _commit(self, taken: list[_Waiting]) -> None:
        appended: list[_Waiting] = []
        for entry in _entries(taken):
            try:
                # As one batch: many small ones cost writer and reader many times what copying them does.
                rows = pa.concat_tables([waiting.rows for waiting in entry]).combine_chunks()
                self._journal.append(entry[0].kind, rows)
                appended += entry
            except (JournalFull, JournalFailed) as error:
                self._fail(entry, error)
        try:
            self._journal.sync()
        except JournalFailed as error:
            self._fail(appended, error)
            return
        for waiting in appended:
            self._receipts.stored(waiting.kind, waiting.rows.num_rows, self._clock())
            waiting.done.set_result(None)

    def _fail(self, entry: list[_Waiting], error: JournalFull | JournalFailed) -> None:
        reason = "journal_full" if isinstance(error, JournalFull) else "journal_failed"
        for waiting in entry:
            self._receipts.refused(waiting.kind, waiting.rows.num_rows, reason)
            waiting.done.set_exception(error)


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
