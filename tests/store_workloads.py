"""What the store does on the disk, each as a piece of work that may end anywhere and is then done again: reading a journal, sealing and
deleting hours, importing a file. Files are small enough that all its habits show: checkpoints, segments cut to Parquet and deleted.

`python store_workloads.py` is a server that forks for each job (see fork_server.py): what takes long at the start of a process is
done once.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builders import START_UNIX_NS
from writing import NOW, PLAIN, rulebook

from phasewise.analyzer.attribution import attributor as _attributor  # noqa: F401  (here, so that no child has to)
from phasewise.collector import opening
from phasewise.collector import writer as writer_module
from phasewise.collector.importers import pieces
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.retention import DAY_NS, Keep, Retention, usage_of
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.dashboard import cli
from phasewise.dashboard.commands import ingest as _ingest  # noqa: F401

PIECE_BYTES = 14_000  # a dozen requests
CHECKPOINT_THRESHOLD = "64KB"
SEALED_UNIX_NS = START_UNIX_NS + 30 * DAY_NS
EXPIRED_UNIX_NS = START_UNIX_NS + 30 * DAY_NS + 2 * HOUR_NS  # seventeen of thirty days are older than fourteen
_ATTACHED_S = 60.0
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def _opened(data: Path) -> Store:
    """With one thread: others only wait for each other over so few rows, which costs a traced process most of its time."""
    return Store(data / "phasewise.duckdb", threads=1)


def index(data: Path) -> None:
    """Everything the journal holds, as if some seconds had passed after each step."""
    writer_module.READ_ENTRIES = 6
    now = [NOW + 10 * 10**9]
    with _opened(data) as store:
        writer = writer_module.Writer(store, data, rulebook(), PLAIN, clock=lambda: now[0])
        idle = 0
        while idle < 13:  # two and a half minutes: by then every row is final, whenever its neighbours came
            idle = 0 if writer.step() or writer.health()["journal"]["lag_bytes"] else idle + 1  # type: ignore[index]
            now[0] += 12 * 10**9
        store.checkpoint()


def seal(data: Path) -> None:
    """Every hour that is due, moved to the cold tier."""
    with _opened(data) as store:
        for due in due_hours(store, SEALED_UNIX_NS):
            assert Sealer(store, lambda: SEALED_UNIX_NS).seal(due)
        store.checkpoint()


def expire(data: Path) -> None:
    """Hours older than fourteen days, deleted with their files, on a volume that is too full with them."""
    now, passed = [EXPIRED_UNIX_NS - HOUR_NS], [1000.0]
    with _opened(data) as store:
        own = Retention(store, data, Keep(), lambda: now[0], lambda: passed[0], _small_volume)
        own._seen = (now[0] - DAY_NS, passed[0] - 86_400)  # it has watched the clock since before they were old
        own.run()
        now[0], passed[0] = now[0] + HOUR_NS, passed[0] + 3600
        own.run()
        own.vacuum()
        store.checkpoint()


def _small_volume(folder: Path) -> tuple[int, int]:
    """What is used and free of a volume of that many bytes."""
    own, _ = usage_of(folder)
    return own, max(0, int((folder.parent / "volume_bytes").read_text()) - own)


def import_file(data: Path) -> None:
    """`phasewise ingest` of the file beside the data, in pieces."""
    pieces.PIECE_BYTES = PIECE_BYTES
    code = cli.main(["ingest", "--data", str(data), str(data.parent / "traces.jsonl")])
    assert code == 0, code


WORKLOADS: Mapping[str, Callable[[Path], None]] = {
    "index": index,
    "seal": seal,
    "expire": expire,
    "import": import_file,
}


def _child(job: Mapping[str, Any], gate: int) -> None:
    """Never returns."""
    code = 1
    try:
        log = os.open(f"{job['data']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.read(gate, 1)
        WORKLOADS[job["work"]](Path(job["data"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(job: Mapping[str, Any]) -> int:
    """The return code of one job, as `subprocess` gives it; under strace where there are options for it."""
    gate, opened = os.pipe()
    child = os.fork()
    if not child:
        os.close(opened)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY)  # strace is no ancestor, which some kernels ask for
        _child(job, gate)
    os.close(gate)
    tracer = None
    if job["strace"]:
        tracer = subprocess.Popen(["strace", "-f", "-qq", *job["strace"], "-p", str(child)])
        until = time.monotonic() + _ATTACHED_S
        while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
            if tracer.poll() is not None or time.monotonic() > until:
                break  # it runs undisturbed, which its return code tells
            time.sleep(0.002)
    os.write(opened, b"x")
    os.close(opened)
    _, status = os.waitpid(child, 0)
    if tracer:
        tracer.wait()
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """One JSON job a line in, one return code a line out."""
    opening.CHECKPOINT_THRESHOLD = CHECKPOINT_THRESHOLD
    rulebook()
    for line in sys.stdin:
        print(_run(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
