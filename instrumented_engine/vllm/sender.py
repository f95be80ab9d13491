"""Between vLLM's event loop and the exporter: a bounded queue and a thread. Nothing here waits for, or breaks, the engine.

The engine's side is one comparison and one append; the reading of an answer, the building of spans and the sending are the
thread's. What finds no room, and what goes wrong, is counted. A forked child begins with an empty queue and a thread of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phasewise.instrumented_engine.vllm.facts import EngineFacts
from phasewise.instrumented_engine.vllm.readings import Reading, Step, StepReader, Unnamed, finished_of
from phasewise.instrumented_engine.vllm.settings import Settings
from phasewise.instrumented_engine.vllm.wire import Draft, request_draft, step_drafts

if TYPE_CHECKING:
    from phasewise.instrumented_engine.vllm.export import Export

_log = logging.getLogger("vllm.plugins.phasewise")  # below `vllm`, whose handler writes it like vLLM's own lines
_TELL_S = 60.0  # at most that often is said what was lost
_SUPPRESS = (
    "suppress_instrumentation"  # of opentelemetry's context: an instrumented HTTP client would trace its own exports
)


@dataclass(frozen=True, slots=True)
class Counts:
    """sent, failed: spans that the receiver took, and that it did not; dropped: answers of the engine that found the queue full;
    refused: answers that could not be queued; unnamed: answers whose finished requests have no id in this release of vLLM; errors:
    exceptions swallowed, `error` the last."""

    sent: int = 0
    failed: int = 0
    dropped: int = 0
    refused: int = 0
    unnamed: int = 0
    errors: int = 0
    error: str = ""


_LOST = {
    "failed": "spans not taken by the receiver",
    "dropped": "answers of the engine dropped, the queue being full",
    "refused": "answers of the engine not queued",
    "unnamed": "answers with finished requests that have no id in this release of vLLM",
    "errors": "errors",
}


class Sender:
    """One engine's. `open_export` is called in the thread, at the first answer: what it holds must not be inherited by a fork."""

    def __init__(self, facts: EngineFacts, settings: Settings, open_export: Callable[[], Export]) -> None:
        self._facts = facts
        self._settings = settings
        self._open_export = open_export
        self._limit = settings.queue_answers
        self._begin()
        _ALL.add(self)

    def _begin(self) -> None:
        self.counts = Counts()
        self._queue: deque[Reading] = deque()
        self._dropped = 0
        self.refused = 0  # answers that the engine's side could not even hand over
        self._told = Counts()
        self._tell_at_s = 0.0
        self._reader = StepReader(self._facts)
        self._instance = os.urandom(8)  # a restart under the same name must not repeat ids
        self._requests = 0
        self._export: Export | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def put(self, reading: Reading) -> None:
        """Any thread; returns at once."""
        if len(self._queue) >= self._limit:
            self._dropped += 1
            return
        self._queue.append(reading)
        if self._thread is None:
            self._start()

    def close(self, timeout_s: float | None = None) -> bool:
        """Sends what waits; False where time was up before (default: that of the settings)."""
        self._closing.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(self._settings.closing_s if timeout_s is None else timeout_s)
        return not thread.is_alive()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="phasewise-vllm", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        closing = self._closing
        with contextlib.suppress(Exception):
            from opentelemetry import context

            context.attach(context.set_value(_SUPPRESS, True))
        while not closing.wait(self._settings.delay_s):
            self._drain()
            self._tell()
        self._drain()
        self._tell(now=True)
        if self._export is not None:
            with contextlib.suppress(Exception):
                self._export.shutdown()

    def _drain(self) -> None:
        """All that waits now. An answer that cannot be read costs itself, an export that fails its spans."""
        drafts: list[Draft] = []
        steps: list[Step] = []
        for _ in range(len(self._queue)):
            reading = self._queue.popleft()
            try:
                if (step := self._reader.read(reading)) is not None:
                    steps.append(step)
                if self._facts.traced:
                    drafts += self._requests_of(reading)
            except Unnamed:
                self._count(unnamed=1)
            except Exception as problem:
                self._count(errors=1, error=repr(problem)[:200])
        try:
            drafts += step_drafts(steps, self._facts.kv_blocks_total, self._instance)
            if drafts:
                if self._export is None:
                    self._export = self._open_export()
                sent = self._export.send(drafts)
                self._count(sent=sent, failed=len(drafts) - sent)
        except Exception as problem:
            self._count(failed=len(drafts), errors=1, error=repr(problem)[:200])
        self.counts = replace(self.counts, dropped=self._dropped, refused=self.refused)

    def _tell(self, now: bool = False) -> None:
        """Says in vLLM's log what was lost since it was said last."""
        counts, before = self.counts, self._told
        lost = [f"{getattr(counts, n)} {what}" for n, what in _LOST.items() if getattr(counts, n) > getattr(before, n)]
        if lost and (now or time.monotonic() >= self._tell_at_s):
            self._told, self._tell_at_s = counts, time.monotonic() + _TELL_S
            _log.warning("Phasewise: %s; last error: %s", ", ".join(lost), counts.error or "none")

    def _requests_of(self, reading: Reading) -> list[Draft]:
        drafts = []
        for request in finished_of(reading):
            drafts.append(request_draft(request, self._facts.model, self._instance, self._requests))
            self._requests += 1
        return drafts

    def _count(self, **more: Any) -> None:
        """Only the thread counts here, so nothing is lost between reading and writing."""
        told = more.pop("error", self.counts.error)
        added = {name: getattr(self.counts, name) + value for name, value in more.items()}
        self.counts = replace(self.counts, error=told, **added)


_ALL: weakref.WeakSet[Sender] = weakref.WeakSet()


def _after_fork() -> None:
    for sender in list(_ALL):
        sender._begin()


def _at_exit() -> None:
    """All at once, so that several engines take no longer than one."""
    senders = list(_ALL)
    for sender in senders:
        sender._closing.set()
    until = time.monotonic() + max((sender._settings.closing_s for sender in senders), default=0.0)
    for sender in senders:
        with contextlib.suppress(Exception):
            sender.close(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
