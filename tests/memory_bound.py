"""A process that may have only so much memory: the kernel ends it where it takes more.

`python memory_bound.py GROUP ARGUMENTS...` joins a control group and becomes `python ARGUMENTS...`.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_S = 5.0


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group below that of this process, so that whatever bounds this one goes on to count. Skips where none may be made."""
    made = _made(limit_bytes)
    if made is None:
        pytest.skip("no control group for memory may be made here")
    try:
        yield made
    finally:
        made.rmdir()


def _made(limit_bytes: int) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = (_ROOT / "memory", "memory.limit_in_bytes") if controllers else (_ROOT, "memory.max")
        group = mount / path.lstrip("/") / f"phasewise-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit_bytes))
            return group
        except OSError:
            with suppress(OSError):
                group.rmdir()
    return None


def peak_bytes(group: Path) -> int:
    """The most that was counted, the cache of files included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with suppress(FileNotFoundError):
            return int((group / name).read_text())
    raise AssertionError(f"{group} does not tell its peak")


def killed_for_memory(group: Path) -> int:
    """How many processes of it the kernel ended."""
    for name in ("memory.oom_control", "memory.events"):
        with suppress(FileNotFoundError):
            for line in (group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    raise AssertionError(f"{group} does not tell whom it killed")


if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
