"""`phasewise ingest`: files, and windows of other systems, into the store: through the server that owns it or directly."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from phasewise.dashboard.commands.connection import Local, Server, open_data, server_of
from phasewise.dashboard.commands.file_import import Directly, Target, Through, files_of, import_one
from phasewise.rules.errors import InputError, MachineError, PhasewiseError

if TYPE_CHECKING:
    from phasewise.dashboard.commands.backfill import Wanted

PARTIAL = 5
_PROBLEMS_KEPT = 1000  # a file of any size may be bad from end to end
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
        more = [own + problem.removeprefix(own) for problem in told.get("problems", [])]
        self.problems += more[: max(0, _PROBLEMS_KEPT - len(self.problems))]


def run(options: Namespace) -> int:
    """Exit code 5 where some records could not be used, which are named on stderr; 3 where other systems hold nothing."""
    systems = options.prometheus or options.tempo or options.jaeger
    if not systems and _of_systems(options):
        remedy = "give --prometheus, --tempo or --jaeger URL"
        raise InputError(_of_systems(options), "", "says nothing about files", remedy)
    if options.instance and not options.facts:
        raise InputError("--instance", options.instance, "says nothing without --facts", "give --facts FILE")
    if not options.files and not options.scrapes and not systems and not options.facts:
        remedy = "give FILE..., --scrapes FILE, --facts FILE, or --prometheus, --tempo or --jaeger URL"
        raise InputError("ingest", "", "names no file", remedy)
    for path in (*options.files, *options.scrapes, *options.facts):
        _require_readable(path)
    files = [(path, "auto") for path in files_of(options.files)]
    files += [(path, "scrapes") for path in files_of(options.scrapes)]
    asked = _asked(options) if systems else None
    result = Result()
    is_empty = False
    server = server_of(options)
    if server is not None:
        _import(files, Through(server), result, again=options.again)
        for path in options.facts:  # after what tells which processes there are
            parameters = [("kind", "facts"), ("name", path.name), ("instance", options.instance)]
            result.add(server.send("/api/v1/ingest", path.read_bytes(), parameters), path)
        if asked:
            is_empty = _bring_in(asked, options, lambda body, name: _send(server, body, name), result)
    else:
        with open_data(options.data, create=True) as local:
            _import(files, Directly(local), result, again=options.again)
            for path in options.facts:
                result.add({"counts": _facts(local, path, options.instance)}, path)
            if asked:
                is_empty = _bring_in(asked, options, lambda body, name: _store(local, body, name), result)
    _tell(result, as_json=options.json)
    if is_empty and not files and not options.facts and not result.problems:
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
    }
    return next((option for option, value in given.items() if value), "")


def _import(files: Sequence[tuple[Path, str]], target: Target, result: Result, *, again: bool) -> None:
    """One file after another. One that holds nothing is a problem of its own where others do; alone it is an error."""
    failed: list[PhasewiseError] = []
    try:
        for path, kind in files:
            try:
                import_one(target, path, result, kind=kind, again=again)
            except MachineError:
                raise
            except PhasewiseError as error:
                failed.append(error)
    except (KeyboardInterrupt, MachineError):
        if result.counts:
            _tell(result, as_json=False, stream=sys.stderr)
        print("phasewise: the same command goes on from there", file=sys.stderr)
        raise
    if failed and len(failed) == len(files):
        raise failed[0]
    result.problems += [str(error) for error in failed]


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
        if not path.is_dir():
            with path.open("rb"):
                pass
    except OSError as error:
        raise InputError(path, "", (error.strerror or str(error)).lower(), "name a file that can be read") from None


def _facts(local: Local, path: Path, instance: str) -> Mapping[str, int]:
    from phasewise.collector.importers.facts_file import read_facts_file
    from phasewise.collector.profiles import Profiles

    statements = read_facts_file(path.read_bytes(), path.name, Profiles(local.rulebook.engines))
    return local.writer.add_facts(statements, instance or None)


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
        counted = ", ".join(f"{count:,} {name}" for name, count in sorted(result.counts.items()) if count)
        print(f"stored {counted or 'nothing'}", file=stream)
    for problem in result.problems[:20]:
        print(f"phasewise: {problem}", file=sys.stderr)
    if len(result.problems) > 20:
        print(f"phasewise: and {len(result.problems) - 20} more problems", file=sys.stderr)
