"""A real browser on a served application, and what goes wrong in it."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from stocked import Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
BOUND = "from=2025-11-29T14:00:00Z&to=2025-11-29T14:10:00Z"


@dataclass
class Browsed:
    """A page and what went wrong on it."""

    page: Any
    base: str
    problems: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def open(self, address: str, text: str) -> None:
        self.page.goto(self.base + address)
        self.wait(text)

    def wait(self, text: str, timeout_s: float = 60) -> None:
        self.page.get_by_text(text).first.wait_for(state="visible", timeout=timeout_s * 1000)

    def settle(self) -> None:
        """Until no callback runs any more."""
        self.until("!document.querySelector('[data-dash-is-loading=true]')")

    def until(self, expression: str, timeout_s: float = 60) -> None:
        """Until an expression holds in the page. Asked from outside: the page's own policy forbids it to evaluate text."""
        end = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            self.page.wait_for_timeout(50)


@contextlib.contextmanager
def browsed(chromium: Any, served: Served) -> Iterator[Browsed]:
    """A new page; what it logs as an error, asks, or asks of others is noted."""
    with listening(served) as (base, _):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        seen = Browsed(page, base)
        page.on("console", lambda told: seen.problems.append(told.text) if told.type == "error" else None)
        page.on("pageerror", lambda error: seen.problems.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith((base, "data:", "blob:")) else seen.foreign.append(asked.url),
        )
        yield seen
        context.close()


@contextlib.contextmanager
def listening(served: Served) -> Iterator[tuple[str, uvicorn.Server]]:
    server = uvicorn.Server(uvicorn.Config(served.app, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", server
    server.should_exit = True
    thread.join(10)
