"""Cold files that are not there at a start: they are left out and said, and taken in again by a start that finds them.

The rest of the store is whole: nothing else is moved aside, and no question fails because of them.
"""

from __future__ import annotations

from pathlib import Path

from phasewise.collector.cold import enter_files, make_views, placed_file
from phasewise.collector.lake import KINDS, Lake, label
from phasewise.collector.store import Store
from phasewise.rules.errors import MachineError

NAMED = 4  # of the hours, in one line


def missing(store: Store) -> str:
    """What is lost with files that are named and not there; empty where all are. Changes nothing."""
    return _told(_gone(store))


def left_out(store: Store, *, views: bool = True) -> str:
    """Leave out files that are not there, take in those that are again; what is lost, empty where nothing newly is. views: False for a
    store that is opened as it is."""
    gone = _gone(store)
    found = _found_again(store) if _lacks_rows(store) else []
    if gone or found:
        with store.write() as transaction:
            for _, _, path, _ in gone:
                transaction.execute("DELETE FROM main.cold_files WHERE path = ?", [path])
            enter_files(transaction, [placed_file(store.cold_directory, *one) for one in found])
            if views:
                make_views(transaction, store.cold_directory)
    return _told(gone)


def whole_but_for_files(path: Path) -> Store | None:
    """A store that is opened as it is where its own file can be read to the last block, and names cold files that are not there."""
    try:
        store = Store(path, as_it_is=True)
    except MachineError:
        return None
    named, _ = store.try_query('SELECT hour, "rows" FROM main.cold_files LIMIT 0')
    if named is not None and not store.verify() and _gone(store):
        return store
    store.close()
    return None


def _gone(store: Store) -> list[tuple[str, int, str, int]]:
    placed = store.query('SELECT kind, hour, path, "rows" FROM main.cold_files ORDER BY hour, kind, path')
    return [one for one in placed.iter_rows() if not (store.cold_directory / one[2]).exists()]


def _lacks_rows(store: Store) -> bool:
    """Whether sealed hours once had more rows than the files that are named."""
    found = store.query(
        "SELECT (SELECT coalesce(sum(rows), 0) FROM main.sealed_hours WHERE state = 'sealed') > "
        '(SELECT coalesce(sum("rows"), 0) FROM main.cold_files) AS lacks'
    )
    return bool(found["lacks"].item())


def _found_again(store: Store) -> list[tuple[str, int, str]]:
    """Files of sealed hours that the cold tables name, that are there, and that the store does not know: kind, hour, path."""
    lake = Lake(store.cold_directory)
    sealed = set(store.query("SELECT hour FROM main.sealed_hours WHERE state = 'sealed'")["hour"])
    known = set(store.query("SELECT path FROM main.cold_files")["path"])
    return [
        (kind, hour, path)
        for kind in KINDS
        for hour, paths in lake.files(kind).items()
        for path in paths
        if hour in sealed and path not in known and (store.cold_directory / path).exists()
    ]


def _told(gone: list[tuple[str, int, str, int]]) -> str:
    if not gone:
        return ""
    hours = sorted({hour for _, hour, _, _ in gone})
    more = f" and {len(hours) - NAMED} more" if len(hours) > NAMED else ""
    rows = ", ".join(
        f"{sum(one[3] for one in gone if one[0] == kind):,} of {kind}" for kind in sorted({one[0] for one in gone})
    )
    return (
        f"{len(gone)} cold files of the hours {', '.join(map(label, hours[:NAMED]))}{more} are not there: their rows ({rows}) are left out "
        "until a start finds them again"
    )
