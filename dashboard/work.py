"""Answers being computed: how long each may take, and which part of which browser tab can call one off.

The work at hand is the one context variable here: what a page or a route asks of the store passes through many pure functions,
none of which should have to hand on how long somebody is ready to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phasewise.collector.patience import PAGE_LIMIT_S, REPORT_LIMIT_S, Patience
from phasewise.collector.readers import AT_ONCE, MOST_WAITING

WORK_HEADER = "phasewise-work"  # "TAB PART ORDER" of a page's own request
Told = TypeVar("Told")


@dataclass(slots=True)
class Work:
    """One answer. tab, part: who waits for it; order: of the view in its tab. requests_n: how many it is about, once known;
    overtaken: its tab has asked something newer and will not look at it."""

    patience: Patience
    tab: str = ""
    part: str = ""
    order: tuple[int, int] = (0, 0)
    requests_n: int | None = None
    overtaken: bool = False


_AT_HAND: ContextVar[Work | None] = ContextVar("work", default=None)


def at_hand() -> Work:
    """The work that this thread does; one of its own where nobody said."""
    return _AT_HAND.get() or Work(Patience(PAGE_LIMIT_S))


@contextlib.contextmanager
def doing(work: Work) -> Iterator[Work]:
    before = _AT_HAND.set(work)
    try:
        yield work
    finally:
        _AT_HAND.reset(before)


@dataclass(slots=True)
class Works:
    """What is being computed now."""

    limit_s: float = PAGE_LIMIT_S
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: list[Work] = field(default_factory=list)
    # Not the loop's own pool, whose few threads others need; more could not even wait in the store.
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE + MOST_WAITING, "region"))

    def start(self, tab: str, part: str, order: tuple[int, int]) -> Work:
        """Begins to count the time. What the tab asked before it moved on is called off."""
        work = Work(Patience(self.limit_s), tab, part, order)
        with self._lock:
            for other in self._now:
                older = other.order[0] < order[0] or (other.part == part and other.order < order)
                if tab and other.tab == tab and older:
                    other.overtaken = True
                    other.patience.cancel()
            self._now.append(work)
        return work

    def end(self, work: Work) -> None:
        with self._lock:
            self._now = [other for other in self._now if other is not work]

    async def run(self, work: Work, compute: Callable[..., Told], *arguments: Any) -> Told:
        """Computes off the event loop, and ends the work."""

        def computed() -> Told:
            with doing(work):
                return compute(*arguments)

        try:
            # In the context of the request: who asks decides what is shown.
            context = contextvars.copy_context()
            return await asyncio.get_running_loop().run_in_executor(self._pool, context.run, computed)
        finally:
            self.end(work)

    def cancel(self, tab: str, part: str) -> int:
        """Calls off what a part of a tab waits for; returns how many that were."""
        with self._lock:
            found = [work for work in self._now if (work.tab, work.part) == (tab, part)]
        for work in found:
            work.patience.cancel()
        return len(found)

    def of(self, tab: str) -> dict[str, object]:
        """What a tab waits for: its parts, and of how many requests, once one of them knows: they share a window."""
        with self._lock:
            mine = [work for work in self._now if work.tab == tab]
        counts = [work.requests_n for work in mine if work.requests_n is not None]
        return {"parts": sorted({work.part for work in mine}), "requests": max(counts, default=None)}


class Limits:
    """The layer that gives every request its time: that of a page, or up to REPORT_LIMIT_S for `Prefer: wait=SECONDS`."""

    def __init__(self, app: Callable[..., Awaitable[None]], *, works: Works) -> None:
        self.app = app
        self.works = works

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        wait = re.search(r"\bwait=(\d{1,6})\b", named.get("prefer", ""))
        mine = re.fullmatch(r"(\S{1,40}) (\S{1,40}) (\d{1,9})", named.get(WORK_HEADER, ""))
        if mine:
            work = self.works.start(mine[1], mine[2], (int(mine[3]), 0))
        else:
            work = Work(Patience(min(float(wait[1]), REPORT_LIMIT_S) if wait else self.works.limit_s))
        try:
            with doing(work):
                await self.app(scope, receive, send)
        finally:
            self.works.end(work)
