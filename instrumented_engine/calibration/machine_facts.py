"""What the operating system says of this machine: processor, memory, caches. Linux; elsewhere what is not told is None."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Of the machine, or of the group of processes that this one is in where that may have less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        return min(whole, int(GROUP_LIMIT.read_text(encoding="ascii")))
    return whole


def last_cache_bytes() -> int | None:
    """Of the largest cache that one core sees."""
    sizes = []
    for path in CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text(encoding="ascii").strip().removesuffix("K")) * 1024)
    return max(sizes, default=None)


def stream_array_bytes(cache_bytes: int | None, free_bytes: int, least: int) -> int:
    """Four times the cache for each array, and no more than a sixteenth of the memory; whole MiB."""
    wanted = max(least, 4 * (cache_bytes or 0))
    return max(1 << 20, min(wanted, free_bytes // 16) >> 20 << 20)
