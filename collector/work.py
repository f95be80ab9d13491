"""What attribution has to do for one instance, and why it is its turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from phasewise.collector.failed_blocks import FailedBlocks

NONE = (2**62, -(2**62))
PORTION_ROWS = 20_000  # stored rows that are attributed at once: a pass looks at the clock after each portion
REST_RATIO = 3.0  # attribution rests that many times as long as it took


@dataclass(slots=True)
class Work:
    """raw: when the rows without attribution finished; touched: the time whose rows are to be attributed anew; late: that of touched
    rows which are final; all as (low, high), empty where low > high."""

    raw: tuple[int, int] = NONE
    touched: tuple[int, int] = NONE
    late: tuple[int, int] = NONE
    oldest_provisional_unix_ns: int = 2**62
    served_ns: int = 0
    refreshed_ns: int = 0
    finished_ns: int = 0  # when blocks were looked for last
    looked_unix_ns: int = 0  # and until when
    late_done_unix_ns: int = 0  # blocks of final rows that begin before this have seen what is late
    final_until_unix_ns: int = 0  # the newest end of a row made final, or of a sealed hour
    failed: FailedBlocks = field(default_factory=FailedBlocks)


@dataclass(frozen=True, slots=True)
class Turn:
    """Why an instance is due. raw: rows without attribution; soon: neighbours as well; ripe: rows become final, by blocks that have
    ended before until_unix_ns."""

    until_unix_ns: int
    raw: bool
    soon: bool
    ripe: bool


def is_some(span: tuple[int, int]) -> bool:
    return span[0] <= span[1]


def around(span: tuple[int, int], low: int, high: int) -> tuple[int, int]:
    return min(span[0], low), max(span[1], high)
