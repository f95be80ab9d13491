"""Child processes that are started, watched, started again, drained, and that die with their parent."""

from __future__ import annotations

import ctypes
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # after this long alive, the next fault counts as the first again


def _die_with_parent() -> None:
    """Runs in the child between fork and exec: the kernel sends it SIGTERM when its parent ends, however that ends.

    The signal follows the end of the *thread* that forked, so children are started by the main thread only.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(slots=True)
class Child:
    """One `python -m MODULE JSON` that says on stdout, in one JSON line, that it is ready."""

    name: str
    module: str
    settings: Mapping[str, object]
    process: subprocess.Popen[str] | None = None
    started_s: float = 0.0
    restarts: int = 0
    next_start_s: float = 0.0
    ready: dict[str, Any] | None = None
    opening: bool = False  # it answers, and has work to do before it is ready
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def start(self) -> None:
        """Starts it in a session of its own: the terminal's Ctrl-C reaches only the supervisor, which drains in order."""
        self._lines = queue.Queue()
        self.ready = None
        self.opening = False
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(self.settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def poll_ready(self) -> dict[str, Any] | None:
        """What it said when it became ready, as soon as it did."""
        while self.ready is None:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return None
            if line is None:
                return None
            if line.startswith("{"):
                told = json.loads(line)
                self.opening = self.opening or bool(told.get("opening"))
                if told.get("ready"):
                    self.ready = told
        return self.ready

    @property
    def exit_code(self) -> int | None:
        """None while it runs (or was never started)."""
        return self.process.poll() if self.process else None

    def pause_s(self) -> float:
        """How long to wait before the next start: doubled with each fault, forgotten after a steady minute."""
        if time.monotonic() - self.started_s > STEADY_S:
            self.restarts = 0
        self.restarts += 1
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.restarts - 1)))

    def terminate(self) -> None:
        """Asks it to drain."""
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def wait_at_most(self, until_s: float) -> bool:
        """Waits for its end until a monotonic time; whether it came."""
        if self.process is None:
            return True
        try:
            self.process.wait(max(0.05, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, until_s: float) -> None:
        """Waits for its end until a monotonic time, then kills it."""
        if self.process and not self.wait_at_most(until_s):
            self.process.kill()
            self.process.wait()
