"""The caller's place in a trace, from the W3C header `traceparent` (W3C Trace Context level 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    trace_id: bytes
    span_id: bytes
    sampled: bool


def parse_traceparent(header: str | None) -> TraceParent | None:
    """None for a missing header and for one that must be ignored: malformed, version ff, ids of zeros, version 00 with more."""
    match = _FORM.fullmatch((header or "").strip())
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace, 16) or not int(span, 16):
        return None
    return TraceParent(bytes.fromhex(trace), bytes.fromhex(span), bool(int(flags, 16) & 1))
