"""The receiving process as a whole: its start, its end, what it loads, and what it does when ports or disk are not to be had."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from machine_speed import slowness
from otlp_messages import span_message, trace_request
from receive_process import assert_neighbour_is_stored, launch, receiving, start

from phasewise.collector.limits import MIB

pytestmark = pytest.mark.live
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def test_what_the_process_must_not_load(tmp_path: Path) -> None:
    program = (
        "import sys; from phasewise.collector import receiver; sys.meta_path.insert(0, receiver._NoPandas())\n"
        "import phasewise.collector.receiver_grpc, phasewise.collector.receiver_http\n"
        "from phasewise.collector.scan import scan_traces; scan_traces(bytes.fromhex(sys.argv[1]), 1)\n"
        "heavy = {'duckdb', 'dash', 'pandas', 'polars', 'fastapi', 'plotly', 'torch', 'ibis'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    body = trace_request(span_message()).SerializeToString().hex()
    ended = subprocess.run([sys.executable, "-c", program, body], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.alone
def test_it_is_ready_fast_and_small(tmp_path: Path) -> None:
    started = time.monotonic()
    with receiving(tmp_path) as process:
        assert time.monotonic() - started < 3 * slowness()
        process.post(trace_request(*[span_message() for _ in range(512)]).SerializeToString())
        assert process.rss_bytes() < 400 * MIB


@pytest.mark.alone
def test_sigterm_writes_what_is_under_way_and_exits_0(tmp_path: Path) -> None:
    with receiving(tmp_path) as process:
        answers = []
        spans = [span_message() for _ in range(5000)]
        sender = threading.Thread(
            target=lambda: answers.append(process.post(trace_request(*spans).SerializeToString()))
        )
        sender.start()
        time.sleep(0.1)
        started = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - started < 10 * slowness()
        sender.join()
        if answers and answers[0].status == 200:
            assert len(process.stored()) == 5000
        assert process.counters(fresh=False)["state"] == "stopped"


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    process = start(tmp_path)
    acknowledged: set[str] = set()
    lock = threading.Lock()

    def send(by_grpc: bool) -> None:
        while process.process.poll() is None:
            spans = [span_message() for _ in range(20)]
            body = trace_request(*spans).SerializeToString()
            try:
                if by_grpc:
                    process.export(body, timeout_s=5)
                elif process.post(body).status != 200:
                    continue
            except (grpc.RpcError, OSError, http.client.HTTPException):
                continue
            with lock:
                acknowledged.update(span.span_id.hex() for span in spans)

    senders = [threading.Thread(target=send, args=(by_grpc,)) for by_grpc in (True, False, True)]
    for sender in senders:
        sender.start()
    time.sleep(1.0)
    process.process.kill()
    process.process.communicate()
    for sender in senders:
        sender.join()
    assert len(acknowledged) > 100
    assert acknowledged <= process.span_ids()
    with receiving(tmp_path) as again:
        assert_neighbour_is_stored(again)
        assert acknowledged <= again.span_ids()


def test_a_full_journal_says_retry_and_heals(tmp_path: Path) -> None:
    with receiving(tmp_path, journal_limit_bytes=60_000) as process:
        body = trace_request(*[span_message() for _ in range(100)]).SerializeToString()
        answers = [process.post(body) for _ in range(20)]
        refused = [answer for answer in answers if answer.status == 503]
        assert refused
        assert 1 <= int(refused[0].headers["retry-after"]) <= 8
        assert Status.FromString(refused[0].body).code == 14
        with pytest.raises(grpc.RpcError) as raised:
            process.export(body)
        error: Any = raised.value
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        hint = RetryInfo.FromString(dict(error.trailing_metadata())["google.rpc.retryinfo-bin"])
        assert 1 <= hint.retry_delay.seconds <= 8
        found = process.counters()
        assert found["spans"]["stored"] == 100 * (20 - len(refused)) == len(process.stored())
        assert found["spans"]["refused"] == {"journal_full": 100 * (len(refused) + 1)}
        assert found["requests"]["refused_journal_full"] == len(refused) + 1


@pytest.mark.parametrize("setting", ["grpc_port", "http_port"])
def test_a_busy_port_is_one_line_and_exit_4(tmp_path: Path, setting: str) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        process = launch(tmp_path, **{setting: port})
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (4, "")
    assert err.count("\n") == 1
    assert f"port {port}" in err
    assert f"--otlp-{setting.replace('_', '-')}" in err
    assert not (tmp_path / "receive.json").exists()


def test_a_second_process_cannot_share_port_or_journal(tmp_path: Path) -> None:
    with receiving(tmp_path) as process:
        other = launch(tmp_path / "other", grpc_port=process.grpc_port)
        assert other.communicate(timeout=20)[0] == ""
        assert other.returncode == 4
        other = launch(tmp_path)
        assert f"pid {process.process.pid}" in other.communicate(timeout=20)[1]
        assert other.returncode == 4
        assert_neighbour_is_stored(process)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{", "are not JSON"),
        ("[]", "data"),
        ('{"data": "/x", "grpc_port": "4317"}', "grpc_port"),
        ('{"data": "/x", "color": 1}', "color"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(settings: str, words: str) -> None:
    command = [sys.executable, "-m", "phasewise.collector.receiver", settings]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert words in ended.stderr


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    settings = json.dumps({"data": str(tmp_path), "grpc_port": 0, "http_port": 0})
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'phasewise.collector.receiver', sys.argv[1]], stdout=-1)\n"
        "child.stdout.readline(); print(child.pid)\n"
    )
    parent = subprocess.run([sys.executable, "-c", program, settings], capture_output=True, text=True, check=True)
    child = int(parent.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if Path(f"/proc/{child}").exists():
        os.kill(child, signal.SIGKILL)
        pytest.fail("it outlived its parent")
    assert json.loads((tmp_path / "receive.json").read_text())["state"] == "stopped"


@pytest.mark.alone
@pytest.mark.slow
def test_slow_clients_are_cut_off_and_others_are_not_held_up(tmp_path: Path) -> None:
    with receiving(tmp_path) as process:
        head = f"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\ncontent-length: 100000\r\n\r\n".encode()
        slow = []
        for i in range(300):
            connection = socket.create_connection(("127.0.0.1", process.http_port))
            connection.sendall(head if i % 2 else b"POST /v1/traces HTTP/1.1\r\n")
            slow.append(connection)
        started = time.monotonic()
        open_ones = set(slow)
        worst_s = 0.0
        while open_ones and time.monotonic() - started < 40:
            before = time.monotonic()
            assert_neighbour_is_stored(process)
            worst_s = max(worst_s, time.monotonic() - before)
            for connection in list(open_ones):
                connection.setblocking(False)
                try:
                    if connection.recv(4096) == b"":
                        open_ones.discard(connection)
                    else:
                        connection.setblocking(True)
                        connection.sendall(b"x")
                except BlockingIOError:
                    connection.setblocking(True)
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        open_ones.discard(connection)
                except OSError:
                    open_ones.discard(connection)
            time.sleep(1)
        for connection in slow:
            connection.close()
        assert not open_ones
        assert time.monotonic() - started < 35 * slowness()
        assert worst_s < 2 * slowness()
        assert process.counters()["requests"]["slow"] >= 100
