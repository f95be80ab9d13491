"""A file of any size as pieces that fit in memory: whole lines, whole messages, or one document.

A piece ends where nothing is cut in two, so its end is a place to go on from. gzip and zstd are undone on the way, and the
places are counted in what they hold.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phasewise.collector.importers import framing, parquet_file
from phasewise.collector.importers.streams import Stream
from phasewise.rules.errors import InputError

PIECE_BYTES = 8 << 20
LONGEST_BYTES = 64 << 20  # of a line or message
DOCUMENT_BYTES = 512 << 20  # parsed JSON takes several times its text
_BLOCK_BYTES = 1 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_READING = "1"  # part of a file's identity: a release that reads files differently counts it up, and reads them again
# Formats whose lines are understood together only: times without a date, values of one moment on many lines.
_WHOLE_KEYS = (
    "resultType",
    "metric",
    "itl_s",
    "ttfts",
    "perf_metrics",
    "ctx_perf_metrics",
    "gen_perf_metrics",
    "timings",
)
Shape = Literal["lines", "messages", "document"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece begins: bytes of content before it, and the number of its first line or message."""

    offset: int = 0
    number: int = 1

    def __str__(self) -> str:
        return f"{self.offset}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """The inverse of str(); None for anything else."""
        offset, _, number = text.partition(":")
        return cls(int(offset), int(number)) if offset.isdecimal() and number.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Piece:
    """body: the content; start, end: places; read_bytes: how much of the file was read for it; problem: what had to be left
    out before it; last: nothing follows."""

    body: bytes
    start: Place
    end: Place
    read_bytes: int = 0
    problem: str = ""
    last: bool = False


def identity_of(path: Path) -> str:
    """A digest that tells a file by its content and size, without reading all of a large one."""
    digest = hashlib.blake2b(_READING.encode(), digest_size=16)
    with path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        digest.update(size.to_bytes(8, "big"))
        if size <= _BLOCK_BYTES + _SAMPLES * _SAMPLE_BYTES:
            digest.update(handle.read())
            return digest.hexdigest()
        digest.update(handle.read(_BLOCK_BYTES))
        for number in range(1, _SAMPLES + 1):
            handle.seek(min(size - _SAMPLE_BYTES, size * number // _SAMPLES))
            digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def pieces(path: Path, start: Place | None = None, most_bytes: int | None = None) -> Iterator[Piece]:
    """The pieces of a file from a place on, in order; none where nothing is left.

    Raises InputError for a file that is empty, cannot be read, or is one document beyond DOCUMENT_BYTES. A compressed file
    that is cut off or damaged gives what could be read, and the problem with its last piece.
    """
    most = most_bytes or PIECE_BYTES
    with Stream(path) as stream:
        if stream.peek(4)[:4] == parquet_file.MAGIC:
            yield from _groups(path, start or Place())
            return
        shape = _shape(stream.peek(LONGEST_BYTES), stream)
        place = start or Place()
        if shape == "document":
            if not place.offset:
                yield _document(path, stream)
            return
        stream.skip(place.offset)
        yield from _cut(stream, shape, place, most)


def _groups(path: Path, start: Place) -> Iterator[Piece]:
    """Parquet: its places are row groups."""
    count = parquet_file.count(path)
    part_bytes = path.stat().st_size // max(1, count)
    for number, body in enumerate(parquet_file.groups(path, start.offset), start.offset):
        end = Place(number + 1, number + 2)
        yield Piece(body, Place(number, number + 1), end, part_bytes, last=number + 1 == count)


def _shape(head: bytes, stream: Stream) -> Shape:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        if stream.damage:
            raise InputError(stream.path, "", f"is damaged {stream.damage}", "write it again")
        raise InputError(stream.path, "", "is empty", "name a file with content")
    if text[:1] not in (b"{", b"["):
        return "messages" if framing.kind_of(head) else "document"
    first, newline, _ = text.partition(b"\n")
    if text[:1] == b"[" or not newline:
        return "document"
    for line in (first, *text[:_BLOCK_BYTES].split(b"\n")[1:20]):
        found = _object(line)
        if found is not None and first.strip() not in (b"{", b"["):
            return "document" if any(key in found for key in _WHOLE_KEYS) else "lines"
    return "document"


def _object(line: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _document(path: Path, stream: Stream) -> Piece:
    body = stream.read(DOCUMENT_BYTES + 1)
    if len(body) > DOCUMENT_BYTES:
        limit = f"is one document of more than {DOCUMENT_BYTES >> 20} MiB"
        raise InputError(path, "", limit, "write it as lines of JSON, or in parts")
    if stream.damage:
        raise InputError(path, "", f"is damaged {stream.damage}", "write it again")
    end = Place(len(body), body.count(b"\n") + 1)
    return Piece(body, Place(), end, stream.taken_bytes(), last=True)


def _cut(stream: Stream, shape: Shape, place: Place, most: int) -> Iterator[Piece]:
    """Pieces of whole lines or messages. What is longer than LONGEST_BYTES is left out and named."""
    rest = b""
    problem = ""
    find = framing.last_end if shape == "messages" else _last_line_end
    while True:
        rest += stream.read(max(most - len(rest), min(most, _BLOCK_BYTES)))
        ended = not stream.peek(1)
        cut = len(rest) if ended and shape == "lines" and not stream.damage else find(rest)
        if not cut and not ended:
            if len(rest) > LONGEST_BYTES:
                rest, place, problem = _without_giant(stream, shape, rest, place)
            continue
        if ended and stream.damage:  # half a line is none
            problem = problem or f"is damaged {stream.damage} after {place.offset + len(rest):,} bytes of content"
        elif ended and cut < len(rest):
            problem = f"its last message is cut off: {len(rest) - cut:,} bytes are no whole one"
        body, rest = rest[:cut], rest[cut:]
        count = framing.count(body) if shape == "messages" else body.count(b"\n")
        end = Place(place.offset + cut, place.number + count)
        if body or problem:
            yield Piece(body, place, end, stream.taken_bytes(), problem, last=ended)
        if ended:
            return
        place, problem = end, ""


def _last_line_end(body: bytes) -> int:
    return body.rfind(b"\n") + 1


def _without_giant(stream: Stream, shape: Shape, rest: bytes, place: Place) -> tuple[bytes, Place, str]:
    """The content behind a line that is too long; for a message nothing tells where the next begins."""
    limit = f"is longer than {LONGEST_BYTES >> 20} MiB"
    if shape == "messages":
        raise InputError(stream.path, f"message {place.number}", limit, "write smaller messages")
    skipped = len(rest)
    while block := stream.read(_BLOCK_BYTES):
        at = block.find(b"\n")
        if at >= 0:
            skipped += at + 1
            return block[at + 1 :], Place(place.offset + skipped, place.number + 1), f"line {place.number}: {limit}"
        skipped += len(block)
    return b"", Place(place.offset + skipped, place.number + 1), f"line {place.number}: {limit}"
