"""In which order the parts of a server end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from phasewise.dashboard.commands import serve
from phasewise.dashboard.commands.serve import ServeSettings, Supervisor

# Ends on SIGTERM after the seconds it is told, and writes its name to a file when it does.
PART = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(float(sys.argv[1])), "
    "open(sys.argv[3], 'a').write(sys.argv[2] + ' '), sys.exit(0))); print('up', flush=True); time.sleep(60)"
)


def part(name: str, seconds: float, log: Path) -> Any:
    process = Popen([sys.executable, "-c", PART, str(seconds), name, str(log)], stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.stdout.close()
    return process


def test_receive_takes_spans_until_the_store_is_gone(tmp_path: Path) -> None:
    """So that a restart is as short as it can be for senders: the journal keeps what the store no longer reads."""
    supervisor = Supervisor(ServeSettings(tmp_path))
    log = tmp_path / "log"
    supervisor.receive.process, supervisor.store.process = part("receive", 0.0, log), part("store", 0.5, log)
    supervisor._drain()
    assert log.read_text() == "store receive "


def test_a_store_that_hangs_leaves_receive_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "DRAIN_S", 2.5)
    monkeypatch.setattr(serve, "RECEIVE_DRAIN_S", 2.0)
    supervisor = Supervisor(ServeSettings(tmp_path))
    log = tmp_path / "log"
    supervisor.receive.process, supervisor.store.process = part("receive", 0.0, log), part("store", 60.0, log)
    supervisor._drain()
    assert log.read_text() == "receive "
    assert supervisor.store.exit_code == -signal.SIGKILL
