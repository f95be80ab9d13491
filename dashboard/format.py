"""Numbers as people read them: three significant digits and a unit. The only place that multiplies by 1000 or by 100.

`None` is "unknown" in sentences; tables pass `unknown="–"`.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

UNKNOWN = "unknown"
NARROW = "\N{NARROW NO-BREAK SPACE}"
NONE = "–"


def number(value: float | None, digits: int = 3, unknown: str = UNKNOWN) -> str:
    """Three significant digits with thousands separators, no trailing zeros: 13,000, 4.1, 0.0213."""
    if value is None or not math.isfinite(value):
        return unknown
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    text = f"{rounded:,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float | None, unknown: str = UNKNOWN) -> str:
    """A count of things, every digit: 12,960."""
    return unknown if value is None else f"{round(value):,}"


def counted(value: float | None, noun: str) -> str:
    """A count with its noun: 1 request, 12,960 requests."""
    return f"{count(value)} {noun}{'' if value is not None and round(value) == 1 else 's'}"


def compact(value: float | None, unknown: str = UNKNOWN) -> str:
    """A large number on a narrow place: 88.1k, 3.2M."""
    if value is None or not math.isfinite(value):
        return unknown
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return number(value / (1e3 if letter == "k" else size)) + letter
    return number(value)


def seconds(value: float | None, unknown: str = UNKNOWN) -> str:
    """A duration: µs and ms under a second, seconds up to ten minutes, then minutes and hours."""
    if value is None or not math.isfinite(value):
        return unknown
    size = abs(value)
    if value == 0:
        return f"0{NARROW}s"
    for below, scale, unit in ((9.995e-4, 1e6, "µs"), (0.9995, 1e3, "ms"), (600.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if size < below:
            return f"{number(value * scale)}{NARROW}{unit}"
    return f"{number(value / 3600)}{NARROW}h"


def share(value: float | None, unknown: str = UNKNOWN) -> str:
    """A ratio as a percentage: 61 %, 14.2 %, 0.02 %. What is not quite all, or not quite nothing, never says 100 or 0."""
    if value is None or not math.isfinite(value):
        return unknown
    if 0.9995 <= value < 1:
        return f">99.9{NARROW}%"
    if 0 < value < 1e-4:
        return f"<0.01{NARROW}%"
    return f"{number(value * 100)}{NARROW}%"


def percent(value: float | None, unknown: str = UNKNOWN) -> str:
    """A ratio as whole percent where a third digit would be noise."""
    if value is None or not math.isfinite(value):
        return unknown
    if 0 < value < 0.1:
        return share(value) if value < 0.001 else f"{number(value * 100, 2)}{NARROW}%"
    return f"{round(value * 100)}{NARROW}%"


def rate(value: float | None, unit: str, unknown: str = UNKNOWN) -> str:
    return unknown if value is None else f"{compact(value)}{NARROW}{unit}"


def size(value: float | None, unknown: str = UNKNOWN) -> str:
    """Bytes in powers of ten."""
    if value is None:
        return unknown
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= scale:
            return f"{number(value / scale)}{NARROW}{unit}"
    return f"{number(value)}{NARROW}B"


def change(now: float | None, before: float | None) -> str | None:
    """Relative change with arrow and sign: ▲ +12 %. None where there is nothing to compare with."""
    if now is None or before is None or before == 0:
        return None
    ratio = now / before - 1
    if abs(ratio) < 0.005:
        return f"≈{NARROW}same"
    if ratio >= 9:
        return f"▲ ×{number(now / before, 2)}"
    sign = "▲ +" if ratio > 0 else "▼ −"
    return f"{sign}{number(abs(ratio) * 100, 2)}{NARROW}%"


def quantity(value: object, unit: str | None) -> str:
    """A signal of the vocabulary in its unit (`ratio`, `seconds`, `tokens`, `count`, `bytes`, `per second`, `word`, `truth`)."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    kind = (unit or "").strip().lower()
    if kind in ("ratio", "share", "%"):
        return share(value)
    if kind in ("seconds", "s", "second"):
        return seconds(value)
    if kind in ("bytes", "byte"):
        return size(value)
    if kind in ("count", "", "requests"):
        return number(value)
    if kind == "per second":
        return f"{number(value)}/s"
    if kind in ("tokens per second", "tokens/s"):
        return f"{compact(value)}{NARROW}tok/s"
    return f"{compact(value)}{NARROW}{unit}"


def moment(unix_ns: int | None, *, day: bool = False, fraction: bool = False, unknown: str = UNKNOWN) -> str:
    """UTC wall clock: 14:03:40, with the day Nov 29 14:03:40, with milliseconds 14:03:40.204."""
    if unix_ns is None:
        return unknown
    try:
        when = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    except (OverflowError, ValueError, OSError):
        return unknown
    text = when.strftime("%b %-d %H:%M:%S" if day else "%H:%M:%S")
    return f"{text}.{unix_ns // 10**6 % 1000:03d}" if fraction else text


def day(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%d")


def timestamp(unix_ns: int) -> str:
    """RFC 3339 in UTC, as the URL takes it."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def interval(from_unix_ns: int, to_unix_ns: int, now_unix_ns: int | None = None) -> str:
    """Both ends on the clock, with day and year only where they are needed: Nov 29, 13:59:00 – 14:14:00. The year stands
    where the ends differ in it, or where it is not that of `now_unix_ns`."""
    first, last = day(from_unix_ns), day(to_unix_ns)
    years = {first[:4], last[:4]} | (set() if now_unix_ns is None else {day(now_unix_ns)[:4]})
    written = "%b %-d %Y" if len(years) > 1 else "%b %-d"
    start, end = (
        datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime(written) for unix_ns in (from_unix_ns, to_unix_ns)
    )
    if first == last:
        return f"{start}, {moment(from_unix_ns)} – {moment(to_unix_ns)}"
    return f"{start} {moment(from_unix_ns)} – {end} {moment(to_unix_ns)}"


def age(value_s: float | None) -> str:
    """How old something is: 3 s, 4 min, 2 h, 12 d."""
    if value_s is None:
        return UNKNOWN
    past = max(value_s, 0.0)
    for below, scale, unit in ((90.0, 1.0, "s"), (5400.0, 60.0, "min"), (129600.0, 3600.0, "h")):
        if past < below:
            return f"{round(past / scale)}{NARROW}{unit}"
    return f"{round(past / 86400)}{NARROW}d"
