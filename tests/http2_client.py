"""HTTP/2 by the byte: connections to the gRPC port that are as slow, or as deaf, as a test wants them."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Mapping, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_EXPORT = b"/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_MOST = 1 << 16


def frame(kind: int, flags: int = 0, stream: int = 0, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def _text(value: bytes) -> bytes:
    """HPACK's string, not packed; under 254 bytes."""
    assert len(value) < 254
    return (bytes((len(value),)) if len(value) < 127 else bytes((127, len(value) - 127))) + value


def header_block(more: Mapping[bytes, bytes] | None = None) -> bytes:
    """HPACK of the headers of an Export call, each a literal."""
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": _EXPORT,
        b":authority": b"x",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        **(more or {}),
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def message(content: bytes, packed: bool = False) -> bytes:
    """A message of gRPC."""
    return bytes((packed,)) + len(content).to_bytes(4, "big") + content


OPENING = PREFACE + frame(SETTINGS)


class Connection:
    """One connection. It reads, and answers settings and pings where that is allowed; not where it is not `polite`, or is `deaf`."""

    def __init__(
        self, port: int, at_once: bytes = b"", pieces: Sequence[bytes] = (), *, polite: bool = True, deaf: bool = False
    ) -> None:
        """at_once: what is sent first; pieces: what follows, one with each `step`."""
        self._socket = socket.socket()
        if deaf:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(at_once)
        self._socket.setblocking(False)
        self._pieces, self._sent = pieces, 0
        self._polite, self._deaf = polite, deaf
        self._between = _between_frames(at_once, pieces)
        self._unread = b""
        self._answers: list[bytes] = []
        self.heard: set[int] = set()  # kinds of frames
        self.open = True

    def step(self) -> None:
        """Read what came, send the next piece."""
        try:
            if not self._deaf:
                self._read()
            with contextlib.suppress(BlockingIOError):
                while self._polite and self._answers and self._sent in self._between:
                    self._socket.sendall(self._answers.pop(0))
                if self._sent < len(self._pieces):
                    self._socket.sendall(self._pieces[self._sent])
                    self._sent += 1
        except ConnectionError:
            self.open = False

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while part := self._socket.recv(_MOST):
                self._unread += part
            self.open = False
        while len(self._unread) >= 9:
            length, kind, flags = int.from_bytes(self._unread[:3], "big"), self._unread[3], self._unread[4]
            if len(self._unread) < 9 + length:
                return
            content, self._unread = self._unread[9 : 9 + length], self._unread[9 + length :]
            self.heard.add(kind)
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._answers.append(frame(kind, ACK, 0, content if kind == PING else b""))


def _between_frames(before: bytes, pieces: Sequence[bytes]) -> set[int]:
    """After how many of the pieces, sent after `before`, another frame may stand: none before our settings, none in a block of headers."""
    data = before + b"".join(pieces)
    ends, at, in_block = set(), len(PREFACE), False
    while data.startswith(PREFACE) and at + 9 <= len(data):
        length, kind, flags = int.from_bytes(data[at : at + 3], "big"), data[at + 3], data[at + 4]
        at += 9 + length
        in_block = kind in (HEADERS, CONTINUATION) and not flags & END_HEADERS
        if not in_block:
            ends.add(at)
    sent = itertools.accumulate((len(piece) for piece in pieces), initial=len(before))
    return {count for count, length in enumerate(sent) if length in ends}


def by_the_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]
