"""A server's verdict over a window, asked for until everything that was sent is in it."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.dashboard.commands.connection import Server
from phasewise.dashboard.commands.progress import progress

ASK_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Shown:
    """What one engine process sent in one window: this and nothing else, whatever the store holds besides."""

    instance: str
    from_unix_ns: int
    to_unix_ns: int

    def query(self) -> list[tuple[str, str]]:
        """Parameters of `/api/v1/verdict`."""
        return [
            ("from", str(self.from_unix_ns)),
            ("to", str(self.to_unix_ns + 1)),
            ("f", f"instance:eq:{self.instance}"),
        ]

    def page(self, server: Server) -> str:
        """Address of the same on the pages."""
        link = [
            ("from", str(self.from_unix_ns // 10**6)),
            ("to", str(self.to_unix_ns // 10**6 + 1)),
            ("var-instance", self.instance),
        ]
        return f"{server.url}/triage?{urllib.parse.urlencode(link)}"


def settled(
    server: Server, query: Sequence[tuple[str, str]], requests: int, title: str, timeout_s: float
) -> dict[str, Any]:
    """The verdict once all requests are in and two answers in a row are equal; the last one where that takes too long."""
    until = time.monotonic() + timeout_s
    before: dict[str, Any] = {}
    with progress(title) as advance:
        while True:
            verdict: dict[str, Any] = server.ask("/api/v1/verdict", query)
            complete = verdict.get("requests") == requests and not verdict.get("unattributed")
            if (complete and verdict.get("shares") == before.get("shares")) or time.monotonic() > until:
                return verdict
            before = verdict
            advance(0)
            time.sleep(ASK_AGAIN_S)
