"""Connections on which nothing happens give way to those that send, the longest silent first."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from otlp_messages import span_message, trace_request
from receive_process import receiving
from waiting import until

from phasewise.collector import idle_connections
from phasewise.collector.idle_connections import FULL_RATIO, LEFT_RATIO, IdleConnections, UnderWay
from phasewise.collector.limits import INTAKE_LIMITS
from phasewise.collector.receiver import bound_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of connections")
LIMIT = 10
SMALL = trace_request(span_message()).SerializeToString()


@contextmanager
def connections(count: int) -> Iterator[tuple[int, list[socket.socket], list[socket.socket]]]:
    """Port, and both ends of so many connections to it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        clients, served = [], []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection(listener.getsockname())))
            served.append(stack.enter_context(listener.accept()[0]))
        yield listener.getsockname()[1], clients, served


def ended(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def test_the_longest_silent_go_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "SILENT_S", 0.2)
    with connections(LIMIT) as (port, clients, served):
        under_way = UnderWay()
        under_way.begin(clients[0].getsockname())
        clients[1].sendall(b"unread")
        time.sleep(0.3)
        for one in clients[5:]:
            one.sendall(b"later")
        for one in served[5:]:
            one.recv(100)
        clients[2].sendall(b"a header that is still coming")
        served[2].recv(100)
        assert IdleConnections({port: under_way}, LIMIT).make_room()
        gone = [number for number, one in enumerate(clients) if ended(one)]
        assert gone == [3, 4], "the first is served, the second has something unread, the third sent last"
        assert len(gone) == LIMIT - LIMIT * LEFT_RATIO
        under_way.end(clients[0].getsockname())
        for one in (*clients[:2], *served[:2]):
            assert one.fileno() >= 0, "looking closes nothing"


def test_where_there_is_room_nobody_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "SILENT_S", 0.0)
    with connections(int(LIMIT * FULL_RATIO)) as (port, clients, _), connections(LIMIT) as (_, others, _):
        assert not IdleConnections({port: UnderWay()}, LIMIT).make_room()
        assert not any(ended(one) for one in (*clients, *others))


def test_who_sends_nothing_takes_no_place_at_once() -> None:
    with bound_socket("127.0.0.1", 0, "http_port") as listener, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        sending = stack.enter_context(socket.create_connection(listener.getsockname()))
        sending.sendall(b"POST")
        listener.setblocking(True)
        with listener.accept()[0] as first:
            assert first.getpeername() == sending.getsockname()


@pytest.mark.live
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_port_full_of_silent_connections_is_open_to_others(tmp_path: Path, transport: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = INTAKE_LIMITS.connections + 100
    if hard != resource.RLIM_INFINITY and hard < 2 * count:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count), hard))
    try:
        with receiving(tmp_path) as process, ExitStack() as stack:
            port = process.http_port if transport == "http" else process.grpc_port
            silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
            for one in silent if transport == "http" else ():
                one.sendall(b"P")  # else it would take no place at first
            descriptors = Path(f"/proc/{process.process.pid}/fd")
            until(lambda: len(list(descriptors.iterdir())) > INTAKE_LIMITS.connections * FULL_RATIO)
            began = time.monotonic()
            if transport == "http":
                assert process.post(SMALL).status == 200
            else:
                assert process.export(SMALL, wait_for_ready=True) == b""
            assert time.monotonic() - began < INTAKE_LIMITS.header_s * 0.9, "only a timer made room"
            assert sum(map(ended, silent)) < count, "all of them were closed"
            assert process.span_ids()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
