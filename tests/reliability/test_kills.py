"""F01: kill -9 at any moment loses nothing that was acknowledged, stores nothing twice, and is over in five seconds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest
from crash_counts import KILL_ROUNDS
from free_ports import free_ports
from machine_speed import slowness
from process_tree import children
from quiet_time import Stopwatch
from serving import Served, serving
from span_ledger import Ledger, Sender, assert_account, request_body, sending
from waiting import wait_for

from phasewise.collector.store import Store
from phasewise.dashboard.own_starts import ENDED, STOPPED

pytestmark = [pytest.mark.live, pytest.mark.alone]
VICTIMS = ("receive", "store", "all")
CLIENTS = 8
SPANS = 512  # of a request, as the SDKs send them
OFFERED_PER_S = 2000
READY_S = 5.0
SLOW_RATIO = 1.1
LONG_LOG_BYTES = 230 << 20  # the store shortens one of 256 MB by itself


def clients(ledger: Ledger, ports: list[int]) -> list[Sender]:
    """With the waits of the Python SDK: at once, after 1, 3 and 7 s, and then the next request."""
    pause_s = CLIENTS * SPANS / OFFERED_PER_S
    names = [("grpc", ports[1]), ("http", ports[2])] * (CLIENTS // 2)
    return [
        Sender(ledger, lambda p=port: p, name, SPANS, tries=4, wait_s=1.0, pause_s=pause_s, timeout_s=10.0)  # type: ignore[misc, arg-type]
        for name, port in names
    ]


@pytest.fixture(scope="module")
def ready_within_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Five seconds; on a slow machine three times a start with nothing to do, where that is more: reading a log is work as well."""
    if slowness() < SLOW_RATIO:
        return READY_S
    return max(READY_S, 3 * max(empty_start_s(tmp_path_factory.mktemp("empty") / "data") for _ in range(2)))


def empty_start_s(data: Path) -> float:
    watch = Stopwatch()
    with serving(data) as server:
        return watch.quiet_s([server.process.pid, *children(server.process.pid).values()])


def killed_at_random(data: Path, rounds: int, seed: int, within_s: float) -> None:
    """Senders go on all the time; each round kills one process, or all of them and starts anew on the same ports."""
    draw = random.Random(seed)
    ledger = Ledger()
    ports = free_ports(3)
    done = 0
    ready_s: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
    with sending(*clients(ledger, ports)):
        while done < rounds:
            watch = Stopwatch()
            with serving(data, ports=ports) as server:
                if done:
                    ready_s["all"].append(watch.quiet_s([server.process.pid, children(server.process.pid)["store"]]))
                await_acknowledged(ledger, f"a start (seed {seed})")
                victim = "store"
                while victim != "all" and done < rounds:
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
                        ready_s[victim].append(ready_again(server, ports, victim, pids[victim]))
                        await_acknowledged(ledger, f"{victim} was killed (seed {seed})")
    time.sleep(1.0)  # what dies with its parent is gone
    counters = assert_account(data, ledger)
    in_doubt = counters["spans"] - len(ledger.acknowledged)
    print(
        f"seed {seed}: {rounds} kills, {len(ledger.acknowledged):,} spans acknowledged, {in_doubt:,} stored that were not, "
        f"{dict(ledger.answers)}, {counters}; ready again after at most "
        + ", ".join(f"{max(times):.1f} s ({victim})" for victim, times in ready_s.items() if times)
    )
    with Store(data / "phasewise.duckdb") as store:
        marks = store.query("SELECT text FROM annotations WHERE kind = 'restart'")["text"].to_list()
    # The store began anew after it was killed, alone or with all; at the end the account is made by a server that is stopped.
    killed = sum(VICTIMS[number % len(VICTIMS)] in ("store", "all") for number in range(rounds))
    assert killed - 1 <= marks.count(ENDED) <= killed and set(marks) <= {ENDED, STOPPED}, marks
    assert in_doubt <= rounds * CLIENTS * SPANS  # what was under way
    assert all(seconds < within_s for times in ready_s.values() for seconds in times), ready_s


