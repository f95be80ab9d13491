"""How much has come on the connections of a port, as the kernel counts it: of a call that is being read, gRPC tells nothing.

The descriptors are gRPC's own. Each is asked through a copy that lives for two calls of the system, and only when address and port
of both ends fit. Where the kernel does not tell (it is not Linux), nothing is known.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from phasewise.collector.open_sockets import Address, address_of, copy_of, ends_of, open_descriptors

_BYTES_RECEIVED = slice(128, 136)  # in struct tcp_info (linux/tcp.h), since Linux 4.1
_LOOK_EVERY_S = 0.2  # for connections that were not seen before
_MESSAGE_HEAD_BYTES = 5  # of gRPC
_PEERS = 4096  # remembered


class Arrivals:
    """Connections that were accepted on `port`, by the peer as gRPC names it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._descriptors: dict[Address, int] = {}
        self._looked_at = float("-inf")

    def received_bytes(self, peer: str) -> int | None:
        """All that has come from this peer on its connection, whether it was read or not. None: not known, or closed."""
        address = address_of(peer)
        if address is None:
            return None
        found = self._told(address)
        if found is None and time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._look()
            found = self._told(address)
        return found

    def _told(self, address: Address) -> int | None:
        descriptor = self._descriptors.get(address)
        copy = copy_of(descriptor) if descriptor is not None else None
        if copy is None:
            return None
        with copy:
            if self._peer(copy) != address:  # the number belongs to something else by now
                return None
            try:
                told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
            except OSError:
                return None
        part = told[_BYTES_RECEIVED]
        return int.from_bytes(part, sys.byteorder) if len(part) == 8 else None

    def _look(self) -> None:
        self._descriptors.clear()
        for descriptor in open_descriptors():
            copy = copy_of(descriptor)
            if copy is not None:
                with copy:
                    address = self._peer(copy)
                if address is not None:
                    self._descriptors[address] = descriptor
        self._looked_at = time.monotonic()

    def _peer(self, connection: socket.socket) -> Address | None:
        """The other end; None where it is no connection of our port."""
        ends = ends_of(connection)
        return ends[1] if ends is not None and ends[0] == self._port else None


class Unread:
    """What has come of messages that are not read yet, by connection. At least that: who sends headers without end, or breaks off
    its calls, is counted more, until no call is under way. What lies packed must also be read packed, or it would be counted less."""

    def __init__(self, received_bytes: Callable[[str], int | None]) -> None:
        self._received_bytes = received_bytes
        self._read_bytes: OrderedDict[str, int] = OrderedDict()
        self._under_way: Counter[str] = Counter()
        self._unsure: set[str] = set()  # more has come of these than was read and lies here

    def begin(self, peer: str) -> None:
        """A call."""
        self._under_way[peer] += 1

    def end(self, peer: str, message: bytes | None) -> None:
        """Its message was read, or never will be."""
        self._under_way[peer] -= 1
        if message is not None:
            self._set(peer, self._read_bytes.get(peer, 0) + _MESSAGE_HEAD_BYTES + len(message))
        else:
            self._unsure.add(peer)
        if self._under_way[peer]:
            return
        del self._under_way[peer]
        if peer in self._unsure:
            received_bytes = self._received_bytes(peer)
            if received_bytes is not None:
                self._set(peer, received_bytes)
            if message is not None or received_bytes is None:  # after a broken one some may still be on its way
                self._unsure.discard(peer)

    def of(self, peer: str, received_bytes: int) -> int:
        """received_bytes: as the kernel counts them."""
        read_bytes = self._read_bytes.get(peer, 0)
        if read_bytes > received_bytes:  # of an earlier connection with the same name
            self._set(peer, 0)
            return received_bytes
        return received_bytes - read_bytes

    def _set(self, peer: str, read_bytes: int) -> None:
        self._read_bytes[peer] = read_bytes
        self._read_bytes.move_to_end(peer)
        if len(self._read_bytes) > _PEERS:
            self._unsure.discard(self._read_bytes.popitem(last=False)[0])
