"""How long segments of the journal stay after their rows are stored: until every hour they have to do with is sealed.

So the hot file can be made again from them. Where that would take more than half of what the journal may hold, the oldest go
early: room for what is being received comes first, and their raw spans are in the archive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from phasewise.collector.archive import SpanArchive
from phasewise.collector.journal import JournalReader, Position
from phasewise.collector.journal_writer import JOURNAL_BYTES, VOLUME_RATIO
from phasewise.collector.lake import HOUR_NS, KINDS
from phasewise.collector.segment import segment_numbers, segment_path
from phasewise.collector.store import Store

LOOK_NS = 60 * 10**9
KEPT_RATIO = 0.5  # of what the journal may hold


class KeptSegments:
    """The stored and archived segments of one journal. kept_bytes: more than this is not kept; None takes half of the limit."""

    def __init__(
        self,
        store: Store,
        archive: SpanArchive,
        directory: Path,
        clock: Callable[[], int],
        kept_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._archive = archive
        self._directory = directory
        self._clock = clock
        self._kept_bytes = kept_bytes
        self._looked_ns = -LOOK_NS
        self.dropped = 0
        self.dropped_early = 0

    def release(self, open_from: Position) -> None:
        """Delete what is not needed any more; `open_from`: from here on spans of open traces may lie."""
        stored = min(open_from.segment, self._archive.archived_segment() + 1)  # the first that is still needed to go on
        over = self._bytes() - self._limit_bytes()
        if over <= 0 and self._clock() - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = self._clock()
        hot, hours = self._hot_hours(), self._archive.segment_hours()
        candidates = [number for number in segment_numbers(self._directory)[:-1] if number < stored]
        through, early = 0, 0
        for number in candidates:
            if hours.get(number, frozenset()) & hot:
                if over <= 0:
                    break
                early += 1
            over -= segment_path(self._directory, number).stat().st_size
            through = number
        # Only what the file itself holds, without its log, is sure to be there after any damage to that log.
        if through and self._store.checkpoint():
            self.dropped += JournalReader(self._directory).drop_before(Position(through + 1, 0))
            self.dropped_early += early

    def facts(self) -> dict[str, int]:
        return {"dropped_segments": self.dropped, "segments_dropped_early": self.dropped_early}

    def _hot_hours(self) -> set[int]:
        parts = (
            f'SELECT DISTINCT "{column}" // {HOUR_NS} AS hour FROM main."{kind}"' for kind, column in KINDS.items()
        )
        return set(self._store.query(" UNION ".join(parts))["hour"].to_list())

    def _bytes(self) -> int:
        total = 0
        for number in segment_numbers(self._directory):
            with contextlib.suppress(FileNotFoundError):
                total += segment_path(self._directory, number).stat().st_size
        return total

    def _limit_bytes(self) -> int:
        if self._kept_bytes is None:
            try:
                volume = os.statvfs(self._directory)
            except FileNotFoundError:
                return JOURNAL_BYTES
            self._kept_bytes = int(min(JOURNAL_BYTES, volume.f_blocks * volume.f_frsize * VOLUME_RATIO) * KEPT_RATIO)
        return self._kept_bytes
