"""Ports that nobody has at the moment, for servers that must come back on the same ones."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
        return found
