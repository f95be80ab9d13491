"""A second witness of what was committed: a small file beside the store, written and synced after its commits.

A store whose log was cut short opens without an error and simply holds less. What this file says is compared at the start, so
that such a loss is noticed, told, and read again from the journal. Two slots are written in turn, each with its checksum: a
write that was torn leaves the other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import google_crc32c

from phasewise.collector.transaction import Transaction

WITNESS = "watermark"  # in the data folder
SLOT_BYTES = 256
EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Committed:
    """State of the writer at a commit. number: of the commit; own_rows: rows ever stored that no journal holds (imports, scrapes)."""

    number: int = 0
    unix_ns: int = 0
    own_rows: int = 0
    journal: str = "0:0"

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of text(); of nothing that can be read, the state before the first commit."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls()


class Sidecar:
    """The file at `path`. Not for several threads at once."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._noted_at = -EVERY_S
        self._turn, self.last = self._read()

    def note(self, state: Committed, at_once: bool = False) -> None:
        """Write a state durably, at most once a second unless `at_once`. A disk that refuses only leaves an older witness."""
        if not at_once and self._monotonic() - self._noted_at < EVERY_S:
            return
        self._noted_at = self._monotonic()
        self._turn += 1
        body = json.dumps({"turn": self._turn, "state": asdict(state)}).encode()
        slot = f"{google_crc32c.value(body):08x} ".encode() + body
        assert len(slot) < SLOT_BYTES
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, slot.ljust(SLOT_BYTES - 1) + b"\n", self._turn % 2 * SLOT_BYTES)
                os.fdatasync(descriptor)
                self.last = state
            finally:
                os.close(descriptor)

    def _read(self) -> tuple[int, Committed]:
        found = (0, Committed())
        with contextlib.suppress(OSError):
            data = self._path.read_bytes()
            for start in (0, SLOT_BYTES):
                check, _, body = data[start : start + SLOT_BYTES].rstrip().partition(b" ")
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    if int(check, 16) == google_crc32c.value(body):
                        told = json.loads(body)
                        found = max(found, (int(told["turn"]), Committed(**told["state"])), key=lambda one: one[0])
        return found


class CommitLog:
    """Numbers the writer's commits, in the store with the rows of each and, a little later, in the sidecar beside it."""

    def __init__(self, path: Path) -> None:
        self._sidecar = Sidecar(path)
        self.committed = Committed()
        self._next = Committed()
        self._own_rows = 0

    def recall(self, text: str) -> None:
        """What the store says, when it is read anew."""
        self.committed = self._next = Committed.parse(text)
        self._own_rows = self.committed.own_rows

    def missing(self) -> str:
        """What the store lacks of what was committed once; empty where it lacks nothing."""
        return lost(self._sidecar.last, self.committed)

    def add_own_rows(self, count: int) -> None:
        """Rows of the transaction that is open, which no journal holds."""
        self._own_rows += count

    def store(self, transaction: Transaction, unix_ns: int, journal: str) -> None:
        """Number the transaction that is open."""
        self._next = Committed(self.committed.number + 1, unix_ns, self._own_rows, journal)
        transaction.replace("positions", ("name",), ("name", "position"), [("commit", self._next.text())])

    def commit(self) -> None:
        """That transaction is durable."""
        own = self._next.own_rows != self.committed.own_rows
        self.committed = self._next
        self._sidecar.note(self.committed, at_once=own)

    def catch_up(self) -> None:
        """In idle moments: the last commits of a burst came within a second of the one noted."""
        if self._sidecar.last != self.committed:
            self._sidecar.note(self.committed)


def lost(witness: Committed, store: Committed) -> str:
    """What a store lacks of what was committed once, in words; empty where it lacks nothing."""
    if store.number >= witness.number:
        return ""
    began = f"{_time(store.unix_ns)} to " if store.unix_ns else "up to "
    own = witness.own_rows - store.own_rows
    gone = f"{own} rows of imports and scrapes in them are gone" if own > 0 else "nothing in them came from elsewhere"
    return (
        f"the store lacks its commits {store.number + 1} to {witness.number} ({began}{_time(witness.unix_ns)}): "
        f"what the journal holds from {store.journal} on is stored again, {gone}"
    )


def _time(unix_ns: int) -> str:
    return f"{datetime.fromtimestamp(unix_ns // 10**9, UTC):%Y-%m-%dT%H:%M:%SZ}"
