"""Files that survive a power cut: what is written is on the disk, and under its name, before anything else rests on it."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """fsync of a file, or of a directory for the names in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(written: Path, path: Path) -> None:
    """Rename a file of the same directory, durable before and after: `path` holds the old bytes or the new ones, whole."""
    sync_path(written)
    written.replace(path)
    sync_path(path.parent)
