"""`phasewise ingest`: files, and windows of other systems, into the store: through the server that owns it or directly."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from phasewise.dashboard.commands.connection import Local, Server, open_data, server_of
from phasewise.dashboard.commands.progress import progress
from phasewise.rules.errors import InputError, PhasewiseError

if TYPE_CHECKING:
    from phasewise.dashboard.commands.backfill import Wanted

CHUNK_BYTES = 8 * 2**20  # of JSON lines a request: under the server's limit, enough to make the round trip cheap
PARTIAL = 5
NO_DATA = 3


@dataclass(slots=True)
class Result:
    """Counts of what was stored, by kind, and what could not be."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, told: Mapping[str, Any], source: Path | str) -> None:
        """Takes over the counts and problems that one file or chunk gave."""
        for name, count in told.get("counts", {}).items():
            self.counts[name] += int(count)
        own = f"{source}: "
        self.problems += [own + problem.removeprefix(own) for problem in told.get("problems", [])]


def run(options: Namespace) -> int:
    """Exit code 5 where some records could not be used, which are named on stderr; 3 where other systems hold nothing."""
    files = [(path, False) for path in options.files] + [(path, True) for path in options.scrapes]
    systems = options.prometheus or options.tempo or options.jaeger
    if not systems and _of_systems(options):
        remedy = "give --prometheus, --tempo or --jaeger URL"
        raise InputError(_of_systems(options), "", "says nothing about files", remedy)
    if not files and not systems:
        remedy = "give FILE..., --scrapes FILE, or --prometheus, --tempo or --jaeger URL"
        raise InputError("ingest", "", "names no file", remedy)
    for path, _ in files:
        _require_readable(path)
    asked = _asked(options) if systems else None
    result = Result()
    is_empty = False
    server = server_of(options)
    if server is not None:
        for path, is_scrapes in files:
            _through(server, path, is_scrapes, result)
        if asked:
            is_empty = _bring_in(asked, options, lambda body, name: _send(server, body, name), result)
    else:
        with open_data(options.data, create=True) as local:
            for path, _ in files:
                _directly(local, path, result)
            if asked:
                is_empty = _bring_in(asked, options, lambda body, name: _store(local, body, name), result)
    _tell(result, as_json=options.json)
    if is_empty and not files and not result.problems:
        return NO_DATA
    return PARTIAL if result.problems else 0


def _of_systems(options: Namespace) -> str:
    """The first option given that is about other systems; "" without one."""
    given = {
        "--from": options.start,
        "--to": options.end,
        "--header": options.header,
        "--match": options.match,
        "--step": options.step,
        "--again": options.again,
    }
    return next((option for option, value in given.items() if value), "")


def _asked(options: Namespace) -> Wanted:
    from phasewise.dashboard.commands import backfill  # with polars, which files do not need where a server reads them

    return backfill.wanted(options, time.time_ns())


def _bring_in(
    asked: Wanted, options: Namespace, take: Callable[[bytes, str], Mapping[str, Any]], result: Result
) -> bool:
    """Whether other systems were asked and had nothing; what was not asked for again is said on stderr."""
    from phasewise.dashboard.commands import backfill

    coverage, target = backfill.coverage_of(options)
    try:
        done = backfill.bring_in(asked, target, coverage, take, result.add, time.time_ns())
    except PhasewiseError:
        if result.counts:  # before the error, so that it is known what stays
            _tell(result, as_json=False, stream=sys.stderr)
        raise
    if done.asked_ms == 0:
        print("phasewise: all of that window was stored by an earlier run (--again asks for it again)", file=sys.stderr)
    elif not done.pages:
        print("phasewise: they hold nothing of a known engine in that window", file=sys.stderr)
    return done.asked_ms > 0 and not done.pages


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


def _send(server: Server, body: bytes, name: str) -> Mapping[str, Any]:
    told: Mapping[str, Any] = server.send("/api/v1/ingest", body, [("kind", "auto"), ("name", name)])
    return told


def _store(local: Local, body: bytes, name: str) -> Mapping[str, Any]:
    from phasewise.collector.importers import import_bytes
    from phasewise.collector.profiles import Profiles

    imported = import_bytes(body, name, Profiles(local.rulebook.engines))
    return {"counts": local.writer.add_import(imported), "problems": imported.problems}


def _tell(result: Result, *, as_json: bool, stream: TextIO | None = None) -> None:
    if as_json:
        print(json.dumps({"counts": dict(result.counts), "problems": result.problems}, indent=2, ensure_ascii=False))
    else:
        counted = ", ".join(f"{count:,} {name}" for name, count in sorted(result.counts.items()))
        print(f"stored {counted or 'nothing'}", file=stream)
    for problem in result.problems[:20]:
        print(f"phasewise: {problem}", file=sys.stderr)
    if len(result.problems) > 20:
        print(f"phasewise: and {len(result.problems) - 20} more problems", file=sys.stderr)
