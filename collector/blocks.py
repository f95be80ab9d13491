"""The blocks of time in which rows become final, and how much around a block its attribution looks at.

Which cause a row is finally booked to may depend on what was sent, never on when it arrived: live in any batching, or as one import.
So rows become final by whole blocks, and blocks and their surroundings follow from how many rows end in each slot of the clock. A
block ends with the slot in which it reaches BLOCK_ROWS rows, and with its span of the clock at the latest. Before it, attribution sees
as many slots as hold what overlaps it and enough rows to calibrate with; after it, the rows that began before its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SLOT_NS = 5 * 10**9
SPAN_NS = 300 * 10**9
BLOCK_ROWS = 100_000  # attributed at once: their number says how much memory that takes
CALIBRATING_ROWS = 1_000
LOOK_BACK_NS = 3600 * 10**9
# Attribution costs by the rows in sight, so of an overlap that holds more rows only the nearest are looked at.
OVERLAP_ROWS, OVERLAP_RATIO = 20_000, 0.25
# Something late speaks for a minute around itself, as a sample does.
LATE_BEFORE_NS, LATE_AFTER_NS = 60 * 10**9, 60 * 10**9


@dataclass(frozen=True, slots=True)
class Slot:
    """The rows of a replica that end in SLOT_NS from `start_unix_ns`; first_arrival_unix_ns: of the earliest of them; open_rows: those
    of the instance in question that are not final."""

    start_unix_ns: int
    rows: int
    first_arrival_unix_ns: int
    open_rows: int


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that end in [start_unix_ns, end_unix_ns); from look_unix_ns on attribution sees the rows before them. rows: all of these."""

    start_unix_ns: int
    end_unix_ns: int
    look_unix_ns: int
    rows: int
    open_rows: int


def span_start(unix_ns: int) -> int:
    return unix_ns // SPAN_NS * SPAN_NS


def span_end(unix_ns: int) -> int:
    return span_start(unix_ns) + SPAN_NS


def slot_start(unix_ns: int) -> int:
    return unix_ns // SLOT_NS * SLOT_NS


def blocks_of(slots: Sequence[Slot], from_unix_ns: int) -> Iterator[Block]:
    """The blocks with rows from the span of `from_unix_ns` on. slots: those with rows, in order of time, to the end of a span, from
    LOOK_BACK_NS before the first block (or later where `enough` says so)."""
    first: int | None = None
    rows = 0
    for place, slot in enumerate(slots):
        if slot.start_unix_ns < span_start(from_unix_ns):
            continue
        first = place if first is None else first
        rows += slot.rows
        span = span_start(slot.start_unix_ns)
        is_last = place + 1 == len(slots) or span_start(slots[place + 1].start_unix_ns) != span
        if rows < BLOCK_ROWS and not is_last:
            continue
        end = slot.start_unix_ns + SLOT_NS if rows >= BLOCK_ROWS else span + SPAN_NS
        own = slots[first : place + 1]
        yield _block(slots[:first], own, rows, end)
        first, rows = None, 0


def _block(before: Sequence[Slot], own: Sequence[Slot], rows: int, end: int) -> Block:
    look, seen = _look(before, own, rows)
    return Block(own[0].start_unix_ns, end, look, rows + seen, sum(slot.open_rows for slot in own))


def _look(before: Sequence[Slot], own: Sequence[Slot], rows: int) -> tuple[int, int]:
    """From when on rows before a block are seen, and how many there are."""
    overlap = min(slot.first_arrival_unix_ns for slot in own)
    most = max(OVERLAP_ROWS, round(OVERLAP_RATIO * rows))
    look = own[0].start_unix_ns
    seen = 0
    for slot in reversed(before):
        is_near = slot.start_unix_ns + SLOT_NS > overlap or seen < CALIBRATING_ROWS
        if not is_near or seen + slot.rows > most or slot.start_unix_ns < own[0].start_unix_ns - LOOK_BACK_NS:
            break
        look, seen = slot.start_unix_ns, seen + slot.rows
    return look, seen


def enough(before: Sequence[Slot], block_start_unix_ns: int) -> bool:
    """Whether no block from `block_start_unix_ns` on looks further back than to the first of these slots."""
    return sum(slot.rows for slot in before if slot.start_unix_ns < block_start_unix_ns) > OVERLAP_ROWS


def concerns(block: Block, low_unix_ns: int, high_unix_ns: int) -> bool:
    """Whether something late of that time may change what is said of the rows of a block; of no time where low > high."""
    near = block.end_unix_ns > low_unix_ns - LATE_BEFORE_NS and block.start_unix_ns <= high_unix_ns + LATE_AFTER_NS
    looks_back = block.start_unix_ns > high_unix_ns and block.look_unix_ns <= high_unix_ns
    return low_unix_ns <= high_unix_ns and (near or looks_back)
