"""Protobuf on the wire: finding the parts of an OTLP request without decoding it as a whole, and repairing bad text.

The three OTLP requests share one shape (resource groups, in them a resource and scope groups, in them a scope and items), so
one bounds-checked walk serves all. Items are decoded one by one: a broken span costs itself, not its neighbours, and the
memory of a request stays near its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from phasewise.rules.errors import InputError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DEPTH = 70  # of messages; protobuf itself refuses at 100
_MAX_PARTS = 250_000  # groups, scopes, items and unknown fields of one request; a Collector batches 8,192 spans
_REPAIRABLE_BYTES = 1 << 20  # of one item: repairing walks every field of it
_REPAIR_BYTES = 64 * 1024  # of one damaged text; replacement characters are three bytes each

M = TypeVar("M", bound=Message)


class Malformed(InputError):
    """The body is not what it claims to be: answered with 400 or INVALID_ARGUMENT, never retried."""

    def __init__(self, problem: str) -> None:
        super().__init__("OTLP request", "body", problem, "send an OTLP Export request as protobuf or OTLP/JSON")
        self.problem = problem


class TooLarge(InputError):
    """The request is over a limit: answered with 413 or RESOURCE_EXHAUSTED, never retried."""

    def __init__(self, problem: str) -> None:
        super().__init__("OTLP request", "body", problem, "send smaller batches")


@dataclass(frozen=True, slots=True)
class Group:
    """One resource and scope, and the items under them, as bytes still to be decoded."""

    resource: bytes
    scope: bytes
    items: list[bytes]


def groups(body: bytes) -> Iterator[Group]:
    """Groups of an ExportTrace-, ExportMetrics- or ExportLogsServiceRequest, in the order they came.

    Raises Malformed, and TooLarge for more parts than any sender batches: each costs time, however few bytes it has.
    """
    parts = 0
    for number, wire, start, end in _fields(body, 0, len(body)):
        parts = _counted(parts)
        if number != 1 or wire != _BYTES:
            continue
        resource = []  # repeated parts of one message merge by concatenation
        scopes = []
        for inner, inner_wire, begin, stop in _fields(body, start, end):
            parts = _counted(parts)
            if inner_wire == _BYTES and inner == 1:
                resource.append(body[begin:stop])
            elif inner_wire == _BYTES and inner == 2:
                scopes.append((begin, stop))
        for begin, stop in scopes:
            scope = []
            items = []
            for inner, inner_wire, first, last in _fields(body, begin, stop):
                parts = _counted(parts)
                if inner_wire == _BYTES and inner == 2:
                    items.append(body[first:last])
                elif inner_wire == _BYTES and inner == 1:
                    scope.append(body[first:last])
            yield Group(b"".join(resource), b"".join(scope), items)


def _counted(parts: int) -> int:
    if parts >= _MAX_PARTS:
        raise TooLarge(f"it has more than {_MAX_PARTS:,} parts")
    return parts + 1


def decoded(kind: type[M], data: bytes) -> M | None:
    """The message, if need be with invalid UTF-8 replaced by U+FFFD and too deep nesting cut; None where that cannot help."""
    try:
        return kind.FromString(data)
    except DecodeError:
        pass
    if len(data) > _REPAIRABLE_BYTES:
        return None
    try:
        return kind.FromString(_repaired(cast(Descriptor, kind.DESCRIPTOR), data, 0, len(data), 0))
    except (DecodeError, Malformed):
        return None


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Malformed("a number in it is cut off or too long")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, and where the value starts and ends; for varints and fixed sizes that is their bytes."""
    while at < end:
        tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == _BYTES:
            length, at = _varint(data, at, end)
            stop = at + length
        elif wire == _VARINT:
            _, stop = _varint(data, at, end)
        elif wire == _FIXED64:
            stop = at + 8
        elif wire == _FIXED32:
            stop = at + 4
        else:
            raise Malformed(f"it has a field of wire type {wire}, which OTLP does not use")
        if stop > end:
            raise Malformed("it is cut off: a part is announced longer than what came")
        if tag < 8:
            raise Malformed("it has a field numbered 0")
        yield tag >> 3, wire, at, stop
        at = stop


@cache
def _texts_and_messages(descriptor: Descriptor) -> dict[int, Descriptor | None]:
    """Field number to its message type, None for text; numbers of other fields are left out."""
    found: dict[int, Descriptor | None] = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            found[field.number] = None
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            found[field.number] = field.message_type
    return found


def _repaired(descriptor: Descriptor, data: bytes, start: int, end: int, depth: int) -> bytes:
    known = _texts_and_messages(descriptor)
    parts = []
    copied = start  # everything before is in parts
    begin = start
    for number, wire, first, last in _fields(data, start, end):
        if wire == _BYTES and number in known:
            inner = known[number]
            old = data[first:last]
            if inner is None:
                new = _valid_text(old)
            elif depth >= _DEPTH:
                new = b""
            else:
                new = _repaired(inner, data, first, last, depth + 1)
            if new != old:
                parts += [data[copied:begin], _encoded_varint(number << 3 | _BYTES), _encoded_varint(len(new)), new]
                copied = last
        begin = last
    parts.append(data[copied:end])
    return b"".join(parts)


def _valid_text(data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError:
        return data[:_REPAIR_BYTES].decode("utf-8", "replace").encode()
    return data


def _encoded_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
