"""One file of the journal: positions in it, how an entry is framed, found again after damage, and told from half-written bytes.

An entry is a 32-byte header and an Arrow IPC stream. The header holds a magic number, the kind of rows, the row count, the
payload's length and CRC32C, and a CRC32C of its own, so that a damaged length cannot lead astray: after a bad header the
next good one is searched for. Numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import google_crc32c
import pyarrow as pa

from phasewise.collector.records import METRIC_SCHEMA, SPAN_SCHEMA
from phasewise.rules.errors import InputError

Kind = Literal["spans", "metrics"]
SCHEMAS: dict[Kind, pa.Schema] = {"spans": SPAN_SCHEMA, "metrics": METRIC_SCHEMA}
CODES: dict[Kind, int] = {"spans": 1, "metrics": 2}
KINDS: dict[int, Kind] = {code: kind for kind, code in CODES.items()}

MAGIC = b"\x89PWJ\r\n\x1a\x01"  # not text, and broken by any newline translation; the last byte is the format's version
_FIELDS = struct.Struct("<8sHHIII")  # magic, kind, reserved, rows, payload bytes, payload CRC32C
_CHECK = struct.Struct("<I")  # CRC32C of the fields
_PADDING = bytes(4)
HEADER_BYTES = _FIELDS.size + _CHECK.size + len(_PADDING)
_SEARCH_BYTES = 1 << 20
SUFFIX = ".seg"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where an entry ends: read on from here. Ordered as the entries are; `(0, 0)` is before all."""

    segment: int
    offset: int

    def __str__(self) -> str:
        return f"{self.segment}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of str()."""
        segment, _, offset = text.partition(":")
        if not (segment.isdecimal() and offset.isdecimal()):
            raise InputError("journal position", repr(text), "is not SEGMENT:OFFSET")
        return cls(int(segment), int(offset))


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole entry of a segment; start and end are byte offsets in the file."""

    start: int
    end: int
    kind: int
    rows: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes that are no entry. ``open_ended``: nothing valid follows, so they may still be being written."""

    start: int
    end: int
    open_ended: bool


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}{SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments present, oldest first; a missing directory has none."""
    try:
        names = [entry.name for entry in os.scandir(directory)]
    except FileNotFoundError:
        return []
    stems = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def header(kind: int, rows: int, payload: bytes | pa.Buffer) -> bytes:
    """What stands before the payload of one entry."""
    fields = _FIELDS.pack(MAGIC, kind, 0, rows, len(payload), google_crc32c.value(payload))
    return b"".join((fields, _CHECK.pack(google_crc32c.value(fields)), _PADDING))


def reframed(frame: Frame, rows: int, payload: bytes) -> bytes:
    """An entry of the same size in the place of another: a stream of rows ends before the zeros that follow it."""
    padded = payload.ljust(len(frame.payload), b"\0")
    return header(frame.kind, rows, padded) + padded


def frames(descriptor: int, start: int) -> Iterator[Frame | Gap]:
    """Entries of an open segment from byte `start` on, and the gaps between them."""
    size = os.fstat(descriptor).st_size
    while start < size:
        frame = _frame_at(descriptor, start, size)
        if frame is not None:
            yield frame
            start = frame.end
            continue
        found = _next_frame(descriptor, start + 1, size)
        yield Gap(start, size if found is None else found, open_ended=found is None)
        if found is None:
            return
        start = found


def _header_at(descriptor: int, start: int) -> tuple[int, int, int, int] | None:
    """Kind, rows, payload length and payload CRC32C, or None where no valid header stands."""
    header = os.pread(descriptor, HEADER_BYTES, start)
    if len(header) < HEADER_BYTES:
        return None
    fields = header[: _FIELDS.size]
    magic, kind, _, rows, length, check = _FIELDS.unpack(fields)
    (own_check,) = _CHECK.unpack_from(header, _FIELDS.size)
    if magic != MAGIC or own_check != google_crc32c.value(fields):
        return None
    return kind, rows, length, check


def _frame_at(descriptor: int, start: int, size: int) -> Frame | None:
    header = _header_at(descriptor, start)
    if header is None:
        return None
    kind, rows, length, check = header
    begin = start + HEADER_BYTES
    if begin + length > size:
        return None
    payload = os.pread(descriptor, length, begin)
    if len(payload) < length or google_crc32c.value(payload) != check:
        return None
    return Frame(start, begin + length, kind, rows, payload)


def _next_frame(descriptor: int, start: int, size: int) -> int | None:
    """Offset of the next whole entry at or after `start`."""
    while start < size:
        window = os.pread(descriptor, _SEARCH_BYTES + len(MAGIC), start)
        at = window.find(MAGIC)
        while at >= 0:
            if _frame_at(descriptor, start + at, size) is not None:
                return start + at
            at = window.find(MAGIC, at + 1)
        start += _SEARCH_BYTES
    return None
