"""What all targets told, handed over together: one transaction of the store for a hundred of them costs little more than one for one.

Bounded: while the store takes nothing, the oldest reading is lost for each new one, and its target says so.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from phasewise.collector.exposition import Exposition
from phasewise.collector.scraping.target import Target

LOG = logging.getLogger("phasewise.collector.scrape")
GATHER_S = 0.2  # a reading waits that long for others; it is promised to be seen within 2 s
MOST = 2048
_REASON = 200  # characters


class Outbox:
    """on_samples gets a list of expositions; what it raises is noted with the targets, and nothing ends."""

    def __init__(
        self, on_samples: Callable[[list[Exposition]], object], gather_s: float = GATHER_S, most: int = MOST
    ) -> None:
        self._on_samples = on_samples
        self._gather_s = gather_s
        self._most = most
        self._waiting: deque[tuple[Target, Exposition]] = deque()
        self._lock = threading.Lock()
        self._some = threading.Event()

    def put(self, target: Target, found: Exposition) -> None:
        """Called by many threads."""
        with self._lock:
            if len(self._waiting) >= self._most:
                lost, _ = self._waiting.popleft()
                lost.not_stored = "the store is too slow: a reading was given up"
            self._waiting.append((target, found))
            self._some.set()

    def run(self, stopping: threading.Event) -> None:
        """Until told to stop; what waits then is still handed over."""
        while not stopping.is_set():
            if self._some.wait(self._gather_s):
                stopping.wait(self._gather_s)
                self.flush()
        self.flush()

    def flush(self) -> None:
        """Hand over what waits now. Lost where it cannot be stored; the writer's health says why."""
        with self._lock:
            self._some.clear()
            batch = list(self._waiting)
            self._waiting.clear()
        if not batch:
            return
        try:
            self._on_samples([found for _, found in batch])
        except Exception as error:
            if not all(target.not_stored for target, _ in batch):
                LOG.warning("samples of %d targets are lost: %s: %s", len(batch), type(error).__name__, error)
            told = str(error)[:_REASON]
        else:
            told = ""
        for target, _ in batch:
            target.not_stored = told
