"""Units as engines and files write them, turned into SI. The only place that knows a factor of 1000."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

SECONDS: Mapping[str, float] = MappingProxyType(
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
)
BYTES: Mapping[str, float] = MappingProxyType(
    {
        "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
        "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
    }
)  # fmt: skip
RATIOS: Mapping[str, float] = MappingProxyType({"ratio": 1.0, "percent": 0.01, "%": 0.01})
COUNTS: Mapping[str, float] = MappingProxyType(
    {"count": 1.0, "tokens": 1.0, "blocks": 1.0, "Hz": 1.0, "MHz": 1e6, "W": 1.0, "mW": 1e-3, "J": 1.0, "mJ": 1e-3}
)

# `1.5s`, `250ms`, `13µs`: Rust's Debug of a Duration, Go's String of one, with a single unit.
_DURATION = re.compile(r"^([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(ns|µs|μs|us|ms|s|min|h)$")
UNITS: Mapping[str, float] = MappingProxyType({**SECONDS, **BYTES, **RATIOS, **COUNTS})


def factor(unit: str) -> float | None:
    """What a number in `unit` is multiplied by to be in seconds, bytes, a ratio or a plain count; None when unknown."""
    return UNITS.get(unit)


def to_seconds(value: float, unit: str) -> float:
    """`value` in seconds. Raises KeyError for a unit that is none of time: rule files are checked before."""
    return value * SECONDS[unit]


def parse_duration_s(text: str) -> float | None:
    """Seconds of a text with one unit suffix (`12.5ms`, `1.2s`, `800µs`); None when it is anything else.

    A number without a unit is refused: engines that send such text always send the suffix, and a guess would be wrong by
    a factor of 1000.
    """
    match = _DURATION.match(text.strip())
    if match is None:
        return None
    seconds = float(match[1]) * SECONDS[match[2]]
    return seconds if math.isfinite(seconds) else None
