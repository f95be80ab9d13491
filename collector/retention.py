"""What is deleted, and when: whole sealed hours, counted from the receipt of their rows, never from the times in their spans.

A run first takes hours out of what readers see, then out of the cold tables, and deletes files last: ended anywhere, the next run
goes on. Findings, annotations and the hourly rollups stay; a clock that jumped deletes nothing.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from phasewise.collector.cold import make_views
from phasewise.collector.kept_rollups import KeptRollups
from phasewise.collector.lake import HOUR_NS, KINDS, Lake
from phasewise.collector.store import Store

LOG = logging.getLogger(__name__)
DAY_NS = 24 * HOUR_NS
MONTH_NS = 30_436_875 * 10**8  # a twelfth of 365.2425 days
SANE_RATIO = 0.10  # of all rows: more than this never goes at once because of a clock nobody watched
STEADY_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept: the section [retention] of phasewise.toml.

    max_volume_ratio: the data folder's share of the space it could have (its own bytes and the free ones).
    """

    seal_after_h: float = 1.0
    raw_days: float = 14.0
    rollup_months: float = 13.0
    max_volume_ratio: float = 0.80


@dataclass(slots=True)
class Deleted:
    """What the runs of this process did."""

    hours: int = 0
    rows: int = 0
    files: int = 0
    stopped: str = ""  # why something that is due was not deleted; empty where nothing waits
    unkept: str = ""  # why hourly rollups of expired hours stand nowhere but in the store; empty where they do
    waiting: set[int] = field(default_factory=set)  # hours that a stop holds back


