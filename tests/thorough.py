"""How many examples a property gets whose examples are costly: all of them beside the slow tests, a quarter where those are left out."""

from __future__ import annotations

_PART = 4
_left_out = False


def leave_out(slow: bool) -> None:
    """Called once, before any test is read (conftest.py)."""
    global _left_out
    _left_out = slow


def examples(count: int) -> int:
    return count // _PART if _left_out else count
