"""Processes of the store that start at once and may be killed at any system call: jobs of store_workloads.py."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from system_faults import TESTS, counted_in, environment, fault, python

JOB_S = 300.0


@dataclass(slots=True)
class ForkServer:
    """Runs one job at a time."""

    process: subprocess.Popen[str]

    def run(self, work: str, data: Path, strace: Sequence[str] = ()) -> int:
        """The return code of one piece of work; -9 where it was killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        watch = threading.Timer(JOB_S, self.process.kill)
        watch.start()
        self.process.stdin.write(json.dumps({"work": work, "data": str(data), "strace": list(strace)}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        watch.cancel()
        assert line, f"{work} did not end in {JOB_S:.0f} s"
        return int(line)

    def done(self, work: str, data: Path) -> None:
        """A run that nobody disturbs."""
        code = self.run(work, data)
        assert code == 0, Path(f"{data}.log").read_text()

    def killed(self, work: str, data: Path, call: str, when: int) -> int:
        """The return code of a run that meets SIGKILL at its `when`-th call."""
        return self.run(work, data, fault(call, "signal=SIGKILL", str(when)))

    def calls(self, work: str, data: Path, calls: Sequence[str]) -> dict[str, int]:
        """How often the thread that makes most of them makes each of these calls in an undisturbed run."""
        log = Path(f"{data}.calls")
        code = self.run(work, data, ["-o", str(log), "-e", f"trace={','.join(calls)}"])
        assert code == 0, Path(f"{data}.log").read_text()
        return counted_in(log, calls)


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    process = subprocess.Popen(
        python(TESTS / "store_workloads.py"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # One thread for each of them: nothing here is large, and threads that wait for work cost a traced process most of its time.
        env={**environment(), "POLARS_MAX_THREADS": "1", "TOKIO_WORKER_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        yield ForkServer(process)
    finally:
        process.kill()
        process.communicate()
        assert os.WIFSIGNALED(process.returncode) or process.returncode < 0
