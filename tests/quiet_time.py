"""How long something took, less the time that its processes stood in the kernel's queue for a processor, and by the speed of its
cores: what it takes on a usual machine where nothing else runs. So that a bound in seconds can be held by one that does other work."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from machine_speed import slowness


def queued_s(pid: int) -> float:
    """Seconds the first thread of a process was ready to run and had no processor; 0 where the kernel does not say, or it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def quiet_s(began_s: float, started: Iterable[int]) -> float:
    """From a monotonic time to now, less the waiting of processes that were started after it, one behind the other."""
    return (time.monotonic() - began_s - sum(queued_s(pid) for pid in started)) / slowness()
