"""Ports before anything starts: free or not, and who holds one that is not."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise.rules.errors import InputError, MachineError


@dataclass(frozen=True, slots=True)
class Wanted:
    """A port and the option that sets it; 0 is any free one."""

    port: int
    option: str


def is_loopback(host: str) -> bool:
    """The address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listener(host: str, port: int, option: str) -> socket.socket:
    """A bound, listening socket; MachineError naming port, holder and option where it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise InputError("--host", repr(host), f"is no address of this machine: {error}") from None
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Only lets a port be taken again whose last connections are still closing; a live listener still refuses.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(128)
    except OSError as error:
        opened.close()
        raise _refused(host, Wanted(port, option), error) from None
    return opened


def require_free(host: str, wanted: Sequence[Wanted]) -> None:
    """Refuses before the start what would otherwise be half a start."""
    taken: dict[int, str] = {}
    for want in wanted:
        if want.port and want.port in taken:
            raise InputError(want.option, str(want.port), f"is also {taken[want.port]}", "give each its own port")
        taken[want.port] = want.option
    for want in wanted:
        if want.port:
            listener(host, want.port, want.option).close()


def is_free(host: str, port: int) -> bool:
    """Nobody listens there and we may."""
    try:
        listener(host, port, "").close()
    except MachineError:
        return False
    return True


def _refused(host: str, want: Wanted, error: OSError) -> MachineError:
    if error.errno == errno.EADDRINUSE:
        pid = holder(want.port)
        by = f" by process {pid} ({_command(pid)})" if pid else ""
        return MachineError(f"port {want.port} on {host} is in use{by}; choose another with {want.option}")
    if error.errno == errno.EACCES:
        return MachineError(f"port {want.port} on {host} needs privileges; choose one above 1023 with {want.option}")
    if error.errno == errno.EADDRNOTAVAIL:
        return MachineError(f"{host} is no address of this machine; choose another with --host")
    return MachineError(f"cannot listen on {host} port {want.port}: {error.strerror}; see {want.option} and --host")


def holder(port: int) -> int | None:
    """Process id of the one that listens on a TCP port; None where the system does not tell (other user, not Linux)."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A is LISTEN
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "unknown"
