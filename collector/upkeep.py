"""The upkeep of one data folder, beside the writer: sealing, rewriting, retention. One thread, nothing of it urgent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from phasewise.collector.backup import drop_snapshots
from phasewise.collector.cold import rewriting_due, thaw
from phasewise.collector.lake import label
from phasewise.collector.missing_files import left_out
from phasewise.collector.renaming import rename_sealed
from phasewise.collector.retention import Keep, Retention
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store

LOG = logging.getLogger(__name__)
PAUSE_S = 30.0
RETENTION_EVERY_S = 3600.0
READERS_GONE_S = 150.0  # no answer may take longer
SEALS_A_RUN = 8
LULL_BYTES = 1 << 20  # scrapes alone make a log grow by less in a round
LONG_LOG_BYTES = 16 << 20  # shorter ones are read at a start in no time
SEEK_S = 300.0  # between two looks for cold files that were gone
SNAPSHOT_S = 86_400.0  # a backup that takes longer has ended


class Upkeep:
    """Runs by itself between `start` and `stop`; `run` is one round."""

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        keep: Keep,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        """tell: is told what of the cold tier is there no more."""
        self._store = store
        self._keep = keep
        self._clock = clock
        self._monotonic = monotonic
        self._tell = tell
        self._sealer = Sealer(store, clock)
        self._retention = Retention(store, data_dir, keep, clock, monotonic)
        self._deleted_at: float | None = None
        self._replaced_at: float | None = monotonic() - READERS_GONE_S  # a process before may have left files
        self._sought_at: float | None = None
        self._sealed = 0
        self._log_bytes = 0
        self._error = ""

    def run(self) -> None:
        """One round: files that vanished or are there again, files nobody reads any more, hours to seal, an hour to write anew, what is
        too old."""
        seeks = self._sought_at is None or self._monotonic() - self._sought_at >= SEEK_S
        with self._store.tending:
            lost = left_out(self._store, again=seeks)
        if seeks:
            self._sought_at = self._monotonic()
        if lost:  # without what a purge waits for: its writer is waited for here
            self._tell(lost)
        with self._store.tending:
            self._run()

    def _run(self) -> None:
        if self._replaced_at is not None and self._monotonic() - self._replaced_at >= READERS_GONE_S:
            self._retention.vacuum()
            self._replaced_at = None
            drop_snapshots(self._store, SNAPSHOT_S, self._clock() / 1e9)
        moved = 0
        for due in due_hours(self._store, self._clock(), self._keep.seal_after_h * 3600)[:SEALS_A_RUN]:
            if self._sealer.seal(due):
                moved += 1
                self._sealed += 1
                LOG.info("hour %s is sealed: %d rows", label(due.hour), due.rows)
                self._replaced_at = self._monotonic() if due.generation > 1 else self._replaced_at
        moved += self._rewrite()
        if rename_sealed(self._store, self._sealer.lake):
            self._replaced_at = self._monotonic()
        if self._deleted_at is None or self._monotonic() - self._deleted_at >= RETENTION_EVERY_S:
            self._deleted_at = self._monotonic()
            if deleted := self._retention.run():
                moved += deleted
                self._replaced_at = self._monotonic()
        self._checkpoint(moved > 0)

    def _checkpoint(self, at_once: bool) -> None:
        """Where rows were moved, in idle rounds, and where the last one failed. Under load, which a log that became shorter tells of too,
        the writer does it between two passes."""
        log_bytes = self._store.log_bytes
        grown_bytes = log_bytes - self._log_bytes
        idle = not grown_bytes or (0 < grown_bytes < LULL_BYTES and log_bytes > LONG_LOG_BYTES)
        if at_once or self._store.checkpoint_error or (log_bytes and idle):
            self._store.checkpoint()
        self._log_bytes = self._store.log_bytes

    def _rewrite(self) -> bool:
        """An hour in several small files, or in columns of an older release, comes back and is sealed anew: one a round."""
        hour = rewriting_due(self._store)
        if hour is not None:
            with self._store.write() as transaction:
                thaw(transaction, self._store.cold_files, {hour}, self._clock())
        return hour is not None

    def status(self) -> dict[str, object]:
        """What data health shows of it."""
        states = self._store.query("SELECT state, count(*) AS n FROM main.sealed_hours GROUP BY 1")
        files = self._store.query(
            'SELECT count(*) AS files, coalesce(sum("bytes"), 0)::BIGINT AS bytes FROM main.cold_files'
        )
        done = self._retention.done
        return {
            "hours": dict(states.iter_rows()),
            "cold_files": files["files"].item(),
            "cold_bytes": files["bytes"].item(),
            "sealed": self._sealed,
            "deleted_hours": done.hours,
            "deleted_rows": done.rows,
            "stopped": done.stopped,
            "rollups_unkept": done.unkept,
            "error": self._error,
        }

    def keep_up(self, stop: threading.Event) -> None:
        """Rounds until told to stop. A fault is logged once and tried again: nothing here may end the process."""
        while not stop.wait(PAUSE_S):
            try:
                self.run()
                self._error = ""
            except Exception as error:
                told = f"{type(error).__name__}: {error}"[:300]
                if told != self._error:
                    LOG.exception("upkeep failed and is tried again")
                self._error = told
