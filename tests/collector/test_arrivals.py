"""What has come on a connection, by the address of its peer."""

from __future__ import annotations

import socket
import sys

import pytest

from phasewise.collector.arrivals import Arrivals, Unread

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")


@only_linux
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


@only_linux
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


class Kernel:
    """What has come by peer, as a test says."""

    def __init__(self) -> None:
        self.received: dict[str, int | None] = {}

    def __call__(self, peer: str) -> int | None:
        return self.received.get(peer)


def test_what_was_read_is_not_unread() -> None:
    unread = Unread(Kernel())
    for call in range(3):
        unread.begin("one")
        assert unread.of("one", 1005 * call + 700) == 700
        unread.end("one", bytes(1000))
    assert unread.of("one", 3 * 1005) == 0
    assert unread.of("other", 500) == 500


def test_a_call_beside_busy_ones_is_not_charged_with_theirs() -> None:
    unread = Unread(Kernel())
    unread.begin("line")  # and never ends
    for _ in range(100):
        unread.begin("line")
        unread.end("line", bytes(10**6))
    assert unread.of("line", 100 * (10**6 + 5) + 40) == 40


def test_what_broken_calls_left_is_forgotten_once_none_is_under_way() -> None:
    kernel = Kernel()
    unread = Unread(kernel)
    unread.begin("line")
    unread.begin("line")
    unread.end("line", None)
    assert unread.of("line", 5000) == 5000, "the other may be what has come"
    kernel.received["line"] = 6000
    unread.end("line", None)
    assert unread.of("line", 6500) == 500, "still on its way when its call was broken off"
    kernel.received["line"] = 8000
    unread.begin("line")
    unread.end("line", bytes(100))
    assert unread.of("line", 8000) == 0


def test_a_name_that_is_used_again_starts_anew() -> None:
    unread = Unread(Kernel())
    unread.begin("one")
    unread.end("one", bytes(10**6))
    assert unread.of("one", 1000) == 1000
    assert unread.of("one", 2000) == 2000


def test_only_so_many_peers_are_remembered() -> None:
    unread = Unread(Kernel())
    for number in range(5000):
        unread.begin(str(number))
        unread.end(str(number), b"")
    assert unread.of("4999", 5) == 0
    assert unread.of("0", 5) == 5, "counted more, never less"
