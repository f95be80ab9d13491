"""F20 to F22: more than it can take: refused to be retried, never killed, never lying, and well again at once."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from otlp_messages import span_message, trace_request
from process_tree import children
from receive_process import receiving
from serving import serving
from span_ledger import Ledger, Sender, assert_account, sending

pytestmark = [pytest.mark.live, pytest.mark.slow]
MIB = 1 << 20


def memory_bytes(pid: int, name: str = "VmHWM") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def overload(data: Path, seconds: float, clients: int) -> None:
    """Clients that never wait, on every side of it, then half of nothing: the account, memory, answers and recovery."""
    ledger = Ledger()
    with serving(data) as server:
        ports = {"grpc": server.ready["otlp_grpc_port"], "http": server.ready["otlp_http_port"]}
        pids = children(server.process.pid)
        crowd = [
            Sender(ledger, lambda p=port: p, name, spans=200, tries=8, timeout_s=10.0)  # type: ignore[misc, arg-type]
            for name, port in ports.items()
            for _ in range(clients // 2)
        ]
        with sending(*crowd):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                began = time.monotonic()
                assert server.get("/api/v1/health")
                assert time.monotonic() - began < 10.0
                time.sleep(1.0)
        assert children(server.process.pid) == pids, "a process died"
        assert memory_bytes(pids["receive"]) < 512 * MIB
        assert memory_bytes(pids["store"]) < 2048 * MIB
        calm = Sender(ledger, lambda: ports["http"], "http", tries=3, pause_s=0.2)
        with sending(calm):
            time.sleep(2.0)
        taken = sorted(ledger.acknowledged_s)
        server.stop()
    assert len(taken) > 50
    assert taken[int(len(taken) * 0.99)] < 5.0
    assert set(ledger.answers) <= {"acknowledged", "refused", "unknown"}
    assert_account(data, ledger, at_most_s=240.0)


def test_more_than_it_can_take_is_refused_and_nothing_breaks(tmp_path: Path) -> None:
    overload(tmp_path / "data", 6.0, 16)


@pytest.mark.nightly
def test_two_minutes_of_it(tmp_path: Path) -> None:
    overload(tmp_path / "data", 120.0, 64)


def test_refused_senders_are_sent_away_for_different_times(tmp_path: Path) -> None:
    """F21: 200 refusals spread over the hinted seconds, so that the senders do not come back as one."""
    with receiving(tmp_path, journal_limit_bytes=1) as process:
        body = trace_request(span_message()).SerializeToString()
        whole = Counter(int(process.post(body).headers["retry-after"]) for _ in range(50))
        tenths: Counter[int] = Counter()
        for _ in range(200):
            with pytest.raises(grpc.RpcError) as raised:
                process.export(body)
            error: Any = raised.value
            hint = RetryInfo.FromString(dict(error.trailing_metadata())["google.rpc.retryinfo-bin"]).retry_delay
            tenths[int((hint.seconds + hint.nanos / 1e9) * 10)] += 1
    assert set(whole) == {1, 2}  # HTTP has whole seconds only
    assert set(tenths) <= set(range(10, 21))
    assert max(tenths.values()) < 3 * 200 / 10  # in any tenth of a second of the one over which they are spread
