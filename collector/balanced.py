"""Addresses behind which several processes answer in turn: how their samples are named, and what is still to be named so.

An address is recognised by its samples, so some stand under its name alone by then. Hot ones are renamed at once, and so are those
of a sealed hour that comes back; the other sealed hours are written anew beside the writer (`renaming`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.collector.cold import Reading, Statements

PROCESS = "#"  # between an address and the start of one of the processes that answer there
POSITION = "balanced"  # among the positions: addresses of which sealed samples may bear the old name
RENAMED = f"instance || '{PROCESS}' || CAST(round(process_start_unix_s, 2) AS VARCHAR)"
CHOSEN = "list_contains(?, instance) AND process_start_unix_s IS NOT NULL"


def pending(statements: Reading) -> list[str]:
    """Addresses of which sealed samples are still to be renamed."""
    found = statements.query("SELECT position FROM main.positions WHERE name = ?", [POSITION])["position"]
    return [str(name) for name in json.loads(found[0])] if len(found) else []


def note_pending(statements: Statements, names: list[str]) -> None:
    """These, and no others, are still to be renamed; part of the caller's transaction."""
    statements.execute("DELETE FROM main.positions WHERE name = ?", [POSITION])
    if names:
        statements.execute("INSERT INTO main.positions VALUES (?, ?)", [POSITION, json.dumps(sorted(set(names)))])


def rename_hot(statements: Statements, names: list[str]) -> None:
    """Name the hot samples of these addresses by the process that answered, where they tell its start."""
    if names:
        statements.execute(f"UPDATE main.engine_samples SET instance = {RENAMED} WHERE {CHOSEN}", [names])
