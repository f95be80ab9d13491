"""F32: clients that send and never read what they are told; those that send slowly are in test_receiver_process.py."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import pytest
from receive_process import Receiving, assert_neighbour_is_stored, receiving
from waiting import wait_for

from phasewise.collector.limits import INTAKE_LIMITS, MIB

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.slow]
CLIENTS = 150
REQUEST = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux closes such connections by itself")
def test_clients_that_never_read_are_cut_off_and_others_are_not_held_up(tmp_path: Path) -> None:
    with receiving(tmp_path) as process:
        assert_neighbour_is_stored(process)
        before, memory = descriptors(process), process.rss_bytes()
        unread = [never_reads(process.http_port) for _ in range(CLIENTS)]
        answered = process.counters()["requests"]["empty"]
        assert answered >= CLIENTS
        assert_neighbour_is_stored(process)
        assert descriptors(process) > before + CLIENTS / 2, "they were not held up by what they do not read"
        assert process.rss_bytes() - memory < 64 * MIB
        assert wait_for(lambda: descriptors(process) <= before + 2, 3 * INTAKE_LIMITS.unread_s, 1.0)
        assert_neighbour_is_stored(process)
        for connection in unread:
            connection.close()


def never_reads(port: int) -> socket.socket:
    """A connection that asks for more than is kept of answers nobody takes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", port))
    connection.settimeout(0.2)
    with contextlib.suppress(TimeoutError, ConnectionError):
        connection.sendall(REQUEST * 4000)
    return connection


def descriptors(process: Receiving) -> int:
    return sum(1 for _ in Path(f"/proc/{process.process.pid}/fd").iterdir())
