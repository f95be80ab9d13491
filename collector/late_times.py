"""What final rows are to be attributed anew, as it is noted in the store: the touched time of each instance. Nothing else would say so
after a crash."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from phasewise.collector.cold import Reading, Statements
from phasewise.collector.lake import HOUR_NS

LATE = "late"  # among the positions
Span = tuple[int, int]  # Unix nanoseconds, both included


def read_late(statements: Reading) -> dict[str, Span]:
    """By instance."""
    found = statements.query("SELECT position FROM main.positions WHERE name = ?", [LATE])["position"]
    told = json.loads(found[0]) if len(found) else {}
    return {str(name): (int(low), int(high)) for name, (low, high) in told.items()}


def note_late(statements: Statements, late: Mapping[str, Span]) -> None:
    """These, and no others; part of the caller's transaction."""
    statements.execute("DELETE FROM main.positions WHERE name = ?", [LATE])
    if late:
        statements.execute("INSERT INTO main.positions VALUES (?, ?)", [LATE, json.dumps(late, sort_keys=True)])


def forget_late(statements: Statements, instances: Collection[str]) -> None:
    """Drop what is noted of instances that have no rows any more. A refresher must be made anew after."""
    note_late(statements, {name: span for name, span in read_late(statements).items() if name not in instances})


def late_hours(statements: Reading) -> set[int]:
    """Hours (whole ones since 1970) with such time."""
    return {hour for low, high in read_late(statements).values() for hour in range(low // HOUR_NS, high // HOUR_NS + 1)}
