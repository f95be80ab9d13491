"""F02 and F03: a crash or an error of the disk at each sync point, in the receiver and in the store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from otlp_messages import span_message, trace_request
from receive_process import Receiving
from span_ledger import Ledger, Sender, assert_account, request_body, sending
from system_faults import KILLED, TESTS, counted, environment, exit_signal, injecting, python, require_injection
from writing import NOW

from phasewise.collector.journal import JournalWriter
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store

pytestmark = pytest.mark.live
SYNCS = ("fdatasync", "fsync", "rename", "sync_file_range", "msync")


# --- receive --------------------------------------------------------------------------------------------------------


def traced_receiver(data: Path, front: list[str]) -> Receiving:
    settings = {"data": str(data), "grpc_port": 0, "http_port": 0, "follow_parent": False}
    command = [*front, *python("-m", "phasewise.collector.receiver", json.dumps(settings))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:  # it died before it was ready
        process.communicate()
        return Receiving(process, data, 0, 0)
    ready = json.loads(line)
    return Receiving(process, data, ready["otlp_grpc_port"], ready["otlp_http_port"])


def crash_of_receive(data: Path, call: str, when: int) -> int:
    """Kill the receiver at its `when`-th `call`; the account must be right. Returns the number of acknowledged spans."""
    ledger = Ledger()
    receiver = traced_receiver(data, injecting(call, KILLED, str(when)))
    if receiver.grpc_port:
        senders = [
            Sender(ledger, lambda: receiver.grpc_port, "grpc", tries=1, pause_s=0.02),
            Sender(ledger, lambda: receiver.http_port, "http", tries=1, pause_s=0.02),
        ]
        with sending(*senders) as stop:
            try:
                receiver.process.wait(timeout=40)
            finally:
                stop.set()
        receiver.process.communicate()
    assert exit_signal(receiver.process.returncode) == signal.SIGKILL
    (data / "receive.json").unlink(missing_ok=True)  # of the process that was killed, a second old
    assert_account(data, ledger)
    return len(ledger.acknowledged)


def points_of_receive(count: int) -> list[tuple[str, int]]:
    """Most at the call that each request waits for; the others come at the start, and once a second."""
    others = [("fsync", 1), ("fsync", 2), ("rename", 1), ("rename", 2), ("rename", 4)]
    return [*(("fdatasync", n) for n in range(1, count - len(others) + 1)), *others]


@pytest.mark.slow
@pytest.mark.parametrize("point", points_of_receive(20), ids=str)
def test_a_crash_of_the_receiver_at_a_sync_point(tmp_path: Path, point: tuple[str, int]) -> None:
    require_injection()
    crash_of_receive(tmp_path / "data", *point)


@pytest.mark.nightly
def test_a_crash_of_the_receiver_at_each_sync_point(tmp_path: Path) -> None:
    require_injection()
    points = points_of_receive(100)
    told = sum(crash_of_receive(tmp_path / f"{call}-{when}", call, when) for call, when in points)
    print(f"{len(points)} crash points of receive, {told:,} spans acknowledged before them, none lost")


@pytest.mark.slow
def test_an_error_of_the_disk_is_a_refusal_and_passes(tmp_path: Path) -> None:
    """F03, once: who was told to retry retries, and the next sync is a new one."""
    require_injection()
    ledger = Ledger()
    receiver = traced_receiver(tmp_path, injecting("fdatasync", "error=EIO", "5"))
    with sending(Sender(ledger, lambda: receiver.http_port, "http", pause_s=0.01)):
        until = time.monotonic() + 30
        while len(ledger.acknowledged) < 400 and time.monotonic() < until:
            time.sleep(0.05)
    assert ledger.answers["refused"] >= 1
    assert len(ledger.acknowledged) >= 400
    os.kill(inner_pid(receiver), signal.SIGTERM)
    receiver.process.communicate(timeout=20)
    assert_account(tmp_path, ledger)


@pytest.mark.slow
def test_a_disk_that_fails_for_good_refuses_and_does_not_spin(tmp_path: Path) -> None:
    require_injection()
    ledger = Ledger()
    receiver = traced_receiver(tmp_path, injecting("fdatasync", "error=EIO", "5+"))
    pid = inner_pid(receiver)
    with sending(Sender(ledger, lambda: receiver.http_port, "http", tries=3, pause_s=0.05)):
        until = time.monotonic() + 20
        while ledger.answers["refused"] < 5 and time.monotonic() < until:
            time.sleep(0.05)
    assert ledger.answers["refused"] >= 5
    before = cpu_s(pid)
    time.sleep(2.0)
    assert cpu_s(pid) - before < 1.0
    os.kill(pid, signal.SIGKILL)
    receiver.process.communicate(timeout=20)
    (tmp_path / "receive.json").unlink(missing_ok=True)
    assert_account(tmp_path, ledger)


def inner_pid(receiver: Receiving) -> int:
    """The receiver under strace."""
    (child,) = (
        int(p) for p in Path(f"/proc/{receiver.process.pid}/task/{receiver.process.pid}/children").read_text().split()
    )
    return child


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- store ----------------------------------------------------------------------------------------------------------


def filled_journal(data: Path) -> None:
    """Sixteen segments of requests, trees and resends, as a receiver leaves them."""
    with JournalWriter(data / "journal", segment_bytes=12_000) as journal:
        earlier = b""
        for number in range(32):
            now = NOW + number * 10**8
            body, _ = request_body(8, now, f"engine-{number % 2}")
            if number % 5 == 4:
                body = earlier  # a resend
            earlier = body
            journal.append("spans", scan_traces(body, now).rows)
            root = span_message(
                trace_id=number.to_bytes(16, "big"), span_id=(9000 + number).to_bytes(8, "big"), name="chat"
            )
            tool = span_message(
                {"gen_ai.operation.name": "execute_tool"}, trace_id=root.trace_id, parent_span_id=root.span_id
            )
            journal.append("spans", scan_traces(trace_request(tool).SerializeToString(), now).rows)
            journal.append("spans", scan_traces(trace_request(root).SerializeToString(), now).rows)
            journal.sync()


def everything(data: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What the store holds, without the marks of when it was written and where from (a restart has nothing in memory)."""
    with Store(data / "phasewise.duckdb") as store:
        rows = store.query("SELECT * EXCLUDE (revision) FROM requests ORDER BY request_key")
        return {
            "requests": rows.rows(),
            "turns": store.query("SELECT * FROM turns ORDER BY ALL").rows(),
            "counters": store.query("SELECT * FROM counters WHERE name <> 'reopened_traces' ORDER BY ALL").rows(),
            "archive": sorted((path.name, path.stat().st_size) for path in (data / "spans").glob("*/*/*.parquet")),
        }


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a journal, and what an undisturbed run makes of it in `expected`."""
    folder = tmp_path_factory.mktemp("journal")
    filled_journal(folder / "data")
    return folder


@cache
def undisturbed(folder: Path) -> tuple[dict[str, list[tuple[Any, ...]]], dict[str, int]]:
    data = folder / "undisturbed"
    shutil.copytree(folder / "data", data)
    calls = counted(SYNCS, python(TESTS / "indexing_process.py", data), folder / "calls")
    return everything(data), calls


def crash_of_store(folder: Path, call: str, when: int) -> None:
    expected, _ = undisturbed(folder)
    data = folder / f"{call}-{when}"
    shutil.copytree(folder / "data", data)
    command = python(TESTS / "indexing_process.py", data)
    ended = subprocess.run(
        [*injecting(call, KILLED, str(when)), *command], check=False, capture_output=True, timeout=60, env=environment()
    )
    assert exit_signal(ended.returncode) == signal.SIGKILL, ended
    subprocess.run(command, check=True, timeout=60, env=environment())
    assert everything(data) == expected
    shutil.rmtree(data)


def points_of_store(folder: Path, count: int) -> list[tuple[str, int]]:
    """Evenly over all sync points that an undisturbed run has."""
    _, calls = undisturbed(folder)
    every = [(call, n) for call, made in calls.items() for n in range(1, made + 1)]
    step = max(1, len(every) // count)
    return every[::step][:count]


@pytest.mark.slow
def test_a_crash_of_the_store_at_a_sync_point(journal: Path) -> None:
    require_injection()
    points = points_of_store(journal, 20)
    assert len(points) == 20
    for call, when in points:
        crash_of_store(journal, call, when)


@pytest.mark.nightly
def test_a_crash_of_the_store_at_each_sync_point(journal: Path) -> None:
    require_injection()
    points = points_of_store(journal, 100)
    for call, when in points:
        crash_of_store(journal, call, when)
    print(f"{len(points)} crash points of the store, each gives the undisturbed store")
