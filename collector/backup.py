"""Backup and restore of one data folder: everything that is stored, as it was after one commit.

A snapshot is taken beside the data, in a moment: the hot tables are copied in one read transaction while the writer goes on, files
that never change are linked. Whoever asked for it copies it to where it shall be, with checksums, and a list of files that is
written last: a backup without it is not whole.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phasewise.collector.access_keys import NAME as KEYS
from phasewise.collector.audit import NAME as AUDIT
from phasewise.collector.durable import put_in_place, sync_path
from phasewise.collector.journal import Position
from phasewise.collector.kept_rollups import FOLDER as EXPIRED
from phasewise.collector.lake import KINDS, crc32c_of
from phasewise.collector.recovery import FILE
from phasewise.collector.segment import segment_numbers, segment_path
from phasewise.collector.sidecar import Committed, Sidecar
from phasewise.collector.store import Store
from phasewise.collector.store_errors import DamagedStore
from phasewise.collector.tables import SCHEMA_VERSION
from phasewise.rules.errors import InputError, MachineError

LIST = "backup.json"
_SNAPSHOT = ".snapshot-"


# Who may come in goes with the data: restored without its keys, a server on loopback would ask nobody.
_ALSO = (KEYS, AUDIT)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """folder: holds it until `drop`; commit: the last one in it."""

    folder: Path
    commit: int


def take_snapshot(store: Store, data: Path) -> Snapshot:
    """What is stored now, in a folder of its own below the data. Raises MachineError where the disk refuses."""
    folder = store.cold_directory / f"{_SNAPSHOT}{secrets.token_hex(6)}"
    try:
        store.cold_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in (folder, folder / "journal"):
            part.mkdir(mode=0o700)
        _link_segments(data, folder)  # before the copy: what is stored and sealed in between may be dropped
        positions = store.copy_to(folder / FILE)
        _link_segments(data, folder)
        told = dict(positions.iter_rows())
        committed = Committed.parse(told.get("commit", ""))
        _cut_journal(folder, Position.parse(told.get("journal", "0:0")))
        Sidecar(folder / "watermark").note(committed, at_once=True)
        for kind in KINDS:  # the log first: the files it names are there before it is written
            _link(store.cold_directory / kind / "_delta_log", folder / "cold" / kind / "_delta_log", "*")
            _link(store.cold_directory / kind, folder / "cold" / kind, "date=*/hour=*/*")
        _link(store.cold_directory / EXPIRED, folder / "cold" / EXPIRED, "*.parquet")
        _link(data / "spans", folder / "spans", "date=*/hour=*/*")
        note = data / "spans" / "archived.json"
        if note.exists():
            shutil.copyfile(note, folder / "spans" / note.name)
        for name in _ALSO:
            if (data / name).exists():
                _copy(data / name, folder / name)
        return Snapshot(folder, committed.number)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise MachineError(f"{folder}: no snapshot: {error.strerror or error} (check the free space)") from error


def drop_snapshots(store: Store, older_than_s: float = 0.0, now_unix_s: float = 0.0) -> int:
    """Remove what ended backups left; how many."""
    found = [
        path for path in store.cold_directory.glob(f"{_SNAPSHOT}*") if path.stat().st_mtime <= now_unix_s - older_than_s
    ]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return len(found)


def write_backup(snapshot: Path, out: Path) -> dict[str, object]:
    """Copy a snapshot to a new folder and list its files; what was written. Raises InputError where `out` holds anything."""
    _require_empty(out, "--out")
    files = []
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for source in _files(snapshot):
            name = str(source.relative_to(snapshot))
            _copy(source, out / name)
            files.append({"path": name, "bytes": (out / name).stat().st_size, "crc32c": crc32c_of(out / name)})
        commit = Sidecar(snapshot / "watermark").last
        told: dict[str, object] = {
            "phasewise_backup": 1,
            "schema": SCHEMA_VERSION,
            "commit": commit.number,
            "unix_ns": commit.unix_ns,
            "files": files,
        }
        partial = out / f"{LIST}.partial"
        partial.write_text(json.dumps(told, indent=1), encoding="utf-8")
        put_in_place(partial, out / LIST)
    except OSError as error:
        raise MachineError(f"{out}: the backup cannot be written: {error.strerror or error} (make room)") from error
    return {"out": str(out), "commit": commit.number, "files": len(files), "bytes": _total(files)}


def restore(source: Path, data: Path) -> dict[str, object]:
    """Copy a backup into an empty data folder, every file checked against the list; what was restored."""
    told = _read_list(source)
    _require_empty(data, "--data")
    listed = told["files"]
    assert isinstance(listed, list)
    for entry in listed:  # all of them before the first is copied: half a restore helps nobody
        path = source / entry["path"]
        if ".." in Path(entry["path"]).parts or Path(entry["path"]).is_absolute():
            raise InputError(source / LIST, entry["path"], "leads out of the backup")
        if not path.is_file():
            raise InputError(source, entry["path"], "is missing from the backup")
        if path.stat().st_size != entry["bytes"] or crc32c_of(path) != entry["crc32c"]:
            raise InputError(source, entry["path"], "is damaged: its checksum is not the one of the backup")
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in listed:
            _copy(source / entry["path"], data / entry["path"])
    except OSError as error:
        raise MachineError(f"{data}: cannot be restored: {error.strerror or error} (make room)") from error
    try:
        with Store(data / FILE, verified=True) as store:
            rows = store.query("SELECT count(*) AS n FROM requests")["n"].item()
    except DamagedStore as error:
        raise MachineError(f"{data}: restored, but the store cannot be read: {error}") from error
    return {"data": str(data), "commit": told["commit"], "files": len(listed), "requests": rows}


def _read_list(source: Path) -> dict[str, object]:
    try:
        told = json.loads((source / LIST).read_text(encoding="utf-8"))
        if told["phasewise_backup"] == 1 and told["schema"] <= SCHEMA_VERSION and isinstance(told["files"], list):
            return dict(told)
    except FileNotFoundError:
        raise InputError(source, "", f"holds no whole backup: there is no {LIST}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(source / LIST, "", "cannot be read: was it written by phasewise db backup?") from None
    raise InputError(source / LIST, "", "was written by a newer release", "upgrade phasewise")


def _link_segments(data: Path, folder: Path) -> None:
    for number in segment_numbers(data / "journal"):
        target = segment_path(folder / "journal", number)
        if not target.exists():
            try:
                os.link(segment_path(data / "journal", number), target)
            except FileNotFoundError:
                continue


def _cut_journal(folder: Path, position: Position) -> None:
    """No segment beyond the commit, and the one it stands in only so far: a copy, for the original is being written."""
    for number in segment_numbers(folder / "journal"):
        path = segment_path(folder / "journal", number)
        if number > position.segment:
            path.unlink()
        elif number == position.segment:
            data = path.read_bytes()[: position.offset]
            path.unlink()
            path.write_bytes(data)


def _link(source: Path, target: Path, pattern: str) -> None:
    for path in sorted(source.glob(pattern)):
        if path.is_file() and not path.name.startswith("."):
            place = target / path.relative_to(source)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except FileNotFoundError:
                continue  # replaced and deleted since


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o600)
    sync_path(target)


def _require_empty(folder: Path, option: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(option, str(folder), "is not an empty folder", "name a new one")


def _total(files: list[dict[str, object]]) -> int:
    return sum(int(str(entry["bytes"])) for entry in files)
