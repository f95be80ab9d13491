"""Rollups of rows that a test wrote into the store itself."""

from __future__ import annotations

from phasewise.collector.rollups import DirtyRollups
from phasewise.collector.transaction import Transaction


def roll_up(transaction: Transaction) -> None:
    """Make the rollups of all hot requests, whatever the time."""
    dirty = DirtyRollups()
    dirty.add(transaction.query("SELECT finished_unix_ns FROM requests"), now_ns=2**61)
    dirty.rebuild_all(transaction)
