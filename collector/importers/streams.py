"""A file's content as a stream, whatever it is compressed with; damage ends it and is told, what came before stays."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO, Any, Self

from phasewise.rules.errors import InputError

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 1 << 20
_INPUT_BYTES = 1 << 16
_GZIP_FRAMING = 31  # zlib's number for it, with the largest window


class Stream:
    """Content of a file from its beginning. damage: why it ended early, "" as long as it did not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self._ahead = b""
        self._told_bytes = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise InputError(path, "", (error.strerror or str(error)).lower(), "name a file that can be read") from None
        magic = self._file.read(4)
        self._file.seek(0)
        self._kind = "gzip" if magic[:2] == GZIP else "zstd" if magic == ZSTD else ""
        self._content: IO[bytes] | Any = self._file
        if self._kind == "gzip":
            self._content = _Gunzip(self._file)
        elif self._kind == "zstd":
            import pyarrow as pa  # where the files are not compressed so, nobody waits for it

            self._content = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), "zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def peek(self, most_bytes: int) -> bytes:
        """What `read` gives next: up to the end of its first line, at least a block where there is that much."""
        while len(self._ahead) < most_bytes and b"\n" not in self._ahead.lstrip():
            block = self._next(_BLOCK_BYTES)
            if not block:
                break
            self._ahead += block
        return self._ahead

    def read(self, most_bytes: int) -> bytes:
        """Up to so many bytes; fewer at the end, none behind it."""
        found, self._ahead = self._ahead[:most_bytes], self._ahead[most_bytes:]
        parts, size = [found], len(found)
        while size < most_bytes:
            block = self._next(min(most_bytes - size, _BLOCK_BYTES))
            if not block:
                break
            parts.append(block)
            size += len(block)
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Leave out so many bytes."""
        while count > 0:
            block = self.read(min(count, _BLOCK_BYTES))
            if not block:
                return
            count -= len(block)

    def taken_bytes(self) -> int:
        """Bytes of the file itself that were read since the last call."""
        at = self._file.tell()
        taken, self._told_bytes = at - self._told_bytes, at
        return taken

    def _next(self, most_bytes: int) -> bytes:
        if self.damage:
            return b""
        try:
            return bytes(self._content.read(most_bytes))
        except (EOFError, OSError, zlib.error) as error:
            if not self._kind:
                raise InputError(self.path, "", str(error), "check the disk it lies on") from error
            self.damage = f"{self._kind}: {str(error) or 'it is cut off'}"
            return b""


class _Gunzip:
    """gzip of one or more members. Unlike the library's, it gives all that lies before the damage."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member = zlib.decompressobj(_GZIP_FRAMING)
        self._held = b""

    def read(self, most_bytes: int) -> bytes:
        """Raises EOFError where it is cut off, zlib.error where it is damaged."""
        while True:
            found = self._member.decompress(self._held, most_bytes)
            self._held = self._member.unconsumed_tail
            if found:
                return found
            if self._member.eof:
                self._held = self._member.unused_data.lstrip(b"\0")
                if not self._has_more():
                    return b""
                self._member = zlib.decompressobj(_GZIP_FRAMING)
            elif not self._has_more():
                raise EOFError

    def _has_more(self) -> bool:
        self._held = self._held or self._file.read(_INPUT_BYTES)
        return bool(self._held)


class Damaged(Exception):
    """Bytes that cannot be decompressed."""


def decompressed(body: bytes, most_bytes: int) -> bytes:
    """gzip or zstd content, anything else as it is. Raises Damaged, also where it would be larger than `most_bytes`."""
    if body[:2] == GZIP:
        found = _gunzipped(body, most_bytes)
    elif body[:4] == ZSTD:
        found = _unzstd(body, most_bytes)
    else:
        return body
    if len(found) > most_bytes:
        raise Damaged(f"holds more than {most_bytes >> 20} MiB")
    return found


def _gunzipped(body: bytes, most_bytes: int) -> bytes:
    import io

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
            return file.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Damaged(f"is damaged gzip: {error}") from None


def _unzstd(body: bytes, most_bytes: int) -> bytes:
    import pyarrow as pa

    try:
        return bytes(pa.CompressedInputStream(pa.BufferReader(body), "zstd").read(most_bytes + 1))
    except OSError as error:
        raise Damaged(f"is damaged zstd: {error}") from None
