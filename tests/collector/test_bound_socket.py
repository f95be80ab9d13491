"""The window of a connection is bounded where the system lets us, and left to it where it would get smaller."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from phasewise.collector import receiver
from phasewise.collector.limits import INTAKE_LIMITS


def window_bytes(listener: socket.socket) -> int:
    listener.setblocking(True)
    with listener, socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"P")  # without a byte it would wait in the kernel first
        with listener.accept()[0] as accepted:
            return accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


@pytest.mark.parametrize(
    ("allowed", "is_bound"),
    [(str(INTAKE_LIMITS.socket_bytes), True), ("212992", False), ("", False)],
    ids=["allowed", "a smaller one", "unknown"],
)
def test_the_window_is_ours_or_the_systems(
    allowed: str, is_bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "rmem_max"
    told.write_text(allowed)
    monkeypatch.setattr(receiver, "_LARGEST_WINDOW", told)
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        systems = window_bytes(plain)
    allowed_here = int(Path("/proc/sys/net/core/rmem_max").read_text())
    ours = 2 * min(INTAKE_LIMITS.socket_bytes, allowed_here)  # the kernel doubles what it is asked for
    assert window_bytes(receiver.bound_socket("127.0.0.1", 0, "http_port")) == (ours if is_bound else systems)
    assert ours != systems
