"""What any client's record says of one call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """start_unix_ns is nanoseconds since the run began where `is_relative`; gaps_s: between the chunks the client received."""

    start_unix_ns: int
    e2e_s: float
    end_unix_ns: int | None = None  # where the record states its end; tools may count e2e_s from later than the start
    ttft_s: float | None = None
    tpot_s: float | None = None  # where the tool states it: over the tokens that it counted itself
    gaps_s: list[float] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    request_id: str | None = None
    trace_id: str | None = None
    model: str | None = None
    outcome: str = "ok"
    is_relative: bool = False


LONGEST_S = 4.5e9  # of a duration, and of a time since 1970: 64 bits of nanoseconds hold two of them, and no more


class Unusable(Exception):
    """A record that cannot be used: which field, why, and what to do."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


def seconds(value: object, field: str) -> float:
    """A duration of at least 0; raises Unusable otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LONGEST_S:
        raise Unusable(
            field, f"is {value!r:.80}, not a duration", "write a number of at least 0, in the unit that the tool writes"
        )
    return float(value)


def gaps(value: object, field: str, scale: float = 1.0) -> list[float] | None:
    """Durations between chunks; None where there are none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise Unusable(field, f"is {type(value).__name__}, not a list", "write the gaps between chunks")
    return [seconds(item, field) * scale for item in value]


def whole(value: object) -> int | None:
    """A count, or None where there is none to be had."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        return None
    return int(value)
