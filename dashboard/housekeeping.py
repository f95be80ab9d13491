"""What an administrator may ask of the store, over HTTP or from the command line: a snapshot for a backup, and a purge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from phasewise.analyzer.filters import conditions, filter_key
from phasewise.analyzer.window import parse_filter, parse_time
from phasewise.collector.backup import take_snapshot
from phasewise.collector.purge import Chosen, purge
from phasewise.collector.records import Request
from phasewise.collector.records import columns as record_columns
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.rules.errors import InputError


def snapshot(store: Store, data: Path) -> dict[str, str | int]:
    """Take a snapshot below the data folder; who asked copies it, and removes it."""
    taken = take_snapshot(store, data)
    return {"folder": str(taken.folder), "commit": taken.commit}


def purged(
    store: Store, writer: Writer, data: Path, where: Sequence[str], before: str, now_unix_ns: int
) -> dict[str, object]:
    """Delete what is told, with the writer paused."""
    wanted = chosen(where, before, now_unix_ns)
    with writer.paused():
        return asdict(purge(store, data, wanted, now_unix_ns))


def chosen(where: Sequence[str], before: str, now_unix_ns: int) -> Chosen:
    """What the options mean; InputError where they mean nothing, or everything."""
    if not where and not before:
        raise InputError("--where", "", "says nothing to delete", "give --where KEY:OP:VALUE, --tenant or --before")
    filters = [parse_filter(text) for text in where]
    found = conditions(filters)
    named = {filter_key(one.key).sql.strip('"') for one in filters if filter_key(one.key).kind == "text"}
    before_unix_ns = parse_time(before, now_unix_ns, "--before") if before else None
    columns = tuple(sorted(named & set(record_columns(Request))))
    return Chosen(found.sql, found.parameters, before_unix_ns, columns, everything=not where)
