"""The connections of this process as the kernel sees them. The servers under us hold them, and tell nothing of them.

Linux only: elsewhere none are found.
"""

from __future__ import annotations

import os
import socket
import urllib.parse
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")

Address = tuple[str, int]


def open_descriptors() -> list[int]:
    """All there are, of files too."""
    if not hasattr(socket, "TCP_INFO"):
        return []
    try:
        return [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    except OSError:
        return []


def copy_of(descriptor: int) -> socket.socket | None:
    """The same socket under a number of our own, which nobody else can close and give to another. None where it is none."""
    try:
        copied = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        return None


def ends_of(connection: socket.socket) -> tuple[int, Address] | None:
    """Our port and the other end; None where it is no TCP connection."""
    try:
        if connection.type != socket.SOCK_STREAM:
            return None
        port = connection.getsockname()[1]
        host, peer_port = connection.getpeername()[:2]
    except (OSError, ValueError, IndexError):
        return None
    return (port, bare_address(host, peer_port)) if isinstance(port, int) else None


def bare_address(host: str, port: int) -> Address:
    """However the server under us writes an IPv4 address on a socket of IPv6."""
    return host.removeprefix("::ffff:"), port


def address_of(peer: str) -> Address | None:
    """Of a peer as gRPC names it: `ipv4:127.0.0.1:4711`, or `ipv6:%5B::1%5D:4711`."""
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    return bare_address(host.strip("[]"), int(port)) if port.isdecimal() else None
