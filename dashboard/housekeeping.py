"""What an administrator may ask of the store, over HTTP or from the command line: a snapshot for a backup, and a purge."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from phasewise.analyzer.filters import conditions, filter_key
from phasewise.analyzer.window import parse_filter, parse_time
from phasewise.collector.audit import audit
from phasewise.collector.backup import take_snapshot
from phasewise.collector.missing_files import left_out
from phasewise.collector.purge import ROLLED, Chosen, go_on, is_unfinished, purge
from phasewise.collector.records import Request
from phasewise.collector.records import columns as record_columns
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.rules.errors import InputError

LOG = logging.getLogger(__name__)


def snapshot(store: Store, data: Path) -> dict[str, str | int]:
    """Take a snapshot below the data folder; who asked copies it, and removes it."""
    taken = take_snapshot(store, data)
    return {"folder": str(taken.folder), "commit": taken.commit}


def purged(
    store: Store, writer: Writer, data: Path, where: Sequence[str], before: str, now_unix_ns: int
) -> dict[str, object]:
    """Delete what is told, with the writer paused."""
    wanted = chosen(where, before, now_unix_ns)
    with store.tending:
        lost = left_out(store)
    writer.report_loss(lost)  # else what is to be written anew could not be read
    with writer.paused():
        return asdict(purge(store, data, wanted, now_unix_ns))


class UnfinishedPurge:
    """A purge that an ended process left: it goes on when the next one starts."""

    def __init__(self, store: Store, writer: Writer, data: Path) -> None:
        self._store = store
        self._writer = writer
        self._data = data
        self._error = ""

    def go_on(self, now_unix_ns: int) -> None:
        """Never ends the process: what cannot be finished now is told, and left to the next start or the next purge."""
        try:
            if is_unfinished(self._store):
                LOG.warning("a purge was broken off; it goes on now")
                with self._writer.paused():
                    done = go_on(self._store, self._data, now_unix_ns)
                facts = {"continued": True, "spans": done.spans, "journal_rows": done.journal_rows}
                audit(self._data, "purge", now_unix_ns, facts=facts)
            self._error = ""
        except Exception as error:
            LOG.exception("a purge that was broken off could not be finished")
            self._error = f"{type(error).__name__}: {error}"[:300]

    def status(self) -> dict[str, object]:
        """What data health shows of it."""
        return {"unfinished": is_unfinished(self._store), "error": self._error}


def chosen(where: Sequence[str], before: str, now_unix_ns: int) -> Chosen:
    """What the options mean; InputError where they mean nothing, or everything."""
    if not where and not before:
        raise InputError("--where", "", "says nothing to delete", "give --where KEY:OP:VALUE, --tenant or --before")
    filters = [parse_filter(text) for text in where]
    found = conditions(filters)
    named = {filter_key(one.key).sql.strip('"') for one in filters if filter_key(one.key).kind == "text"}
    before_unix_ns = parse_time(before, now_unix_ns, "--before") if before else None
    columns = tuple(sorted(named & set(record_columns(Request))))
    keys = {filter_key(one.key).sql.strip('"') for one in filters}
    is_rolled = bool(keys) and keys <= ROLLED and before_unix_ns is None
    return Chosen(found.sql, found.parameters, before_unix_ns, columns, everything=not where, is_rolled=is_rolled)
