"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

from machine_speed import slowness


def wait_for(test: Callable[[], object], seconds: float = 30.0, pause_s: float = 0.05) -> bool:
    """Whether `test` holds in time, longer on a slow machine. Generous: it costs time only where something is broken."""
    end = time.monotonic() + seconds * slowness()
    while time.monotonic() < end:
        if test():
            return True
        time.sleep(pause_s)
    return bool(test())


def until(test: Callable[[], object], seconds: float = 20.0) -> None:
    """Return once `test` holds; fail where it does not in time."""
    assert wait_for(test, seconds, 0.01)
