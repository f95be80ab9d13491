"""How long something took, less the time that its processes stood in the kernel's queue for a processor or the machine in its host's,
and by the speed of its cores: what it takes on a usual machine where nothing else runs. So that a bound in seconds can be held by one
that does other work."""

from __future__ import annotations

import os
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


def _stolen_s() -> float:
    """Seconds that the host gave a processor to another machine while this one would have used it; 0 where no kernel says."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._began_s, self._stolen_s = time.monotonic(), _stolen_s()

    def quiet_s(self, started: Iterable[int]) -> float:
        """Until now, less the waiting of processes that were started after it, one behind the other, and less what the host took."""
        waited_s = sum(queued_s(pid) for pid in started) + _stolen_s() - self._stolen_s
        return (time.monotonic() - self._began_s - waited_s) / slowness()
