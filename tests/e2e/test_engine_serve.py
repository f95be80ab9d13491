"""The engine's server as the command line starts it. What the server itself can do is tested in ``tests/engine``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine_speed import slowness
from serving import PHASEWISE, phasewise, serving

pytestmark = pytest.mark.live
LONG = partial(pytest.param, marks=pytest.mark.slow)


@contextmanager
def engine(*options: str) -> Iterator[tuple[subprocess.Popen[str], Mapping[str, Any]]]:
    process = subprocess.Popen(
        [*PHASEWISE, "engine", "serve", "--executor", "simulated", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def test_it_says_where_it_listens_answers_and_ends_with_0_on_sigterm() -> None:
    with engine("--model", "llama-3.2-1b", "--gpu", "L40S", "--set", "max_model_tokens=2048") as (process, ready):
        assert ready["ready"] is True and ready["executor"] == "simulated"
        assert (ready["model"], ready["gpu"]) == ("llama-3.2-1b", "l40s")
        models = httpx.get(f"{ready['url']}/v1/models", trust_env=False).json()["data"]
        assert [model["id"] for model in models] == ["llama-3.2-1b"]
        assert models[0]["max_model_len"] == 2048, "--set reaches the engine"
        body = {"model": "llama-3.2-1b", "prompt": "Once upon a time", "max_tokens": 5}
        answer = httpx.post(f"{ready['url']}/v1/completions", json=body, trust_env=False, timeout=30).json()
        assert answer["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_its_spans_reach_a_server_and_are_told_from_measured_ones(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        endpoint = f"http://127.0.0.1:{server.ready['otlp_grpc_port']}"
        with engine("--max-num-seqs", "2", "--otlp-endpoint", endpoint) as (process, ready):
            body = {"model": ready["model"], "prompt": "Once upon a time", "max_tokens": 8}
            for _ in range(3):
                httpx.post(f"{ready['url']}/v1/completions", json=body, trust_env=False, timeout=30).raise_for_status()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        verdict = server.verdict(3, f=f"instance:eq:{ready['instance']}")
    assert verdict["requests"] == 3
    (facts,) = verdict["recorded"].values()
    assert facts["badge"] == "simulated NVIDIA H100 SXM: Llama-3.1-8B, live"


@pytest.mark.slow
def test_a_simulated_run_goes_to_the_server_that_owns_the_directory(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        done = phasewise("engine", "simulate", "full_seats", "--requests", 30, "--data", tmp_path / "data", "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["url"].startswith(f"{server.url}/triage?")
        assert server.verdict(30, f=f"instance:eq:{told['instance']}")["requests"] == 30


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--host", "0.0.0.0"), 2, "--allow-remote"),
        LONG(("--set", "max_num_seq=4"), 2, "did you mean max_num_seqs"),
        LONG(("--set", "max_num_seqs=4", "--max-num-seqs", "4"), 2, "is given twice"),
        LONG(("--gpu", "h100-sxn"), 2, "did you mean h100-sxm"),
        LONG(("--model", "llama-3.1-9b"), 2, "did you mean llama-3.1-8b"),
        LONG(("--set", "chunked_prefill=false"), 2, "step_token_budget"),
        (("--executor", "torch", "--gpu", "l4", "--model", "/nowhere"), None, "phasewise: "),
    ],
)
def test_what_cannot_be_served_is_one_line(options: tuple[str, ...], code: int | None, said: str) -> None:
    done = phasewise("engine", "serve", "--executor", "simulated", "--port", 0, *options)
    assert said in done.stderr
    assert done.returncode == code if code is not None else done.returncode in (2, 4)
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("phasewise: ")]) == 1


@pytest.mark.alone
@pytest.mark.slow
def test_a_busy_port_is_exit_code_4() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        begun = time.monotonic()
        done = phasewise("engine", "serve", "--executor", "simulated", "--port", taken.getsockname()[1])
    assert done.returncode == 4
    assert "--port" in done.stderr
    assert time.monotonic() - begun < 30 * slowness()
