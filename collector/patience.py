"""How long whoever asks is ready to wait for an answer, which may take several queries, and whether they still want it."""

from __future__ import annotations

import threading
import time

from phasewise.rules.errors import Cancelled, TooSlow

PAGE_LIMIT_S = 15.0  # somebody sits at a page
REPORT_LIMIT_S = 120.0  # a command or a report


class Patience:
    """`limit_s` seconds from now for all queries of one answer together. May be shared between threads."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stops what runs under it and refuses what would follow."""
        self._cancelled.set()

    @property
    def over(self) -> bool:
        return self._cancelled.is_set() or time.monotonic() >= self._until

    def check(self) -> None:
        """Raises Cancelled or TooSlow once it is over."""
        if self._cancelled.is_set():
            raise Cancelled
        if self.over:
            raise TooSlow(self.limit_s)
