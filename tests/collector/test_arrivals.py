"""What has come on a connection, by the address of its peer."""

from __future__ import annotations

import socket
import sys

import pytest

from phasewise.collector.arrivals import Arrivals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")


@pytest.mark.parametrize(
    ("family", "host", "peer"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
def test_what_has_come_is_counted_whether_it_was_read_or_not(
    family: socket.AddressFamily, host: str, peer: str
) -> None:
    with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as client:
        arrivals = Arrivals(listener.getsockname()[1])
        client.connect(listener.getsockname()[:2])
        name = peer.format(client.getsockname()[1])
        accepted, _ = listener.accept()
        with accepted:
            assert arrivals.received_bytes(name) == 0
            for count in (1000, 500):
                client.sendall(bytes(count))
            accepted.recv(300, socket.MSG_WAITALL)
            accepted.recv(1200, socket.MSG_WAITALL | socket.MSG_PEEK)
            assert arrivals.received_bytes(name) == 1500
            assert accepted.fileno() >= 0, "asking closes nothing"
        assert arrivals.received_bytes(name) is None


def test_connections_of_other_ports_are_not_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            peer = f"ipv4:127.0.0.1:{client.getsockname()[1]}"
            assert Arrivals(listener.getsockname()[1]).received_bytes(peer) == 0
            assert Arrivals(1).received_bytes(peer) is None
            for odd in ("unix:", "", "ipv4:127.0.0.1", "ipv4:127.0.0.1:x"):
                assert Arrivals(listener.getsockname()[1]).received_bytes(odd) is None
