"""Why a store cannot be opened: somebody else has it, the machine refuses, or it is damaged."""

from __future__ import annotations

import re
from pathlib import Path

from phasewise.rules.errors import MachineError

_HOLDER = re.compile(r"held in (.+?) \(PID (\d+)\)")
# What is wrong with the machine or the release, and not with the file.
_ENVIRONMENT = re.compile(
    r"no space|too many open files|out of memory|allocate|disk quota|input/output error|version number|storage version",
    re.IGNORECASE,
)


class DamagedStore(MachineError):
    """The file, or its log, is not what was written."""


def cannot_open(path: Path, text: str) -> MachineError:
    """What a refusal to open the file means: DuckDB tells it in words only."""
    if holder := _HOLDER.search(text):
        return MachineError(
            f"{path}: another process has the store open: PID {holder[2]} ({holder[1]}); "
            "ask it through its address in serve.json, or stop it"
        )
    if "Permission denied" in text or "Read-only" in text:
        return MachineError(
            f"{path}: no permission to write the store (check the folder's owner, or choose another --data)"
        )
    reason = f"{path}: the store cannot be opened: {text.splitlines()[0]}"
    if _ENVIRONMENT.search(text):
        return MachineError(reason)
    return DamagedStore(reason)
