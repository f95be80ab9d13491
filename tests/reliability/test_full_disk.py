"""F06: a disk that fills up: refused before it is full, readable meanwhile, well again by itself."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, serving
from span_ledger import Ledger, Sender, assert_account, request_body, sending
from waiting import wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip("this machine does not allow to mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def is_well(server: Served) -> bool:
    try:
        return bool(server.get("/api/v1/health")["status"] == "ok")
    except urllib.error.HTTPError:
        return False


def told(sender: Sender, wanted: str, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if sender.send(*request_body(5)) == wanted:
            return True
        time.sleep(0.2)
    return False


def test_a_disk_that_fills_up_refuses_serves_and_heals(small_disk: Path) -> None:
    ledger = Ledger()
    data = small_disk / "data"
    with serving(data) as server:
        sender = Sender(ledger, lambda: server.ready["otlp_grpc_port"], "grpc")
        web = Sender(ledger, lambda: server.ready["otlp_http_port"], "http")
        with sending(Sender(ledger, lambda: server.ready["otlp_http_port"], "http", pause_s=0.01)):
            time.sleep(2.0)
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file:
            file.write(b"x" * max(0, free_bytes(small_disk) - (2 << 20)))
        assert told(sender, "refused", 10)
        assert told(web, "refused", 10)
        for _ in range(10):
            assert web.send(*request_body(5)) == "refused"  # again and again, the same
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            server.get("/api/v1/health")
        said = json.load(raised.value)
        assert said["status"] == "degraded"
        assert any(words in said["error"] for words in ("senders are refused", "nothing can be stored"))
        assert server.get("/api/v1/verdict", [("from", "0"), ("to", "4102444800")])["requests"] > 0
        ballast.unlink()
        assert told(sender, "acknowledged", 10)
        assert told(web, "acknowledged", 10)
        assert wait_for(lambda: is_well(server), 10)
        server.stop()
    assert_account(data, ledger)


def test_a_disk_that_is_full_to_the_last_byte_loses_nothing_that_was_acknowledged(small_disk: Path) -> None:
    """What the journal's reserve does not prevent: others fill the disk while the store writes."""
    ledger = Ledger()
    data = small_disk / "data"
    with serving(data) as server:
        sender = Sender(ledger, lambda: server.ready["otlp_http_port"], "http", pause_s=0.005, tries=1)
        with sending(sender):
            time.sleep(1.5)
            ballast = small_disk / "ballast"
            with ballast.open("wb", buffering=0) as file:
                block = b"x" * (64 << 10)
                while True:
                    try:
                        file.write(block)
                    except OSError:
                        block = block[: len(block) // 2]
                        if not block:
                            break
            time.sleep(5.0)
            before = len(ledger.acknowledged)
            ballast.unlink()
            until = time.monotonic() + 15
            while len(ledger.acknowledged) <= before and time.monotonic() < until:
                time.sleep(0.1)
            assert len(ledger.acknowledged) > before
        until = time.monotonic() + 20
        while time.monotonic() < until:
            health = server.get("/api/v1/data-health")
            if not health.get("write_error"):
                break
            time.sleep(0.3)
        server.stop()
    assert_account(data, ledger)
