"""`phasewise db` beside a running server, and a start after its store was damaged."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from otlp_messages import span_message, trace_request
from serving import Served, phasewise, serving
from waiting import wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]


def send(server: Served, first: int, count: int, model: str = "m") -> None:
    """vLLM requests of one span each."""
    now = time.time_ns()
    spans = [
        span_message(
            {"gen_ai.latency.e2e": 1.0, "gen_ai.latency.time_in_queue": 0.2, "gen_ai.request.model": model},
            name="llm_request",
            trace_id=(first + i + 1).to_bytes(16, "big"),
            span_id=(first + i + 1).to_bytes(8, "big"),
            start_time_unix_nano=now - 10**9,
            end_time_unix_nano=now,
        )
        for i in range(count)
    ]
    server.send_traces(trace_request(*spans, scope="vllm.tracing.otel").SerializeToString())


def stored(server: Served) -> int:
    return int(server.get("/api/v1/pulse")["requests"])


def test_backup_purge_and_check_of_a_served_directory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        send(server, 0, 20)
        send(server, 20, 5, "canary-4d1e")
        assert wait_for(lambda: stored(server) == 25)
        refused = phasewise("db", "check", "--data", data)
        assert refused.returncode == 4 and "a server runs" in refused.stderr
        done = phasewise("db", "backup", "--data", data, "--out", tmp_path / "backup")
        assert done.returncode == 0, done.stderr
        purged = phasewise("db", "purge", "--data", data, "--where", "model:eq:canary-4d1e", "--json")
        assert json.loads(purged.stdout)["requests"] == 5, purged.stderr
        assert wait_for(lambda: stored(server) == 20)
        send(server, 40, 3)
        assert wait_for(lambda: stored(server) == 23)
        assert server.stop() == 0
    checked = phasewise("db", "check", "--data", data)
    assert checked.returncode == 0, checked.stderr
    left = [path for path in data.rglob("*") if path.is_file() and b"canary-4d1e" in path.read_bytes()]
    assert left == []
    restored = phasewise("db", "restore", tmp_path / "backup", "--data", tmp_path / "new")
    assert restored.returncode == 0, restored.stderr
    assert "25 requests" in restored.stdout


def test_a_start_on_a_damaged_store_says_so_and_has_everything(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as server:
        send(server, 0, 20)
        assert wait_for(lambda: stored(server) == 20)
        assert server.stop() == 0
    file = data / "phasewise.duckdb"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    with serving(data) as server:
        assert wait_for(lambda: stored(server) == 20)
        assert wait_for(lambda: "was damaged and lies in" in str(server.get("/api/v1/pulse")["notice"]))
        assert server.stop(signal.SIGTERM) == 0
    assert list((data / "quarantine").glob("*/phasewise.duckdb"))
