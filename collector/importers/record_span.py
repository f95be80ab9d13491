"""A record of a request as the span of its time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from phasewise.collector.attributes import Value, to_json
from phasewise.collector.importers.record import Unusable
from phasewise.collector.records import Span

_LAST_UNIX_NS = (1 << 63) - 1
_TEXT = 256  # characters of an identifier or a word


def span_of(scope: str, identity: str, start_s: float, end_s: float, attributes: Mapping[str, Value]) -> Span:
    """A span `request` of this scope; identity: what tells the record from all others. Raises Unusable."""
    if not (0 <= start_s <= end_s and end_s * 1e9 < _LAST_UNIX_NS):
        raise Unusable(
            "", f"begins at {start_s!r} s and ends at {end_s!r} s", "write the times as the engine gives them"
        )
    digest = hashlib.blake2b(f"{scope}/{identity}".encode("utf-8", "replace"), digest_size=24).hexdigest()
    known = {name: value for name, value in attributes.items() if value is not None}
    return Span(
        trace_id=digest[:32],
        span_id=digest[32:],
        name="request",
        kind=1,
        start_unix_ns=round(start_s * 1e9),
        end_unix_ns=round(end_s * 1e9),
        scope_name=scope,
        attributes=to_json(known),
    )


def number(value: object) -> float | int | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else None
    return value if math.isfinite(value) else None


def word(value: object) -> str | None:
    """A short text (numbers are written out), else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return value.encode("utf-8", "replace").decode()[:_TEXT] if isinstance(value, str) and value else None


def between(record: Mapping[str, object], later: str, earlier: str) -> float | None:
    """Seconds between two times of one clock; None where one is missing (or 0, which is how engines write that)."""
    end, start = number(record.get(later)), number(record.get(earlier))
    return round(end - start, 9) if end is not None and start is not None and end > 0 and start > 0 else None


def differences(record: Mapping[str, object], pairs: tuple[tuple[str, str], ...]) -> dict[str, Value]:
    """`later - earlier` for each pair, under that name."""
    return {f"{later} - {earlier}": between(record, later, earlier) for later, earlier in pairs}
