"""Cold files that are not there, or cannot be read: they are left out and said, and taken in again once they are found, at a start and while it runs.

The rest of the store is whole: nothing else is moved aside, and no question fails because of them.
"""

from __future__ import annotations

import logging

from phasewise.collector.cold import Reading, enter_files, make_views, placed_file
from phasewise.collector.lake import KINDS, Lake, label
from phasewise.collector.store import Store
from phasewise.rules.errors import MachineError

LOG = logging.getLogger(__name__)
NAMED = 4  # of the hours, in one line


def missing(store: Store) -> str:
    """What is lost with files that are named and not there, and one of them; empty where all are. Changes nothing."""
    gone = _gone(store)
    return f"{_told(gone)}; the first is {store.cold_directory / gone[0][2]}" if gone else ""


def left_out(store: Store, again: bool = True) -> str:
    """Leave out files that are not there, take in those that are again; what is lost, empty where nothing newly is. again: False does not
    look for those, which takes a list of all files."""
    gone = _gone(store)
    found = _found_again(store) if again and _lacks_rows(store) else []
    if gone or found:
        with store.write() as transaction:
            for _, _, path, _ in gone:
                transaction.execute("DELETE FROM main.cold_files WHERE path = ?", [path])
            sealed = _sealed(transaction)  # late rows may have brought an hour back meanwhile
            found = [one for one in found if one[1] in sealed]
            enter_files(transaction, [placed_file(store.cold_directory, *one) for one in found])
            make_views(transaction, store.cold_files)
    if found:
        LOG.info("%d cold files are there again", len(found))
    return _told(gone)


def _gone(store: Store) -> list[tuple[str, int, str, int]]:
    placed = store.query('SELECT kind, hour, path, "rows" FROM main.cold_files ORDER BY hour, kind, path')
    return [one for one in placed.iter_rows() if not store.cold_files.is_there(one[2])]


def _lacks_rows(store: Store) -> bool:
    """Whether sealed hours once had more rows than the files that are named."""
    found = store.query(
        "SELECT (SELECT coalesce(sum(rows), 0) FROM main.sealed_hours WHERE state = 'sealed') > "
        '(SELECT coalesce(sum("rows"), 0) FROM main.cold_files) AS lacks'
    )
    return bool(found["lacks"].item())


def _found_again(store: Store) -> list[tuple[str, int, str]]:
    """Files of sealed hours that the cold tables name, that are there, and that the store does not know: kind, hour, path."""
    sealed = _sealed(store)
    known = set(store.query("SELECT path FROM main.cold_files")["path"])
    return [
        (kind, hour, path)
        for kind in KINDS
        for hour, paths in _named(Lake(store.cold_directory), kind).items()
        for path in paths
        if hour in sealed and path not in known and store.cold_files.can_be_read(path)
    ]


def _named(lake: Lake, kind: str) -> dict[int, list[str]]:
    try:
        return lake.files(kind)
    except MachineError as error:  # what it would lead to stays left out
        LOG.error("%s", error)
        return {}


def _sealed(source: Reading) -> set[int]:
    return set(source.query("SELECT hour FROM main.sealed_hours WHERE state = 'sealed'")["hour"])


def _told(gone: list[tuple[str, int, str, int]]) -> str:
    if not gone:
        return ""
    hours = sorted({hour for _, hour, _, _ in gone})
    more = f" and {len(hours) - NAMED} more" if len(hours) > NAMED else ""
    rows = ", ".join(
        f"{sum(one[3] for one in gone if one[0] == kind):,} of {kind}" for kind in sorted({one[0] for one in gone})
    )
    return (
        f"{len(gone)} cold files of the hours {', '.join(map(label, hours[:NAMED]))}{more} are not there or cannot be read: their rows ({rows}) are left out "
        "until they are found again"
    )
