"""The server as a process of its own: ready line, signals, an orderly end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from live_engine import MODEL, grpc_receiver, until
from machine_speed import slowness

pytestmark = pytest.mark.live

SCRIPT = """
import sys, json
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.export import ExportSettings
from phasewise.instrumented_engine.server import serve
from phasewise.instrumented_engine.serving.server_settings import ServerSettings
told = json.loads(sys.argv[1])
export = ExportSettings(endpoint=told.pop("endpoint", None))
config = EngineConfig(max_num_seqs=4, kv_blocks=256, max_model_tokens=1024, step_token_budget=512)
sys.exit(serve(ServerSettings(executor="simulated", port=told.pop("port", 0), config=config, export=export, **told)))
"""


@contextmanager
def process(**told: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(told)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            ready = json.loads(started.stdout.readline())
            assert ready["ready"] is True
            assert {"url", "port", "model", "executor", "gpu", "instance"} <= set(ready)
            yield started, str(ready["url"])
        finally:
            started.kill()


def post(url: str, **body: Any) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=30) as client:
        return client.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x", **body})


def test_sigterm_lets_running_calls_end_and_refuses_new_ones() -> None:
    with grpc_receiver() as received, process(endpoint=received.endpoint, drain_s=20) as (started, url):
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(url, max_tokens=250, stream=True)))
        thread.start()
        until(lambda: "num_requests_running{" in httpx.get(f"{url}/metrics").text and _running(url) == 1)
        started.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        refused = post(url, max_tokens=1)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        thread.join()
        assert answers[0].text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in answers[0].text
        assert started.wait(15) == 0
        assert len(received.named("llm_request")) == 1  # flushed before the end
        assert received.named("engine.steps")
        assert started.stderr is not None
        assert "Traceback" not in started.stderr.read()


def _running(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_running")).rpartition(" ")[2])


@pytest.mark.alone
def test_what_does_not_end_in_time_is_cancelled_and_told() -> None:
    with process(drain_s=0.3) as (started, url):
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(url, max_tokens=1000, stream=True)))
        thread.start()
        until(lambda: _running(url) == 1)
        began = time.monotonic()
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0
        assert time.monotonic() - began < 5 * slowness()
        thread.join()
        assert "the server shut down" in answers[0].text


def test_a_second_signal_ends_what_runs() -> None:
    with process(drain_s=60) as (started, url):
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(url, max_tokens=1000, stream=True)))
        thread.start()
        until(lambda: _running(url) == 1)
        started.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0
        thread.join()
        assert "the server shut down" in answers[0].text


@pytest.mark.alone
def test_an_idle_server_ends_at_once() -> None:
    with process() as (started, _):
        began = time.monotonic()
        started.send_signal(signal.SIGINT)
        assert started.wait(10) == 0
        assert time.monotonic() - began < 3 * slowness()


def test_a_busy_port_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-c", SCRIPT, json.dumps({"port": taken.getsockname()[1]})]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "cannot listen on" in ended.stderr.splitlines()[-1]
