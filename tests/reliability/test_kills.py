"""F01: kill -9 at any moment loses nothing that was acknowledged, and stores nothing twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from crash_counts import KILL_ROUNDS
from free_ports import free_ports
from process_tree import children
from serving import serving
from span_ledger import Ledger, Sender, assert_account, sending

pytestmark = pytest.mark.live
VICTIMS = ("receive", "store", "all")


def killed_at_random(data: Path, rounds: int, seed: int) -> None:
    """Senders go on all the time; each round kills one process, or all of them and starts anew on the same ports."""
    draw = random.Random(seed)
    ledger = Ledger()
    ports = free_ports(3)
    done = 0
    senders = [Sender(ledger, lambda: ports[1], "grpc", pause_s=0.04) for _ in range(2)]
    senders += [Sender(ledger, lambda: ports[2], "http", pause_s=0.04) for _ in range(2)]
    with sending(*senders):
        while done < rounds:
            with serving(data, ports=ports) as server:
                victim = "store"
                while victim != "all" and done < rounds:
                    before = len(ledger.acknowledged)
                    time.sleep(draw.uniform(0.2, 3.0))
                    victim = VICTIMS[done % len(VICTIMS)]
                    pids = children(server.process.pid)
                    assert set(pids) == {"receive", "store"}
                    if victim == "all":
                        server.process.kill()
                        server.process.wait()
                    for name, pid in pids.items():
                        if victim in (name, "all"):
                            os.kill(pid, signal.SIGKILL)
                    done += 1
                    if victim != "all":
                        wait_for_both(server.process.pid, pids[victim])
                        until = time.monotonic() + 20
                        while len(ledger.acknowledged) <= before and time.monotonic() < until:
                            time.sleep(0.05)
                    assert len(ledger.acknowledged) > before, (
                        f"nothing was acknowledged again after {victim} (seed {seed})"
                    )
    time.sleep(1.0)  # what dies with its parent is gone
    counters = assert_account(data, ledger)
    print(
        f"seed {seed}: {rounds} kills, {len(ledger.acknowledged):,} spans acknowledged, {dict(ledger.answers)}, ",
        counters,
    )


def wait_for_both(pid: int, gone: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        pids = children(pid)
        if len(pids) == 2 and gone not in pids.values():
            return
        time.sleep(0.05)
    pytest.fail("it was not started again")


@pytest.mark.slow
def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    killed_at_random(tmp_path / "data", KILL_ROUNDS["slow"], random.randrange(2**32))


@pytest.mark.nightly
def test_fifty_kills_lose_nothing(tmp_path: Path) -> None:
    killed_at_random(tmp_path / "data", KILL_ROUNDS["nightly"], random.randrange(2**32))
