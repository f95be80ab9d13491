"""Faults of the kernel at the N-th system call of a kind, injected by strace into a process of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

KILLED = "signal=SIGKILL"
TESTS = Path(__file__).parent
ATTACHED_S = 60.0


def fault(calls: str, what: str, when: str, paths: Sequence[Path] = ()) -> list[str]:
    """Options of strace for `what` at the calls numbered `when` ("3", or "3+" from the third on).

    Calls are counted by thread. paths: only calls on these files.
    """
    only = [part for path in paths for part in ("-P", str(path))]
    return ["-o", os.devnull, *only, "-e", f"trace={calls}", "-e", f"inject={calls}:{what}:when={when}"]


def injecting(calls: str, what: str, when: str) -> list[str]:
    """The front of a command that meets it."""
    return ["strace", "-f", "-qq", *fault(calls, what, when)]


@contextmanager
def faulty(pid: int, calls: str, what: str, when: str, paths: Sequence[Path], log: Path) -> Iterator[None]:
    """A running process meets it, all its threads, until the end. log: what strace says of these calls and of files opened, each line
    with its thread and the second."""
    options = fault(calls, what, when, paths)
    options[options.index(f"trace={calls}")] += ",openat"
    options[options.index(os.devnull)] = str(log)
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-ttt", *options, "-p", str(pid)])
    try:
        until = time.monotonic() + ATTACHED_S
        while any("TracerPid:\t0\n" in status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status")):
            assert tracer.poll() is None and time.monotonic() < until, "strace is not attached"
            time.sleep(0.05)
        yield
    finally:
        tracer.terminate()  # it lets go of the process, which goes on
        tracer.wait(ATTACHED_S)


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


def counted_in(log: Path, calls: Sequence[str]) -> dict[str, int]:
    """How often the thread that makes most of them makes each of these calls, in what `strace -f -o` wrote."""
    found: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        thread, _, rest = line.partition(" ")
        found[thread, rest.strip().partition("(")[0]] += 1
    return {call: max((n for (_, name), n in found.items() if name == call), default=0) for call in calls}
