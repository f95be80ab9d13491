"""How much one question may ask for. What DuckDB itself bounds (time, memory, how many at once) stands in the store's readers."""

from __future__ import annotations

from phasewise.rules.errors import InputError

# A long range over few rows costs little, and one span with a clock in the year 2099 must not close the window "everything": so the
# range counts only as far as there are data, and only where they are many.
MOST_DAYS = 31
MOST_ROWS_OF_ANY_RANGE = 1_000_000
MOST_GROUPS = 10_000
MOST_SERIES = 100
MOST_POINTS = 5_000
_DAY_NS = 86_400 * 10**9


def require_range(first_unix_ns: int | None, last_unix_ns: int | None, rows_n: int) -> None:
    """Refuses a window by what it holds: its first and last row, and how many. InputError says what to ask instead."""
    if first_unix_ns is None or last_unix_ns is None or rows_n <= MOST_ROWS_OF_ANY_RANGE:
        return
    days = (last_unix_ns - first_unix_ns) / _DAY_NS
    if days > MOST_DAYS:
        problem = f"the window holds {rows_n:,} requests of {days:.0f} days"
        raise InputError("from", "", problem, f"ask for at most {MOST_DAYS} days, or filter down to a million requests")


def require_groups(groups_n: int) -> None:
    """Refuses a division into more groups than anybody could read."""
    if groups_n > MOST_GROUPS:
        problem = f"divides the requests into {groups_n:,} groups"
        raise InputError("by", "", problem, f"at most {MOST_GROUPS:,} are answered: take fewer dimensions, or filter")
