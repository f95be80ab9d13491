"""F03: the disk of the store fails under a running server: what is seen is late, what was acknowledged is not touched."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from machine_speed import slowness
from process_tree import children, cpu_s
from serving import Served, serving
from span_ledger import Ledger, Sender, assert_account, sending
from system_faults import faulty, require_injection
from waiting import wait_for

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.slow]
FAILS_S = 6.0
# For the disk to be seen as failing, and as well again, on a machine that does much else.
SEEN_S = 60.0
SLACK_S = 3.0  # such a machine may take as much longer over anything
CLOCK_S = 0.1


def health(server: Served) -> dict[str, Any]:
    try:
        found: dict[str, Any] = server.get("/api/v1/health")
    except urllib.error.HTTPError as error:
        assert error.code == 503
        found = json.load(error)
    return found


def is_well(server: Served) -> bool:
    return bool(health(server)["status"] == "ok")


@pytest.mark.parametrize(
    ("call", "when"),
    [
        pytest.param("fdatasync", "1", marks=pytest.mark.nightly, id="one sync"),
        pytest.param("fdatasync", "1+", id="every sync"),
        pytest.param("write", "1+", marks=pytest.mark.nightly, id="every write to the log"),
        pytest.param("pwrite64", "1+", marks=pytest.mark.nightly, id="every write to the file"),
    ],
)
def test_an_error_of_the_stores_disk_delays_what_is_seen(tmp_path: Path, call: str, when: str) -> None:
    """Senders are answered all the time, the process stays, health says why, and it is well again without a restart."""
    require_injection()
    ledger, data = Ledger(), tmp_path / "data"
    files = [data / "phasewise.duckdb", data / "phasewise.duckdb.wal"]
    with serving(data) as server:
        parts = children(server.process.pid)

        def load() -> AbstractContextManager[object]:
            return sending(Sender(ledger, lambda: server.ready["otlp_http_port"], "http", pause_s=0.02, timeout_s=30.0))

        with load():
            assert wait_for(lambda: health(server).get("requests", 0) > 0, SEEN_S)
        log = tmp_path / "strace"
        with faulty(parts["store"], call, "error=EIO", when, files, log):
            if call == "pwrite64":  # the file itself is written when there is nothing else to do
                assert wait_for(lambda: "EIO" in log.read_text(), 2 * SEEN_S)
            with load():
                acknowledged = len(ledger.acknowledged)
                assert wait_for(lambda: not is_well(server), SEEN_S)
                assert health(server)["error"]
                began, used_s = time.monotonic(), cpu_s(parts["store"])
                time.sleep(FAILS_S)
                seconds = time.monotonic() - began
                assert cpu_s(parts["store"]) - used_s < 0.9 * seconds
                assert wait_for(lambda: len(ledger.acknowledged) > acknowledged + 200, SEEN_S)
        assert "EIO" in log.read_text()
        with load():
            assert wait_for(lambda: is_well(server), SEEN_S)
            seen = health(server)["requests"]
            assert wait_for(lambda: health(server)["requests"] > seen, SEEN_S)
        assert children(server.process.pid) == parts
        server.stop()
    failed_s, opened_s = seconds_of(log, "EIO"), seconds_of(log, 'phasewise.duckdb", O_RDWR')
    apart_s = [later - earlier for earlier, later in itertools.pairwise(opened_s)]
    print(
        f"{len(failed_s)} calls failed, the file was opened again {len(opened_s)} times, {min(apart_s, default=0.0):.2f} s apart"
    )
    assert all(one > 2.0 - CLOCK_S for one in apart_s), "it was opened more often than once in two seconds"
    if call == "fdatasync":  # after which nothing goes on but by opening it again; a write that fails fails alone
        assert opened_s[0] - failed_s[0] < 2.0 + SLACK_S * slowness()
    assert set(ledger.answers) == {"acknowledged"}
    assert_account(data, ledger)


def seconds_of(log: Path, words: str) -> list[float]:
    """When each call was made of which strace says this."""
    return [float(line.split()[1]) for line in log.read_text().splitlines() if words in line]
