"""What DuckDB's words mean: somebody else has the file, the machine refuses, it is damaged, or it must be opened anew.

Its exceptions do not tell: what ran out of memory comes as an error of the log, of a transaction or of the disk where it ends those.
"""

from __future__ import annotations

import re
from pathlib import Path

from phasewise.rules.errors import MachineError

_HOLDER = re.compile(r"held in (.+?) \(PID (\d+)\)")
_STORAGE = re.compile(r"storage version number (\d+), but we can only read storage versions between (\d+) and (\d+)")
# What is wrong with the machine or the release, and not with the file.
_ENVIRONMENT = re.compile(
    r"no space|too many open files|disk quota|input/output error|version number|storage version", re.IGNORECASE
)
_MEMORY = re.compile(r"out of memory|allocat|failed to (offload|pin|resize) ", re.IGNORECASE)
_GIVEN_UP = re.compile(r"has been invalidated|detach and reattach", re.IGNORECASE)


class DamagedStore(MachineError):
    """The file, or its log, is not what was written."""


def cannot_open(path: Path, text: str) -> MachineError:
    """What a refusal to open the file means: DuckDB tells it in words only."""
    if holder := _HOLDER.search(text):
        return MachineError(
            f"{path}: another process has the store open: PID {holder[2]} ({holder[1]}); "
            "ask it through its address in serve.json, or stop it"
        )
    if stored := _STORAGE.search(text):
        return MachineError(
            f"{path}: written by another release (storage {stored[1]}, this one reads {stored[2]} to {stored[3]}); "
            "upgrade phasewise, or start with another --data folder"
        )
    if "Permission denied" in text or "Read-only" in text:
        return MachineError(
            f"{path}: no permission to write the store (check the folder's owner, or choose another --data)"
        )
    reason = f"{path}: the store cannot be opened: {text.splitlines()[0]}"
    if is_for_memory(text):
        return MachineError(f"{reason} (free memory, and room on its disk for temporary files)")
    if _ENVIRONMENT.search(text):
        return MachineError(reason)
    return DamagedStore(reason)


def is_for_memory(text: str) -> bool:
    """Whether memory, or the room that temporary files may take, was too little: what was asked for can be tried again."""
    return bool(_MEMORY.search(text))


def is_given_up(text: str) -> bool:
    """Whether DuckDB does nothing any more with a file before it is closed and opened."""
    return bool(_GIVEN_UP.search(text))
