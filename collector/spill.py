"""Temporary files of questions that need more than memory: how much room they may take, and what a killed process left of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

SPILL_BYTES = 4 << 30  # for all questions together
SPILL_RATIO = 0.1  # of what is free, where that is less: the journal needs the rest


def room(directory: Path) -> int:
    """Bytes that temporary files of a store in this directory may take. Raises OSError where the volume cannot be asked."""
    return min(SPILL_BYTES, int(shutil.disk_usage(directory).free * SPILL_RATIO))


def remove_files_of_others(directory: Path) -> None:
    """For the owner of the store, when no other process can have it open: names of files hold the number of their process."""
    with contextlib.suppress(OSError):
        for file in directory.iterdir():
            if f"_{os.getpid()}_" not in file.name:
                file.unlink()
