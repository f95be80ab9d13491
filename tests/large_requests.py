"""Requests of any size, and small ones that become large."""

from __future__ import annotations

import zlib

from otlp_messages import span_message, trace_request

MIB = 1 << 20


def gzip_of_zeros(mebibytes: int) -> bytes:
    """A true gzip stream; each full flush makes the same bytes, so that a GiB costs no time to make."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    check = 0
    for _ in range(mebibytes):
        check = zlib.crc32(bytes(MIB), check)
    end = packer.flush() + check.to_bytes(4, "little") + (mebibytes * MIB & 0xFFFFFFFF).to_bytes(4, "little")
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + first + block * (mebibytes - 1) + end


def padded_request(size: int) -> bytes:
    """A valid request of exactly that size: one span, and a field that no OTLP release knows."""
    body = trace_request(span_message()).SerializeToString()
    rest = size - len(body) - 6
    length = bytearray()
    left = rest
    while len(length) < 4:
        length.append(left & 0x7F | (0x80 if len(length) < 3 else 0))
        left >>= 7
    return body + b"\xfa\x06" + bytes(length) + bytes(rest)
