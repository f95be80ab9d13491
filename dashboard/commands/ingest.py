"""`phasewise ingest`: files into the store, through the server that owns the directory or directly."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasewise.dashboard.commands.connection import Local, Server, open_data, server_of
from phasewise.dashboard.commands.progress import progress
from phasewise.rules.errors import InputError

CHUNK_BYTES = 8 * 2**20  # of JSON lines a request: under the server's limit, enough to make the round trip cheap
PARTIAL = 5


@dataclass(slots=True)
class Result:
    """Counts of what was stored, by kind, and what could not be."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, told: Mapping[str, Any], source: Path) -> None:
        """Takes over the counts and problems that one file or chunk gave."""
        for name, count in told.get("counts", {}).items():
            self.counts[name] += int(count)
        self.problems += [f"{source}: {problem}" for problem in told.get("problems", [])]


def run(options: Namespace) -> int:
    """Exit code 5 where some records of a file could not be used; they are named on stderr."""
    files = [(path, False) for path in options.files] + [(path, True) for path in options.scrapes]
    if not files:
        raise InputError("ingest", "", "names no file", "give FILE... or --scrapes FILE")
    for path, _ in files:
        _require_readable(path)
    result = Result()
    server = server_of(options)
    if server is not None:
        for path, is_scrapes in files:
            _through(server, path, is_scrapes, result)
    else:
        with open_data(options.data, create=True) as local:
            for path, _ in files:
                _directly(local, path, result)
    _tell(result, as_json=options.json)
    return PARTIAL if result.problems else 0


def _require_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(path, "", (error.strerror or str(error)).lower(), "name a file that can be read") from None


def _through(server: Server, path: Path, is_scrapes: bool, result: Result) -> None:
    """Sends a file; JSON lines of scrapes in chunks, so that there is progress and no body beyond the limit."""
    size = path.stat().st_size
    with progress(f"sending {path.name}", max(size, 1)) as advance:
        for chunk in _chunks(path) if is_scrapes else [path.read_bytes()]:
            parameters = [("kind", "scrapes" if is_scrapes else "auto"), ("name", path.name)]
            try:
                result.add(server.send("/api/v1/ingest", chunk, parameters), path)
            except InputError as error:
                raise InputError(path, "", _own_words(error), error.remedy) from None
            advance(len(chunk))


def _own_words(error: InputError) -> str:
    """What a server said, without the address in front and the remedy behind, which stand elsewhere in the line."""
    return str(error).removeprefix(f"{error.source}: ").removesuffix(f" ({error.remedy})")


def _chunks(path: Path) -> Iterator[bytes]:
    """Whole lines, about CHUNK_BYTES at a time."""
    with path.open("rb") as handle:
        while lines := handle.readlines(CHUNK_BYTES):
            yield b"".join(lines)


def _directly(local: Local, path: Path, result: Result) -> None:
    from phasewise.collector.importers import import_file

    with progress(f"reading {path.name}") as advance:
        imported = import_file(path)
        advance(0)
        result.add({"counts": local.writer.add_import(imported), "problems": imported.problems}, path)


def _tell(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"counts": dict(result.counts), "problems": result.problems}, indent=2, ensure_ascii=False))
    else:
        counted = ", ".join(f"{count:,} {name}" for name, count in sorted(result.counts.items()))
        print(f"stored {counted or 'nothing'}")
    for problem in result.problems[:20]:
        print(f"phasewise: {problem}", file=sys.stderr)
    if len(result.problems) > 20:
        print(f"phasewise: and {len(result.problems) - 20} more problems", file=sys.stderr)
