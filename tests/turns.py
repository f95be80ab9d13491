"""Tests that take turns: any number of ordinary ones at once, or one that has the machine to itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "build" / "turns"


@contextmanager
def taken(config: pytest.Config, alone: bool) -> Iterator[None]:
    """Waits until this worker may run a test: for all other workers' tests to end where it must be `alone`, else for such a one to end.

    Whoever waits stands in a gate that the next cannot pass, since the kernel lets those that share a lock overtake one that wants it alone.
    Without workers every test is alone, and there is nothing to wait for.
    """
    if not hasattr(config, "workerinput"):
        yield
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "gate").open("a") as gate, (FOLDER / "machine").open("a") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:  # said, and not left to closing: a process that the test forked may still hold the file
            fcntl.flock(machine, fcntl.LOCK_UN)
