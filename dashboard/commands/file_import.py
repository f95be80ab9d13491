"""Files into the store, piece by piece: an import that was interrupted goes on where it was committed, and a file that is stored
already is not read again.

How far a file is read is kept in the store itself, in the transaction of the rows, under a digest of the file's content.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from phasewise.dashboard.commands.connection import Local, Server
from phasewise.dashboard.commands.progress import progress
from phasewise.rules.errors import InputError, PhasewiseError

if TYPE_CHECKING:
    from phasewise.collector.importers.pieces import Piece


@dataclass(frozen=True, slots=True)
class Told:
    """Of a piece: file, its identity, how far it is read with this piece, and when it was written."""

    path: Path
    identity: str
    position: str
    modified_unix_ns: int
    kind: str = "auto"


class Target(Protocol):
    """A store that takes pieces."""

    def position(self, identity: str) -> str:
        """How far a file is read; "" for one that was never imported."""

    def take(self, piece: Piece, told: Told) -> Mapping[str, Any]:
        """Stores a piece; its counts and problems."""


class Counted(Protocol):
    def add(self, told: Mapping[str, Any], source: Path | str) -> None:
        """Takes over counts and problems."""


@dataclass(frozen=True, slots=True)
class Through:
    """A running server."""

    server: Server

    def position(self, identity: str) -> str:
        told = self.server.ask(f"/api/v1/imports/{identity}")
        return str(told.get("position", "")) if isinstance(told, dict) else ""

    def take(self, piece: Piece, told: Told) -> Mapping[str, Any]:
        parameters = [
            ("kind", told.kind),
            ("name", told.path.name),
            ("number", str(piece.start.number)),
            ("file", told.identity),
            ("position", told.position),
            ("modified", str(told.modified_unix_ns)),
        ]
        try:
            answer: Mapping[str, Any] = self.server.send("/api/v1/ingest", piece.body, parameters)
        except InputError as error:
            raise InputError(told.path, "", _own_words(error), error.remedy) from None
        own = f"{told.path.name}: "
        return {**answer, "problems": [problem.removeprefix(own) for problem in answer.get("problems", [])]}


@dataclass(frozen=True, slots=True)
class Directly:
    """The data folder, opened by this process."""

    local: Local

    def position(self, identity: str) -> str:
        return self.local.writer.import_position(identity)

    def take(self, piece: Piece, told: Told) -> Mapping[str, Any]:
        from phasewise.collector.import_marks import Mark
        from phasewise.collector.importers import import_piece
        from phasewise.collector.profiles import Profiles

        imported = import_piece(
            piece.body,
            str(told.path),
            Profiles(self.local.rulebook.engines),
            modified_unix_ns=told.modified_unix_ns,
            received_unix_ns=time.time_ns(),
            first_number=piece.start.number,
        )
        counts = imported.counts
        if imported.kind != "nothing":
            counts = self.local.writer.add_import(imported, Mark(told.identity, told.position))
        return {"counts": counts, "problems": imported.problems}


def import_one(target: Target, path: Path, result: Counted, *, kind: str = "auto", again: bool = False) -> None:
    """Reads what of a file is not stored yet. Raises InputError where it holds nothing that can be used."""
    from phasewise.collector.import_marks import DONE
    from phasewise.collector.importers.pieces import Place, identity_of, pieces

    identity = identity_of(path)
    known = "" if again else target.position(identity)
    if known == DONE:
        print(f"phasewise: {path}: is stored already (--again reads it again)", file=sys.stderr)
        return
    start = Place.parse(known)
    if start:
        print(f"phasewise: {path}: goes on at line {start.number:,}, where it was interrupted", file=sys.stderr)
    status = path.stat()
    good = 1 if start else 0
    first_problem = ""
    with progress(f"reading {path.name}", max(status.st_size, 1)) as advance:
        for piece in pieces(path, start):
            if piece.problem:
                result.add({"problems": [piece.problem], "counts": {"bad": 1}}, path)
                first_problem = first_problem or f"{path}: {piece.problem}"
            if piece.body.strip():
                position = DONE if piece.last else str(piece.end)
                told = target.take(piece, Told(path, identity, position, status.st_mtime_ns, kind))
                good += int(told.get("counts", {}).get("good", 0))
                for problem in told.get("problems", [])[:1]:
                    first_problem = first_problem or f"{path}: {problem.removeprefix(f'{path}: ')}"
                result.add(told, path)
            advance(piece.read_bytes)
    if not good:
        raise PhasewiseError(first_problem or f"{path}: holds nothing to import")


def files_of(paths: list[Path]) -> list[Path]:
    """Files as named, and those in a named folder in order of their names, as rotated ones are written; of an export those that
    its manifest names."""
    from phasewise.collector.exchange_folder import files_of_export, is_export

    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        if is_export(path):
            found += files_of_export(path)
            continue
        inside = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        if not inside:
            raise InputError(path, "", "is a folder without files", "name files, or a folder that holds some")
        found += inside
    return found


def _own_words(error: InputError) -> str:
    """What a server said, without the address in front and the remedy behind, which stand elsewhere in the line."""
    return str(error).removeprefix(f"{error.source}: ").removesuffix(f" ({error.remedy})")
