"""Faults of the kernel at the N-th system call of a kind, injected by strace into a process of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

KILLED = "signal=SIGKILL"
TESTS = Path(__file__).parent


def injecting(calls: str, fault: str, when: str, path: Path | None = None) -> list[str]:
    """The front of a command that meets `fault` at the calls numbered `when` ("3", or "3+" from the third on).

    Calls are counted by thread. path: only calls on this file.
    """
    only = ["-P", str(path)] if path else []
    return [
        "strace",
        "-f",
        "-qq",
        "-o",
        os.devnull,
        *only,
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={calls}:{fault}:when={when}",
    ]


def require_injection() -> None:
    """Skip where strace is absent or may not trace."""
    if reason := _unable():
        pytest.skip(reason)


@cache
def _unable() -> str:
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return f"strace may not trace here: {tried.stderr.strip()}" if tried.returncode else ""


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def environment() -> Mapping[str, str]:
    """Of a process that imports helpers of the tests."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }


def exit_signal(code: int) -> int | None:
    """The signal that ended a process, whether strace says it as a shell does or passes it on."""
    if code < 0:
        return -code
    return code - 128 if code > 128 else None


def counted(calls: Sequence[str], command: Sequence[str], log: Path) -> dict[str, int]:
    """How often the thread that makes most of them makes each of these calls, in a command that ends by itself."""
    subprocess.run(
        ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={','.join(calls)}", *command],
        check=True,
        env=environment(),
    )
    found: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        thread, _, rest = line.partition(" ")
        found[thread, rest.strip().partition("(")[0]] += 1
    return {call: max((n for (_, name), n in found.items() if name == call), default=0) for call in calls}
