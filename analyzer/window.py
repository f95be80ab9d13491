"""Windows, filters and service-level objectives as users write them, in URLs and on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from phasewise.rules.errors import InputError

_UNIT_NS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9, "w": 7 * 86_400 * 10**9}
_RELATIVE = re.compile(r"now(?:-([0-9]+)([smhdw]))?")
_DIGITS = re.compile(r"[0-9]+")
_MOST_DIGITS = 19  # of 64 bits; longer texts must not even become numbers
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_UNIX_NS = 4_102_444_800 * 10**9  # 2100: what is added to such a moment still fits the store's 64 bits
_RANGE = "use a time between 1970 and 2100; 0 is the beginning"
_SHOWN = 80
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
    """Unix nanoseconds of `now`, `now-15m`, RFC 3339, or digits (up to 11: s, up to 14: ms, else ns; 0 is the beginning).

    InputError, naming `option`, for anything else and for moments before 1970 or after 2100.
    """
    found = _unix_ns(text.strip(), now_unix_ns)
    if found is None:
        remedy = "use now-15m, 2026-11-29T14:02:00Z, or Unix seconds, ms or ns"
        raise InputError(option, _quoted(text), "is not a time", remedy)
    if not 0 <= found <= LATEST_UNIX_NS:
        where = "before 1970" if found < 0 else "after 2100"
        raise InputError(option, _quoted(text), f"lies {where}", _RANGE)
    return found


def _unix_ns(text: str, now_unix_ns: int) -> int | None:
    """The moment, wherever it lies; None where the text is none."""
    if match := _RELATIVE.fullmatch(text):
        amount, unit = match.groups()
        if amount is None:
            return now_unix_ns
        return -1 if len(amount) > _MOST_DIGITS else now_unix_ns - int(amount) * _UNIT_NS[unit]
    if _DIGITS.fullmatch(text):
        scale = 10**9 if len(text) <= 11 else 10**6 if len(text) <= 14 else 1
        return LATEST_UNIX_NS + 1 if len(text) > _MOST_DIGITS else int(text) * scale
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1) * 1000


def _quoted(text: str) -> str:
    """A text as an error shows it: no longer than somebody reads."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def parse_window(start: str | None, end: str | None, now_unix_ns: int) -> Window:
    """A window from two texts; without them the last 15 minutes."""
    to_ns = parse_time(end, now_unix_ns, "to") if end else now_unix_ns
    from_ns = parse_time(start, now_unix_ns, "from") if start else max(0, to_ns - 15 * _UNIT_NS["m"])
    if from_ns >= to_ns:
        raise InputError("from", _quoted(start or ""), f"lies not before its end {_quoted(end or 'now')}", "swap them")
    return Window(from_ns, to_ns)


def parse_filter(text: str) -> Filter:
    """`key:op:value`; `exists` takes true or false."""
    key, _, rest = text.partition(":")
    op, colon, value = rest.partition(":")
    if not key or op not in OPERATORS or not colon:
        raise InputError("filter", _quoted(text), "is not key:op:value", f"op is one of {', '.join(OPERATORS)}")
    if "\0" in text or _unpaired(text):
        raise InputError("filter", _quoted(text), "holds bytes that are no text", "write it in UTF-8")
    return Filter(key, op, value)


def _unpaired(text: str) -> bool:
    """A command line in another encoding leaves surrogates behind, which no store can hold."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(ms|s|m)?")
_SCALE_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}
METRICS = ("ttft", "tpot", "itl", "e2e", "queue")


def parse_slo(text: str) -> tuple[Objective, ...]:
    """`ttft:2s,itl:80ms`; `client.ttft:3s` sets it on the client boundary; no unit means seconds. A limit is more than 0."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, limit = part.partition(":")
        boundary, _, metric = name.rpartition(".")
        match = _DURATION.fullmatch(limit)
        limit_s = float(match[1]) * _SCALE_S[match[2]] if match else 0.0
        if metric not in METRICS or boundary not in ("", "engine", "client") or limit_s <= 0:
            remedy = f"metric is one of {', '.join(METRICS)}, limit like 2s or 80ms"
            raise InputError("slo", _quoted(part), "is not metric:limit", remedy)
        found.append(Objective(metric, limit_s, boundary or "engine"))
    return tuple(found)
