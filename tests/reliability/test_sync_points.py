"""F02 and F03: a crash or an error of the disk at each sync point of the receiver; those of the store are in test_store_crashes.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from crash_counts import RECEIVE_POINTS
from process_tree import cpu_s
from receive_process import Receiving, warm
from span_ledger import Ledger, Sender, assert_account, sending
from system_faults import KILLED, exit_signal, injecting, python, require_injection

pytestmark = pytest.mark.live
SYNCS = ("fdatasync", "fsync", "rename", "sync_file_range", "msync")


# --- receive --------------------------------------------------------------------------------------------------------


def traced_receiver(data: Path, front: list[str]) -> Receiving:
    warm()
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
@pytest.mark.parametrize("point", points_of_receive(RECEIVE_POINTS["slow"]), ids=str)
def test_a_crash_of_the_receiver_at_a_sync_point(tmp_path: Path, point: tuple[str, int]) -> None:
    require_injection()
    crash_of_receive(tmp_path / "data", *point)


@pytest.mark.nightly
def test_a_crash_of_the_receiver_at_each_sync_point(tmp_path: Path) -> None:
    require_injection()
    points = points_of_receive(RECEIVE_POINTS["nightly"])
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
