"""Windows, filters and service-level objectives as users write them, in URLs and on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from phasewise.rules.errors import InputError

_UNIT_NS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9, "w": 7 * 86_400 * 10**9}
_RELATIVE = re.compile(r"now(?:-(\d+)([smhdw]))?$")
OPERATORS = ("eq", "ne", "in", "gt", "lt", "ge", "le", "exists", "prefix")


@dataclass(frozen=True, slots=True)
class Window:
    """Half-open interval [from, to) in Unix nanoseconds."""

    from_unix_ns: int
    to_unix_ns: int

    @property
    def seconds(self) -> float:
        return (self.to_unix_ns - self.from_unix_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Filter:
    """key:op:value of the URL; `in` takes values separated by commas."""

    key: str
    op: str
    value: str


@dataclass(frozen=True, slots=True)
class Objective:
    """One limit: metric (ttft, tpot, itl, e2e, queue), its limit in seconds, and whose clock it is on."""

    metric: str
    limit_s: float
    boundary: str = "engine"  # or client

    @property
    def text(self) -> str:
        return f"{self.metric} {self.limit_s:g} s"


def parse_time(text: str, now_unix_ns: int, option: str = "time") -> int:
    """Unix nanoseconds of `now`, `now-15m`, RFC 3339, or digits (up to 11: s, up to 14: ms, else ns; 0 is the beginning)."""
    cleaned = text.strip()
    if match := _RELATIVE.match(cleaned):
        amount, unit = match.groups()
        return now_unix_ns - (int(amount) * _UNIT_NS[unit] if amount else 0)
    if cleaned.isdigit():
        scale = 10**9 if len(cleaned) <= 11 else 10**6 if len(cleaned) <= 14 else 1
        return int(cleaned) * scale
    try:
        moment = datetime.fromisoformat(cleaned.replace("Z", "+00:00"))
    except ValueError:
        raise InputError(
            option, repr(text), "is not a time", "use now-15m, 2026-11-29T14:02:00Z, or Unix seconds, ms or ns"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = int(moment.timestamp())
    return whole * 10**9 + moment.microsecond * 1000


def parse_window(start: str | None, end: str | None, now_unix_ns: int) -> Window:
    """A window from two texts; without them the last 15 minutes."""
    to_ns = parse_time(end, now_unix_ns, "to") if end else now_unix_ns
    from_ns = parse_time(start, now_unix_ns, "from") if start else to_ns - 15 * _UNIT_NS["m"]
    if from_ns >= to_ns:
        raise InputError("from", start or "", f"lies not before its end {end or 'now'}", "swap them")
    return Window(from_ns, to_ns)


def parse_filter(text: str) -> Filter:
    """`key:op:value`; `exists` takes true or false."""
    key, _, rest = text.partition(":")
    op, colon, value = rest.partition(":")
    if not key or op not in OPERATORS or not colon:
        raise InputError("filter", repr(text), "is not key:op:value", f"op is one of {', '.join(OPERATORS)}")
    return Filter(key, op, value)


_DURATION = re.compile(r"^([0-9.]+)(ms|s|m)?$")
METRICS = ("ttft", "tpot", "itl", "e2e", "queue")


def parse_slo(text: str) -> tuple[Objective, ...]:
    """`ttft:2s,itl:80ms`; `client.ttft:3s` sets it on the client boundary; no unit means seconds."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, limit = part.partition(":")
        boundary, _, metric = name.rpartition(".")
        match = _DURATION.match(limit)
        if metric not in METRICS or not match or boundary not in ("", "engine", "client"):
            raise InputError(
                "slo",
                repr(part),
                "is not metric:limit",
                f"metric is one of {', '.join(METRICS)}, limit like 2s or 80ms",
            )
        scale = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0}[match[2]]
        found.append(Objective(metric, float(match[1]) * scale, boundary or "engine"))
    return tuple(found)
