"""A child of ours that serves: started, waited for until its JSON line says that it is ready, ended with SIGTERM."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phasewise.dashboard.commands.progress import progress
from phasewise.rules.errors import MachineError

START_TIMEOUT_S = 120.0
DRAIN_S = 12.0


@contextlib.contextmanager
def ready_process(verb: Sequence[str], log_path: Path) -> Iterator[Mapping[str, Any]]:
    """Gives what `phasewise VERB...` says when it is ready; its stderr goes to a file.

    Raises MachineError with its own last line where it ends or stays silent instead.
    """
    command = [sys.executable, "-m", "phasewise.dashboard.cli", *verb]
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            name = " ".join(part for part in verb[:2] if not part.startswith("-"))
            yield _ready(process, log_path, f"phasewise {name}")
        finally:
            process.terminate()
            try:
                process.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def _ready(process: subprocess.Popen[str], log_path: Path, name: str) -> Mapping[str, Any]:
    lines: list[str] = []
    assert process.stdout is not None
    stdout = process.stdout
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    until = time.monotonic() + START_TIMEOUT_S
    with progress(f"starting {name}") as advance:
        while reader.is_alive() and time.monotonic() < until:
            reader.join(0.2)
            advance(0)
    if not lines or not lines[0].startswith("{"):
        # Its own last line is the clear one, and says everything a second sentence would.
        said = [line for line in log_path.read_text(encoding="utf-8").splitlines() if line.startswith("phasewise")]
        raise MachineError(said[-1].partition(": ")[2] if said else f"{name} did not start; see {log_path}")
    told: Mapping[str, Any] = json.loads(lines[0])
    return told
