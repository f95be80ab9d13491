"""Room for who sends: a port may hold so many connections, and those on which nothing happens give way when they are nearly all.

Who opens connections and sends nothing, or stops in the middle of a header, would keep others waiting until a timer closes them. So
where a port holds nearly as many as it may, those without a request under way that were silent longest are closed. An exporter that was
idle finds its connection closed, as after a pause, and opens another.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
import time
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass

from phasewise.collector.open_sockets import Address, copy_of, ends_of, open_descriptors

LOOK_S = 0.2
_LONG_LOOK_S = 1.0  # where there was nothing to close: to look at a thousand connections takes a hundredth of a second
SILENT_S = 1.0
FULL_RATIO, LEFT_RATIO = 0.95, 0.8  # of what the port may hold: when to begin, and how many stay
_SAY_EVERY_S = 60.0
_LAST_DATA_RECEIVED = slice(52, 56)  # milliseconds ago, or since it was made; in struct tcp_info (linux/tcp.h)
log = logging.getLogger("phasewise.receive")


class UnderWay:
    """Peers with a request under way."""

    def __init__(self) -> None:
        self._calls: Counter[Address] = Counter()

    def begin(self, peer: Address | None) -> None:
        if peer is not None:
            self._calls[peer] += 1

    def end(self, peer: Address | None) -> None:
        if peer is not None:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def __contains__(self, peer: object) -> bool:
        return peer in self._calls


@dataclass(frozen=True, slots=True)
class _Connection:
    descriptor: int
    peer: Address


class IdleConnections:
    """Of some ports. ports: by number, the peers that have a request under way; limit: of the connections of each."""

    def __init__(self, ports: Mapping[int, Container[Address]], limit: int) -> None:
        self._ports = ports
        self._limit = limit
        self._closed = 0
        self._said_s = float("-inf")

    async def keep_closing(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if not self.make_room():
                    await asyncio.sleep(_LONG_LOOK_S - LOOK_S)
            except Exception:  # a bug here must not leave the ports without it
                log.exception("idle connections could not be looked at")
                await asyncio.sleep(_SAY_EVERY_S)

    def make_room(self) -> bool:
        """Whether any was closed."""
        descriptors = open_descriptors()
        if len(descriptors) <= FULL_RATIO * self._limit:
            return False
        found: dict[int, list[_Connection]] = defaultdict(list)
        for descriptor in descriptors:
            connection = copy_of(descriptor)
            if connection is None:
                continue
            with connection:
                ends = ends_of(connection)
            if ends is not None and ends[0] in self._ports:
                found[ends[0]].append(_Connection(descriptor, ends[1]))
        closed = sum(self._close(port, own) for port, own in found.items() if len(own) > FULL_RATIO * self._limit)
        self._say(closed)
        return closed > 0

    def _close(self, port: int, connections: list[_Connection]) -> int:
        silent = []
        for one in connections:
            silent_s = None if one.peer in self._ports[port] else _silent_s(one)
            if silent_s is not None and silent_s >= SILENT_S:
                silent.append((silent_s, one))
        silent.sort(key=lambda pair: -pair[0])
        surplus = len(connections) - round(LEFT_RATIO * self._limit)
        return sum(_end(one) for _, one in silent[:surplus])

    def _say(self, closed: int) -> None:
        self._closed += closed
        if self._closed and time.monotonic() - self._said_s > _SAY_EVERY_S:
            self._said_s = time.monotonic()
            log.warning("%d silent connections were closed, for others to find room", self._closed)
            self._closed = 0


def _silent_s(one: _Connection) -> float | None:
    """Since when nothing has come. None: not known, or something lies unread."""
    connection = _same(one)
    if connection is None:
        return None
    with connection:
        try:
            unread = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.stop)
        except OSError:
            return None
    if any(unread) or len(told) < _LAST_DATA_RECEIVED.stop:
        return None
    return int.from_bytes(told[_LAST_DATA_RECEIVED], sys.byteorder) / 1e3


def _end(one: _Connection) -> bool:
    """The server under us reads an end, and closes it."""
    connection = _same(one)
    if connection is None:
        return False
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _same(one: _Connection) -> socket.socket | None:
    """A copy; None where the number belongs to something else by now."""
    connection = copy_of(one.descriptor)
    if connection is not None:
        ends = ends_of(connection)
        if ends is not None and ends[1] == one.peer:
            return connection
        connection.close()
    return None
