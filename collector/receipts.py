"""What the receiving process counts, so that every loss is visible: `DIR/receive.json`, shown on the data-health page.

For spans and metric points alike: received = stored + sum(rejected) + sum(refused) + in_flight, at all times. Requests that
could not be read hold an unknown number of items; they are counted as requests.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from phasewise.collector.journal import Kind


class _Items:
    """Counts of one kind of row."""

    def __init__(self) -> None:
        self.received = 0
        self.stored = 0
        self.in_flight = 0
        self.rejected: Counter[str] = Counter()  # by reason: can never be kept; the sender was told not to resend
        self.refused: Counter[str] = Counter()  # by reason: cannot be kept now; the sender was told to retry
        self.warned: Counter[str] = Counter()  # kept, but changed
        self.redacted: Counter[str] = Counter()  # values removed before the disk

    def facts(self) -> dict[str, object]:
        return {
            "received": self.received,
            "stored": self.stored,
            "in_flight": self.in_flight,
            "rejected": dict(self.rejected),
            "refused": dict(self.refused),
            "warned": dict(self.warned),
            "redacted": dict(self.redacted),
        }


class Receipts:
    """The counters of one process; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[Kind, _Items] = {"spans": _Items(), "metrics": _Items()}
        self._requests: Counter[str] = Counter()  # by outcome, as in the reply table of the documentation
        self._bytes = 0
        self._last_stored_unix_ns: int | None = None

    def request(self, outcome: str, count: int = 1) -> None:
        """A request ended: ok, partial, empty, malformed, too_large, refused_<why>, bad_request, slow, unsupported_signal,
        internal; unread: a gRPC call without a message, cancelled or over the size limit, which gRPC itself refuses.
        `cancelled` comes on top where the sender did not wait for that end."""
        with self._lock:
            self._requests[outcome] += count

    def scanned(
        self,
        kind: Kind,
        rows: int,
        body_bytes: int,
        rejected: Mapping[str, int],
        warned: Mapping[str, int],
        redacted: Mapping[str, int],
    ) -> None:
        """A request was read: `rows` are on their way to the disk."""
        with self._lock:
            items = self._items[kind]
            items.received += rows + sum(rejected.values())
            items.in_flight += rows
            items.rejected.update(rejected)
            items.warned.update(warned)
            items.redacted.update(redacted)
            self._bytes += body_bytes

    def stored(self, kind: Kind, rows: int, unix_ns: int) -> None:
        with self._lock:
            self._items[kind].in_flight -= rows
            self._items[kind].stored += rows
            self._last_stored_unix_ns = unix_ns

    def refused(self, kind: Kind, rows: int, reason: str) -> None:
        with self._lock:
            self._items[kind].in_flight -= rows
            self._items[kind].refused[reason] += rows

    def facts(self) -> dict[str, object]:
        """All counters as JSON values."""
        with self._lock:
            return copy.deepcopy(
                {
                    **{kind: items.facts() for kind, items in self._items.items()},
                    "requests": dict(self._requests),
                    "body_bytes": self._bytes,
                    "last_stored_unix_ns": self._last_stored_unix_ns,
                }
            )


def write_json(path: Path, facts: Mapping[str, object]) -> None:
    """Replace the file as a whole: a reader sees the old or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)
