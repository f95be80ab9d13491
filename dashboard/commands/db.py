"""`phasewise db`: backup, restore, check, salvage and purge of a data folder; while a server runs, backup and purge go through it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from phasewise.dashboard.commands.connection import find_server, open_data, store_path
from phasewise.rules.errors import InputError, MachineError


def run(options: Namespace) -> int:
    """Exit code 1 where `check` found a fault."""
    done = {"backup": _backup, "restore": _restore, "check": _check, "salvage": _salvage, "purge": _purge}[
        options.action
    ](options)
    if options.json:
        print(json.dumps(done, indent=2, ensure_ascii=False))
    else:
        for line in _lines(options.action, done):
            print(line)
    return 0 if done.get("ok", True) else 1


def _backup(options: Namespace) -> Mapping[str, object]:
    from phasewise.dashboard.housekeeping import snapshot

    server = find_server(options.data)
    if server is not None:
        told = server.send("/api/v1/db/snapshot", b"{}", kind="application/json")
        return _copied(Path(str(told["folder"])), options.out)
    with open_data(options.data) as local:
        return _copied(Path(str(snapshot(local.store, options.data)["folder"])), options.out)


def _copied(folder: Path, out: Path) -> Mapping[str, object]:
    from phasewise.collector.backup import write_backup

    try:
        return write_backup(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _restore(options: Namespace) -> Mapping[str, object]:
    from phasewise.collector.backup import restore

    return restore(options.backup, options.data)


def _check(options: Namespace) -> Mapping[str, object]:
    from phasewise.collector.integrity import check

    server = find_server(options.data)
    if server is not None:
        raise MachineError(f"a server runs on {options.data} (pid {server.pid}): stop it, or check a backup of it")
    if not store_path(options.data).exists() and not (options.data / "journal").exists():
        raise InputError("--data", str(options.data), "holds no phasewise data", "name the directory given to serve")
    return check(options.data)


def _salvage(options: Namespace) -> Mapping[str, object]:
    from phasewise.collector.salvage import salvage

    return salvage(options.file, options.out)


def _purge(options: Namespace) -> Mapping[str, object]:
    from phasewise.dashboard.housekeeping import chosen, purged

    where = [*options.where, *([f"tenant:eq:{options.tenant}"] if options.tenant else [])]
    chosen(where, options.before or "", time.time_ns())  # a wrong condition is refused before anyone is asked
    server = find_server(options.data)
    if server is not None:
        body = json.dumps({"where": where, "before": options.before or ""}).encode()
        answer: Mapping[str, object] = server.send("/api/v1/db/purge", body, kind="application/json")
        return answer
    with open_data(options.data) as local:
        return purged(local.store, local.writer, options.data, where, options.before or "", time.time_ns())


def _lines(action: str, done: Mapping[str, object]) -> list[str]:
    """The answer in words."""
    if action == "backup":
        return [f"{done['files']} files, {done['bytes']:,} bytes, as of commit {done['commit']}, in {done['out']}"]
    if action == "restore":
        return [f"{done['requests']:,} requests in {done['data']}, as of commit {done['commit']}"]
    if action == "purge":
        also = f"; copies removed: {', '.join(map(str, done['folders']))}" if done["folders"] else ""  # type: ignore[call-overload]
        also += f"; removed, for they cannot be read: {', '.join(map(str, done['files']))}" if done["files"] else ""  # type: ignore[call-overload]
        return [
            f"{done['requests']:,} requests of whole traces, {done['spans']:,} archived spans and {done['journal_rows']:,} "
            f"journal rows are gone; {done['hours']} sealed hours are written anew{also}"
        ]
    if action == "salvage":
        return _salvaged(done)
    faults = done["faults"]
    assert isinstance(faults, list)
    for fault in faults:
        print(f"FAIL  {fault}", file=sys.stderr)
    tables = done["tables"]
    assert isinstance(tables, Mapping)
    counts = ", ".join(f"{count:,} {name}" for name, count in tables.items() if count)
    return [
        f"{'ok' if done['ok'] else 'damaged'}: {counts or 'no rows'}; {done['cold_files']} cold files, {done['span_files']} span files"
    ]


def _salvaged(done: Mapping[str, object]) -> list[str]:
    tables = done["tables"]
    assert isinstance(tables, Mapping)
    lines = [f"{done['file']}: its log cannot be read and was left out"] if done["log_left_out"] else []
    for name, told in tables.items():
        lost = f", {told['lost']:,} lost" if told["lost"] else ""
        unknown = f"; unknown in some of them: {', '.join(told['unknown'])}" if told["unknown"] else ""
        lines.append(f"{name}: {told['rows']:,} rows{lost}{unknown}")
    return [*lines, f"in {done['out']}; take them back with phasewise ingest --data DIR {done['out']}"]
