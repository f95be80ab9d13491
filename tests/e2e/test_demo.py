from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from serving import PHASEWISE, phasewise

pytestmark = pytest.mark.live
FREE = ("--port", 0, "--otlp-grpc-port", 0, "--otlp-http-port", 0)


def test_both_recordings_are_judged_right_and_badged(tmp_path: Path) -> None:
    done = phasewise("demo", "--once", "--fast", "--data", tmp_path / "data", *FREE)
    assert done.returncode == 0, done.stderr
    for expected in ("Queueing", "KV cache", "vLLM 0.32.0", "96 requests", "24 requests", "2 vCPU"):
        assert expected in done.stdout, expected
    assert "/triage" not in done.stdout, "the address of pages that are gone"
    assert done.stdout.count("recorded") >= 2
    assert not (tmp_path / "data" / "serve.json").exists()
    again = phasewise("demo", "--once", "--fast", "--data", tmp_path / "data", *FREE)
    assert again.returncode == 0, "a second run on the same data must not be mixed with the first: " + again.stderr


def test_a_port_that_was_asked_for_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        done = phasewise("demo", "--once", "--fast", "--port", busy, "--otlp-grpc-port", 0, "--otlp-http-port", 0)
    assert done.returncode == 4
    assert f"port {busy}" in done.stderr and "--port" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("phasewise: ")]) == 1


def test_the_demo_stays_up_until_it_is_told_to_end() -> None:
    process = subprocess.Popen(
        [*PHASEWISE, "demo", "--fast", *map(str, FREE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Engines can send"):
                break
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, 130)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()
