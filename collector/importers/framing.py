"""Messages one after another in a file, each with its length in front.

The Collector's file exporter writes four bytes, big-endian, before each message (protobuf, or anything it compresses); the
OpenTelemetry specification's file writes protobuf's own variable-length number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Kind = Literal["fixed", "variable"]
LONGEST_BYTES = 64 << 20
_GROUP = b"\x0a"  # how a request begins: its field 1, with a length
_STARTS = (_GROUP, b"\x28", b"{")  # protobuf, zstd, JSON


def kind_of(head: bytes) -> Kind | None:
    """How the messages of a file are divided, by its first bytes; None for one message alone."""
    if head[:1] == _GROUP:
        return None
    length = int.from_bytes(head[:4], "big")
    if len(head) > 4 and 0 < length <= LONGEST_BYTES and head[4:5] in _STARTS:
        return "fixed"
    found = _variable(head, 0)
    if found and found[0] and head[found[1] : found[1] + 1] == _GROUP:
        return "variable"
    return None


def messages(body: bytes) -> Iterator[bytes]:
    """The messages of whole pieces; a body that is one message gives itself."""
    kind = kind_of(body)
    if kind is None:
        yield body
        return
    for start, end in _extents(body, kind):
        yield body[start:end]


def last_end(body: bytes) -> int:
    """Where the last whole message ends; 0 where none does."""
    kind = kind_of(body)
    last = 0
    for extent in _extents(body, kind) if kind else ():
        last = extent[1]
    return last


def count(body: bytes) -> int:
    """How many whole messages there are."""
    return sum(1 for _ in messages(body)) if body else 0


def _extents(body: bytes, kind: Kind) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(body):
        found = (int.from_bytes(body[at : at + 4], "big"), at + 4) if kind == "fixed" else _variable(body, at)
        if found is None or found[1] + found[0] > len(body):
            return
        length, start = found
        at = start + length
        if length:
            yield start, at


def _variable(body: bytes, at: int) -> tuple[int, int] | None:
    """A protobuf number and where it ends."""
    value = 0
    for index, byte in enumerate(body[at : at + 5]):
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value, at + index + 1
    return None