def await_acknowledged(ledger: Ledger, since: str) -> None:
    """Some senders wait seconds before they try again: each kill hits a server that takes in, however soon it follows the last."""
    before = len(ledger.acknowledged)
    assert wait_for(lambda: len(ledger.acknowledged) > before), f"nothing was acknowledged after {since}"


def ready_again(server: Served, ports: list[int], victim: str, gone: int) -> float:
    """Seconds from now until another process answers as that one did."""
    watch = Stopwatch()
    probe = Sender(Ledger(), lambda: ports[2], "http", timeout_s=1.0)

    def answers() -> bool:
        if children(server.process.pid).get(victim, gone) == gone:
            return False
        if victim == "receive":
            return probe.send(b"", []) == "acknowledged"
        try:
            return bool(server.get("/api/v1/health")["status"] == "ok")
        except (OSError, urllib.error.URLError):
            return False

    assert wait_for(answers), f"{victim} was not started again"
    return watch.quiet_s([children(server.process.pid)[victim]])


@pytest.mark.slow
def test_ten_kills_lose_nothing(tmp_path: Path, ready_within_s: float) -> None:
    killed_at_random(tmp_path / "data", KILL_ROUNDS["slow"], random.randrange(2**32), ready_within_s)


@pytest.mark.nightly
def test_fifty_kills_lose_nothing(tmp_path: Path, ready_within_s: float) -> None:
    killed_at_random(tmp_path / "data", KILL_ROUNDS["nightly"], random.randrange(2**32), ready_within_s)


LONG_LOG = """
import os, signal, sys, time
from pathlib import Path
import pyarrow as pa
from span_ledger import request_body
from writing import rulebook
from phasewise.analyzer.attribution import attributor
from phasewise.collector.journal import JournalWriter
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store
from phasewise.dashboard.own_starts import ENDED, STOPPED
from phasewise.collector.writer import Writer

data, bytes_wanted = Path(sys.argv[1]), int(sys.argv[2])
journal, store = JournalWriter(data / "journal"), Store(data / "phasewise.duckdb")
writer = Writer(store, data, rulebook(), attributor(rulebook()))
template = scan_traces(request_body(4096)[0], time.time_ns()).rows
sent = 0
while store.log_bytes < bytes_wanted:
    numbers = range(sent, sent + template.num_rows)
    rows = template
    for name, size in (("trace_id", 32), ("span_id", 16)):
        ids = pa.array([f"{n + 1:0{size}x}" for n in numbers])
        rows = rows.set_column(rows.schema.get_field_index(name), template.schema.field(name), ids)
    journal.append("spans", rows)
    journal.sync()
    sent += template.num_rows
    while writer.step() or writer.behind:
        pass
print(sent, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_behind_a_log_as_long_as_it_may_become_it_is_ready_in_five_seconds(
    tmp_path: Path, ready_within_s: float
) -> None:
    """The store is killed just before it would shorten its log: a start has all of it to do once more."""
    data = tmp_path / "data"
    told = subprocess.run(
        [sys.executable, "-c", LONG_LOG, data, str(LONG_LOG_BYTES)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.returncode == -signal.SIGKILL
    spans = int(told.stdout)
    assert (data / "phasewise.duckdb.wal").stat().st_size > LONG_LOG_BYTES
    watch = Stopwatch()
    with serving(data) as server:
        # One behind the other: nobody sends yet, so receive waits for nothing once it is ready.
        took_s = watch.quiet_s([server.process.pid, *children(server.process.pid).values()])
        body, ids = request_body(1)
        server.send_traces(body)
        assert server.verdict(spans + 1)["requests"] == spans + 1
        server.stop()
    print(f"ready {took_s:.1f} s after the start behind a log of {LONG_LOG_BYTES >> 20} MiB, {spans:,} requests in it")
    with Store(data / "phasewise.duckdb") as store:
        found = store.query("SELECT count(*) AS n, count(DISTINCT span_id) AS ids FROM requests")
        assert found.rows() == [(spans + 1, spans + 1)]
        assert store.query("SELECT count(*) AS n FROM requests WHERE span_id = ?", ids)["n"].item() == 1
    assert took_s < ready_within_s
