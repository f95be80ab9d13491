"""Opening a store that may be damaged: what cannot be read is moved aside, never deleted, and made anew from what is kept.

The hot file is read to its last block before anything is built on it. A broken log is moved alone, and the file is opened as it
was at its last checkpoint; a broken file is moved with its log, and a new one begins with the sealed hours of the cold tier.
Either way the writer then reads again what the journal holds from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from phasewise.collector import rollups
from phasewise.collector.backfill.coverage import COVERAGE
from phasewise.collector.cold import enter_files, make_views, placed_file
from phasewise.collector.kept_rollups import enter_kept, read_kept
from phasewise.collector.lake import HOUR_NS, KINDS, Lake
from phasewise.collector.missing_files import left_out, missing
from phasewise.collector.sidecar import WITNESS, Committed, Sidecar, lost
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.rules.errors import MachineError

LOG = logging.getLogger(__name__)
FILE = "phasewise.duckdb"
_REMEDY = "restore a backup with phasewise db restore, or start with --on-corruption=quarantine"
VERIFIED_BYTES = 4 << 30  # a larger file would hold up the start: `phasewise db check` reads it


def open_store(data: Path, clock: Callable[[], int], on_corruption: str = "quarantine") -> tuple[Store, str]:
    """The store of a data folder, and what was found damaged (empty: nothing).

    on_corruption: `quarantine`, or `fail`: then DamagedStore says what is wrong and nothing is touched.
    """
    path = data / FILE
    problem = ""
    store = None
    try:
        store = _opened(path)
    except DamagedStore as error:
        problem = str(error)
        if on_corruption == "fail":
            raise DamagedStore(f"{problem} ({_REMEDY})") from error
    if store is not None:
        if on_corruption == "fail":
            _require_whole(store, data)
        return store, left_out(store)
    aside = data / "quarantine" / f"{datetime.fromtimestamp(clock() // 10**9, UTC):%Y%m%dT%H%M%SZ}"
    LOG.error("%s; what is damaged is moved to %s", problem, aside)
    if _move(path.with_name(f"{FILE}.wal"), aside):
        try:
            told = (
                f"the log of the store was damaged and lies in {aside}; the store is as it was at its last checkpoint"
            )
            return _opened(path), told
        except DamagedStore:
            pass
    _move(path, aside)
    _move(data / COVERAGE, aside)  # what was brought in from elsewhere is to be brought in again
    fresh = Store(path)
    found = adopt(fresh, clock())
    told = (
        f"the store was damaged and lies in {aside}; a new one holds {found.hours} sealed hours ({found.rows} rows) of the cold tier "
        f"and the hourly rollups of {found.expired} expired ones, its marks and stored findings are gone"
    )
    return fresh, "; ".join([told, *found.faults])


def _require_whole(store: Store, data: Path) -> None:
    """DamagedStore where the witness beside the store knows of commits that it lacks, its log was cut short, or where cold files are not
    there."""
    found = store.query("SELECT position FROM positions WHERE name = 'commit'")
    problem = lost(Sidecar(data / WITNESS).last, Committed.parse(found["position"].item() if found.height else ""))
    problem = problem or missing(store)
    if problem:
        store.close()
        raise DamagedStore(f"{store.path}: {problem} ({_REMEDY})")


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a new store was given: sealed hours and their rows, hours whose rows had expired; faults: what could not be read."""

    hours: int
    rows: int
    expired: int
    faults: list[str]


def adopt(store: Store, now_unix_ns: int) -> Adopted:
    """Enter what the cold tables hold into a new store, with what is kept of expired hours, and make its rollups."""
    lake = Lake(store.cold_directory)
    kept = read_kept(store.cold_directory)
    placed = []
    generations: dict[int, int] = {}
    for kind in KINDS:
        try:
            listed = lake.files(kind)
        except MachineError as error:
            LOG.error("%s", error)
            continue
        for hour, paths in listed.items():
            present = [path for path in paths if (store.cold_directory / path).exists()]
            placed += [placed_file(store.cold_directory, kind, hour, path) for path in present]
            generations[hour] = max(generations.get(hour, 1), lake.generation(kind, hour))
    rows = {hour: sum(one.rows for one in placed if one.hour == hour) for hour in generations}
    with store.write() as transaction:
        enter_files(transaction, placed)
        for hour, generation in sorted(generations.items()):
            transaction.execute(
                "INSERT INTO main.sealed_hours BY NAME SELECT ? AS hour, ? AS generation, 'sealed' AS state, "
                "? AS sealed_unix_ns, ? AS rows",
                [hour, generation, now_unix_ns, rows[hour]],
            )
        enter_kept(transaction, kept)
        make_views(transaction, store.cold_files)
    with store.write() as transaction:
        minutes = {hour * HOUR_NS + minute * rollups.MINUTE_NS for hour in generations for minute in range(60)}
        rollups.rebuild(transaction, minutes, {hour * HOUR_NS for hour in generations}, cold=True)
    expired = len(kept.hours.keys() - generations.keys())
    return Adopted(len(generations), sum(rows.values()), expired, kept.faults)


def _opened(path: Path) -> Store:
    return Store(path, verified=path.exists() and path.stat().st_size <= VERIFIED_BYTES)


def _move(path: Path, aside: Path) -> bool:
    if not path.exists():
        return False
    aside.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.replace(aside / path.name)
    return True