class Retention:
    """Deletes from one data folder. monotonic: seconds that no clock change touches."""

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        keep: Keep,
        clock: Callable[[], int],
        monotonic: Callable[[], float],
        usage: Callable[[Path], tuple[int, int]] | None = None,
    ) -> None:
        self._store = store
        self._data_dir = data_dir
        self._keep = keep
        self._clock = clock
        self._monotonic = monotonic
        self._usage = usage or usage_of
        self._lake = Lake(store.cold_directory)
        self._kept = KeptRollups(store)
        self._seen: tuple[int, float] | None = None
        self._waiting_spans: set[int] = set()
        self.done = Deleted()

    def run(self) -> int:
        """Delete what is due; the number of hours that went. Raises MachineError where the disk refuses."""
        now = self._clock()
        steady = self._is_steady(now)
        hours = self._sealed()
        aged = hours.filter(pl.col("received") < now - int(self._keep.raw_days * DAY_NS))
        due = self._sane(aged, hours, steady)
        spans = self._due_spans(now, steady)
        due |= self._over_volume(hours.filter(~pl.col("hour").is_in(list(due))), self._going_bytes(due, spans))
        self._keep_rollups(due, now)
        self._take_out(due)
        self._finish()
        self._drop_rollups(now)
        self._drop_strays(now)
        self._drop_spans(spans)
        return len(due)

    def _is_steady(self, now: int) -> bool:
        """The clock went on as the seconds did since the last run of this process."""
        seen, self._seen = self._seen, (now, self._monotonic())
        if seen is None:
            return False
        return abs((now - seen[0]) - int((self._seen[1] - seen[1]) * 1e9)) < STEADY_NS

    def _sealed(self) -> pl.DataFrame:
        return self._store.query(
            "SELECT hour, rows, coalesce(received_unix_ns, sealed_unix_ns) AS received FROM main.sealed_hours "
            "WHERE state = 'sealed' ORDER BY hour"
        )

    def _sane(self, aged: pl.DataFrame, hours: pl.DataFrame, steady: bool) -> set[int]:
        """The hours of `aged` that may go: all where they are few, else those that grew old while this process watched."""
        due = set(aged["hour"].to_list())
        hot = int(self._store.query("SELECT count(*) AS n FROM main.requests")["n"].item())
        total = int(hours["rows"].sum() or 0) + hot
        share = int(aged["rows"].sum() or 0) / total if total else 0.0
        due = _watched(due, self.done.waiting, share, steady)
        if self.done.waiting:
            until = datetime.fromtimestamp((max(self.done.waiting) + 1) * 3600, UTC)
            self.done.stopped = (
                f"{len(self.done.waiting)} hours ({share:.0%} of all rows) would be deleted at once: did the clock jump? "
                f"nothing was; where it is right, delete them with: phasewise db purge --before {until:%Y-%m-%dT%H:%M:%SZ}"
            )
            LOG.warning("retention: %s", self.done.stopped)
        else:
            self.done.stopped = ""
        return due

    def _going_bytes(self, hours: Collection[int], spans: Collection[Path]) -> int:
        """Size of the files that go anyway: of these hours, those that no hour names any more and that only wait for their readers, and
        folders of raw spans."""
        staying = self._store.query(
            "SELECT path FROM main.cold_files WHERE NOT list_contains(?, hour)", [sorted(hours)]
        )
        names = set(staying["path"])
        cold = self._store.cold_directory
        going = [p for p in cold.glob("*/date=*/hour=*/*.parquet") if str(p.relative_to(cold)) not in names]
        return sum(path.stat().st_size for path in going) + sum(usage_of(folder)[0] for folder in spans)

    def _over_volume(self, hours: pl.DataFrame, going_bytes: int) -> set[int]:
        """The oldest hours, as many as bring the folder under its share of the volume, beside what goes anyway."""
        own, free = self._usage(self._data_dir)
        over = own - going_bytes - self._keep.max_volume_ratio * (own + free)
        if over <= 0:
            return set()
        sizes = self._store.query('SELECT hour, sum("bytes")::BIGINT AS bytes FROM main.cold_files GROUP BY hour')
        gone: set[int] = set()
        for hour, size in hours.sort("received").join(sizes, on="hour").select("hour", "bytes").iter_rows():
            if over <= 0:
                break
            gone.add(hour)
            over -= size
        if gone:
            LOG.warning("retention: %d hours go, the oldest first: the volume is fuller than allowed", len(gone))
        return gone

    def _keep_rollups(self, hours: Collection[int], now: int) -> None:
        """What hours that expire say, apart from the store's file, before they do. A full disk holds nothing back: the store has it
        as well, and the next run tries again."""
        try:
            self._kept.keep(hours, now)
            self.done.unkept = ""
        except OSError as error:
            self.done.unkept = f"{self._kept.directory}: cannot be written: {error.strerror or error} (make room)"
            LOG.error("hourly rollups of expired hours are in the store alone: %s", self.done.unkept)

    def _take_out(self, hours: Collection[int]) -> None:
        """Readers see these hours no more; their hourly rollups stay."""
        if not hours:
            return
        listed = sorted(hours)
        with self._store.write() as transaction:
            gone = transaction.query(
                "SELECT coalesce(sum(rows), 0)::BIGINT AS n FROM main.sealed_hours WHERE list_contains(?, hour)",
                [listed],
            )
            transaction.execute(
                "UPDATE main.sealed_hours SET state = 'expired', expired_unix_ns = coalesce(expired_unix_ns, ?) "
                "WHERE list_contains(?, hour)",
                [self._clock(), listed],
            )
            transaction.execute("DELETE FROM main.cold_files WHERE list_contains(?, hour)", [listed])
            transaction.execute(
                f"DELETE FROM main.rollups WHERE width_s < 3600 AND list_contains(?, bucket_unix_ns // {HOUR_NS})",
                [listed],
            )
            make_views(transaction, self._store.cold_files)
        self.done.hours += len(listed)
        self.done.rows += int(gone["n"].item())

    def _finish(self) -> None:
        """Take expired hours out of the cold tables, also those that an ended run left there."""
        expired = set(self._store.query("SELECT hour FROM main.sealed_hours WHERE state = 'expired'")["hour"].to_list())
        for kind in KINDS:
            self._lake.remove_hours(kind, expired)

    def vacuum(self) -> int:
        """Delete files that nothing shows any more. Not while a reader may still be in them."""
        shown = set(self._store.query("SELECT path FROM main.cold_files")["path"].to_list())
        gone = sum(self._lake.vacuum(kind, 0, keep=shown) for kind in KINDS)
        self.done.files += gone
        return gone

    def _drop_rollups(self, now: int) -> None:
        oldest = now - int(self._keep.rollup_months * MONTH_NS)
        old = self._store.query(
            "SELECT hour FROM main.sealed_hours WHERE state = 'expired' AND coalesce(received_unix_ns, sealed_unix_ns) < ?",
            [oldest],
        )["hour"].to_list()
        if not old:
            return
        try:
            self._kept.forget(
                old
            )  # first: ended in between, the store still names these hours, and the next run goes on
        except OSError as error:  # what frees space comes next
            told = f"rollups of {len(old)} hours: {self._kept.directory} cannot be written: {error.strerror or error} (make room)"
            self.done.stopped = self.done.stopped or told
            LOG.error("retention: %s", told)
            return
        with self._store.write() as transaction:
            transaction.execute(f"DELETE FROM main.rollups WHERE list_contains(?, bucket_unix_ns // {HOUR_NS})", [old])
            transaction.execute("DELETE FROM main.sealed_hours WHERE list_contains(?, hour)", [old])

    def _drop_strays(self, now: int) -> None:
        """Rows whose own times lie ahead are sealed never: they go by their receipt, alone."""
        oldest = now - int(self._keep.raw_days * DAY_NS)
        found = self._store.query(
            "SELECT count(*) AS n FROM main.requests WHERE finished_unix_ns > ? AND received_unix_ns < ?", [now, oldest]
        )
        if found["n"].item():
            with self._store.write() as transaction:
                transaction.execute(
                    "DELETE FROM main.requests WHERE finished_unix_ns > ? AND received_unix_ns < ?", [now, oldest]
                )

    def _due_spans(self, now: int, steady: bool) -> list[Path]:
        """Folders of raw spans, which lie by the hour of their receipt, that are old enough to go."""
        folders = {
            hour: path
            for path in (self._data_dir / "spans").glob("date=*/hour=*")
            if (hour := receipt_hour(path)) is not None
        }
        oldest = (now - int(self._keep.raw_days * DAY_NS)) // HOUR_NS
        due = {hour for hour in folders if hour < oldest}
        going = _watched(due, self._waiting_spans, len(due) / max(1, len(folders)), steady)
        return [folders[hour] for hour in sorted(going)]

    def _drop_spans(self, folders: Collection[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            self.done.files += 1
        for day in (self._data_dir / "spans").glob("date=*"):
            if not any(day.iterdir()):
                day.rmdir()


def _watched(due: set[int], waiting: set[int], share: float, steady: bool) -> set[int]:
    """The hours that may go: all where they are a small share, else those that grew old while this process watched the clock.
    The others wait, in `waiting`."""
    waiting &= due
    if share <= SANE_RATIO:
        waiting.clear()
    elif not steady:
        waiting |= due
    return due - waiting


def receipt_hour(folder: Path) -> int | None:
    """The hour since 1970 that a folder date=.../hour=... stands for."""
    try:
        moment = datetime.strptime(f"{folder.parent.name} {folder.name}", "date=%Y-%m-%d hour=%H").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) // 3600


def usage_of(folder: Path) -> tuple[int, int]:
    """Bytes of a folder's files, and free bytes of its volume."""
    own = 0
    for path in folder.rglob("*"):
        try:
            own += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return own, shutil.disk_usage(folder).free
