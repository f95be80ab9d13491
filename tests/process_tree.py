"""The processes of a running server, by what they do."""

from __future__ import annotations

import os
from pathlib import Path


def children(pid: int) -> dict[str, int]:
    """Process ids of the live children of `pid`: receive and store."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found["receive" if "collector.receiver" in command else "store"] = int(entry.name)
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def cpu_s(pid: int) -> float:
    """Seconds of a processor that a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
