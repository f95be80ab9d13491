"""The readers of the store: how many at once, and how one is stopped.

DuckDB forgets an interrupt that comes between two statements, so a query that is over is interrupted until it has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from phasewise.collector.patience import Patience
from phasewise.rules.errors import TooBusy

AT_ONCE = 4
MOST_WAITING = 32
_LOOK_EVERY_S = 0.05
_STOPPING_S = 5.0  # an interrupt is heard within milliseconds


class Interruptible(Protocol):
    """A query that runs. interrupt() raises nothing, also when its connection was closed meanwhile."""

    def interrupt(self) -> None: ...


@dataclass(slots=True)
class Readers:
    """`AT_ONCE` queries run, `MOST_WAITING` wait for their turn as long as their patience lasts."""

    _turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))
    _waiting: int = 0
    _running: dict[int, tuple[Interruptible, Patience]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _watcher: threading.Thread | None = None
    _closed: bool = False

    @contextlib.contextmanager
    def turn(self, patience: Patience) -> Iterator[None]:
        """One of the places. Raises TooBusy where too many wait, and what ends the patience."""
        patience.check()
        with self._changed:
            if self._waiting >= MOST_WAITING:
                raise TooBusy(self._waiting)
            self._waiting += 1
        try:
            while not self._turns.acquire(timeout=_LOOK_EVERY_S):
                patience.check()
        finally:
            with self._changed:
                self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    @contextlib.contextmanager
    def watched(self, cursor: Interruptible, patience: Patience) -> Iterator[None]:
        """While inside, the query of the cursor is interrupted once the patience is over."""
        with self._changed:
            self._running[id(cursor)] = (cursor, patience)
            if self._watcher is None and not self._closed:
                self._watcher = threading.Thread(target=self._watch, name="reader-watch", daemon=True)
                self._watcher.start()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._running[id(cursor)]
                self._changed.notify_all()

    def stop(self) -> None:
        """Stops what runs, and waits a moment until it has."""
        with self._changed:
            for _, patience in self._running.values():
                patience.cancel()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, timeout=_STOPPING_S)

    def close(self) -> None:
        """The same for good: nothing may keep the process from ending."""
        self._closed = True
        self.stop()

    def _watch(self) -> None:
        with self._changed:
            while self._running or not self._closed:
                for cursor, patience in self._running.values():
                    if patience.over:
                        cursor.interrupt()
                # Nothing to watch: sleeps until there is.
                self._changed.wait(_LOOK_EVERY_S if self._running else None)
