"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(test: Callable[[], object], seconds: float = 20.0) -> None:
    """Return once `test` holds; fail where it does not in time. Generous: it costs time only where something is broken."""
    end = time.monotonic() + seconds
    while not test() and time.monotonic() < end:
        time.sleep(0.01)
    assert test()
