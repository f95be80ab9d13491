"""OTLP attribute values to JSON text, within limits, and what had to be changed for it.

Bytes become base64 text; NaN and the infinities become the texts "NaN", "Infinity" and "-Infinity" (as in protobuf's JSON
mapping), because JSON has no such numbers; an empty value is null. Of a key that comes twice the last value wins.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from phasewise.collector.limits import KNOWN_PREFIXES, SPAN_LIMITS

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
to_sorted_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True).encode

_CUT_MARK = re.compile(r"…\[cut from (\d+) bytes\]$")


class Notes:
    """What was changed on the way in the item at hand: its flags, each once, in the order they arose."""

    __slots__ = ("_flags",)

    def __init__(self) -> None:
        self._flags: list[str] = []

    def add(self, reason: str) -> None:
        if reason not in self._flags:
            self._flags.append(reason)

    def take(self) -> list[str]:
        """The flags since the last call."""
        flags, self._flags = self._flags, []
        return flags


def read_attributes(pairs: Iterable[KeyValue], notes: Notes, limit: int = SPAN_LIMITS.attributes) -> dict[str, Value]:
    """Attributes as plain values, in the order they came.

    Notes: `duplicate_key`, `key_dropped` (empty or over 256 bytes), `attributes_cut` (too many), `truncated` (value too long).
    """
    found: dict[str, Value] = {}
    for pair in pairs:
        key = pair.key
        if len(found) >= limit and key not in found and not _has_room_for(key, len(found), limit):
            notes.add("attributes_cut")
            continue
        if not key or (len(key) > SPAN_LIMITS.key_bytes // 4 and len(key.encode()) > SPAN_LIMITS.key_bytes):
            notes.add("key_dropped")
            continue
        if key in found:
            notes.add("duplicate_key")
        value = pair.value
        which = value.WhichOneof("value")
        if which == "double_value":
            found[key] = _number(value.double_value)
        elif which == "int_value":
            found[key] = value.int_value
        elif which == "string_value":
            found[key] = cut_text(value.string_value, notes)
        else:
            found[key] = _bounded(key, _plain(value, which, notes, 0), notes)
    return found


def cut_text(text: str, notes: Notes, limit_bytes: int = SPAN_LIMITS.value_bytes) -> str:
    """The text, or its beginning and a mark with its whole length."""
    if len(text) <= limit_bytes // 4:
        return text
    data = text.encode()
    if len(data) <= limit_bytes:
        return text
    notes.add("truncated")
    return f"{data[:limit_bytes].decode('utf-8', 'ignore')}…[cut from {len(data)} bytes]"


def whole_length_bytes(text: str) -> int:
    """Bytes a text had before `cut_text`."""
    mark = _CUT_MARK.search(text)
    return int(mark[1]) if mark else len(text.encode())


def _has_room_for(key: str, count: int, limit: int) -> bool:
    return count < limit + SPAN_LIMITS.known_attributes and key.startswith(KNOWN_PREFIXES)


def _number(value: float) -> Value:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: AnyValue, which: str | None, notes: Notes, depth: int) -> Value:
    if which == "string_value":
        return cut_text(value.string_value, notes)
    if which == "int_value":
        whole: int = value.int_value
        return whole
    if which == "double_value":
        return _number(value.double_value)
    if which == "bool_value":
        return bool(value.bool_value)
    if which == "bytes_value":
        return cut_text(base64.b64encode(value.bytes_value).decode("ascii"), notes)
    if which not in ("array_value", "kvlist_value"):
        return None
    if depth >= SPAN_LIMITS.depth:
        notes.add("too_deep")
        return None
    if which == "array_value":
        return [_plain(item, item.WhichOneof("value"), notes, depth + 1) for item in value.array_value.values]
    members: dict[str, Value] = {}
    for pair in value.kvlist_value.values:
        if pair.key in members:
            notes.add("duplicate_key")
        members[pair.key] = _plain(pair.value, pair.value.WhichOneof("value"), notes, depth + 1)
    return members


def _bounded(key: str, value: Value, notes: Notes) -> Value:
    """Lists and maps whose JSON text is too long become the beginning of that text, with the mark."""
    if not isinstance(value, list | dict):
        return value
    limit = SPAN_LIMITS.value_bytes
    if key.startswith("phasewise."):
        limit = SPAN_LIMITS.own_list_bytes
    elif key.startswith("gen_ai."):
        limit = SPAN_LIMITS.list_bytes
    text = to_json(value)
    return value if len(text) <= limit // 4 or len(text.encode()) <= limit else cut_text(text, notes, limit)
