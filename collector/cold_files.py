"""Which cold files of a store can be read. One whose end is damaged is as good as gone: its columns stand there, and without them neither a
view nor a question can be made over a list with it. What is damaged elsewhere fails the questions that read it, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


class ColdFiles:
    """Of one store. Paths are those of its table `cold_files`, below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._damaged: set[str] = set()  # of those that were looked into

    def is_there(self, path: str) -> bool:
        """As far as is known: a file is looked into where something fails, not at every question."""
        return path not in self._damaged and (self.directory / path).exists()

    def can_be_read(self, path: str) -> bool:
        """Looks into its end."""
        try:
            pq.read_metadata(self.directory / path)
        except (OSError, ValueError, pa.ArrowException):
            self._damaged.add(path)
            return False
        self._damaged.discard(path)
        return True

    def find_damaged(self, paths: Iterable[str]) -> bool:
        """Whether any of these cannot be read that was taken for whole before; they are left out from now on."""
        damaged = [path for path in paths if self.is_there(path) and not self.can_be_read(path)]
        return bool(damaged)
