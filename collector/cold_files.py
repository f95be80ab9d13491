"""Which cold files can be read. One whose end is damaged is as good as gone: its columns stand there, and without them neither a view nor
a question can be made over a list with it. What is damaged elsewhere fails the questions that read it, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_DAMAGED: set[Path] = set()  # those that were looked into, of this process


def is_there(path: Path) -> bool:
    """As far as is known: a file is looked into where something fails, not at every question."""
    return path not in _DAMAGED and path.exists()


def can_be_read(path: Path) -> bool:
    """Looks into its end."""
    try:
        pq.read_metadata(path)
    except (OSError, ValueError, pa.ArrowException):
        _DAMAGED.add(path)
        return False
    _DAMAGED.discard(path)
    return True


def find_damaged(paths: Iterable[Path]) -> bool:
    """Whether any of these cannot be read that was taken for whole before."""
    damaged = [path for path in paths if is_there(path) and not can_be_read(path)]
    return bool(damaged)
