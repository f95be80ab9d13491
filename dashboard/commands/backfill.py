"""`phasewise ingest --prometheus|--tempo|--jaeger URL`: a window of what another system stored, into this store, page by page."""

from __future__ import annotations

import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from phasewise.analyzer.window import parse_time
from phasewise.collector.backfill import Coverage, Remote, Source, pages
from phasewise.collector.backfill.coverage import COVERAGE
from phasewise.collector.backfill.jaeger import Jaeger
from phasewise.collector.backfill.prometheus import Prometheus
from phasewise.collector.backfill.tempo import Tempo
from phasewise.collector.exposition import metric_prefixes
from phasewise.collector.profiles import Profiles
from phasewise.dashboard.commands.progress import progress
from phasewise.rules.errors import InputError
from phasewise.rules.load import load_rulebook

DEFAULT_FROM = "now-1h"
FRESH_MS = 5 * 60 * 1000  # so young that more may come: asked for again by the next run
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*)")
_STEP = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_STEP_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
KINDS = {"prometheus": "Prometheus", "tempo": "Tempo", "jaeger": "Jaeger"}

Take = Callable[[bytes, str], Mapping[str, Any]]  # body and name to counts and problems, as POST /api/v1/ingest
Told = Callable[[Mapping[str, Any], str], None]  # such counts and problems, and the address they are of


@dataclass(slots=True)
class Done:
    """How much time was asked for, and how many pages held something."""

    asked_ms: int = 0
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A window of one or more systems of one kind, checked."""

    systems: tuple[tuple[str, str], ...]  # kind and address
    from_ms: int
    to_ms: int
    headers: Mapping[str, str]
    match: str
    step_s: float | None
    again: bool


def wanted(options: Namespace, now_unix_ns: int) -> Wanted:
    """What the options ask for. Raises InputError for options that do not fit together."""
    systems = tuple((kind, url) for kind in KINDS for url in getattr(options, kind))
    for kind, url in systems:
        if not urlsplit(url).hostname:
            raise InputError(f"--{kind}", url, "names no host", "write http://HOST:PORT")
    if options.match and len({kind for kind, _ in systems}) > 1:
        raise InputError("--match", options.match, "means another thing to each system", "run them one after another")
    if options.step and not options.prometheus:
        raise InputError("--step", options.step, "is for --prometheus only", "leave it out")
    to_ns = parse_time(options.end or "now", now_unix_ns, "--to")
    from_ns = parse_time(options.start or DEFAULT_FROM, now_unix_ns, "--from")
    if from_ns >= to_ns:
        raise InputError("--from", options.start or DEFAULT_FROM, "is not before --to", "name the earlier time first")
    headers = dict(_header(text) for text in options.header)
    step_s = _step_s(options.step)
    from_ms, to_ms = from_ns // 10**6, -(-min(to_ns, now_unix_ns) // 10**6)
    if from_ms >= to_ms:
        raise InputError("--from", options.start, "lies in the future", "name a time that has passed")
    return Wanted(systems, from_ms, to_ms, headers, options.match, step_s, options.again)


def bring_in(asked: Wanted, target: str, coverage: Coverage, take: Take, told: Told, now_unix_ns: int) -> Done:
    """Reads what is not covered yet, hands it to `take` and its answers to `told`.

    target: names the store in the coverage. Stopped anywhere, the next run goes on from there.
    """
    settled_ms = now_unix_ns // 10**6 - FRESH_MS
    done = Done()
    for kind, url in asked.systems:
        with _source(kind, url, asked) as source:
            key = f"{kind} {source.url} match={asked.match} step={asked.step_s or ''}{target}"
            gaps = [(asked.from_ms, asked.to_ms)]
            if not asked.again:
                gaps = list(coverage.missing(key, asked.from_ms, asked.to_ms))
            span_ms = sum(end_ms - start_ms for start_ms, end_ms in gaps)
            done.asked_ms += span_ms
            with progress(f"reading {KINDS[kind]}", max(span_ms, 1)) as advance:
                for page in (page for gap in gaps for page in pages(source, *gap)):
                    if page.body is not None:
                        done.pages += 1
                        told(_taken(take, page.body, source.url), source.url)
                    told({"problems": page.problems}, source.url)
                    coverage.add(key, page.from_ms, min(page.to_ms, settled_ms))
                    advance(page.to_ms - page.from_ms)
    return done


def _taken(take: Take, body: bytes, name: str) -> Mapping[str, Any]:
    """A page of which nothing can be used is a problem of that page: those behind it are still read."""
    try:
        return take(body, name)
    except InputError as error:
        return {"problems": [str(error)]}


@contextmanager
def _source(kind: str, url: str, asked: Wanted) -> Iterator[Source]:
    remote = Remote(url, KINDS[kind], asked.headers, time.sleep)
    try:
        if kind == "prometheus":
            yield Prometheus(remote, metric_prefixes(Profiles(load_rulebook().engines)), asked.match, asked.step_s)
        elif kind == "tempo":
            yield Tempo(remote, asked.match)
        else:
            yield Jaeger(remote, asked.match)
    finally:
        remote.close()


def coverage_of(options: Namespace) -> tuple[Coverage, str]:
    """What earlier runs brought in, and the store that this speaks of: beside the data where they are on this machine, else in
    the user's state directory, by the address of the server."""
    if not options.server:
        return Coverage(options.data / COVERAGE), ""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Coverage(Path(state) / "phasewise" / COVERAGE), f" into {options.server.rstrip('/')}"


def _header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text.strip())
    if found is None:  # the text may be a key: it is not repeated
        raise InputError("--header", "", "is no header", "write 'NAME: VALUE'")
    return found[1], found[2].strip()


def _step_s(text: str) -> float | None:
    if not text:
        return None
    found = _STEP.fullmatch(text.strip())
    if found is None or float(found[1]) * _STEP_S[found[2]] < 0.001:
        raise InputError("--step", text, "is no duration", "write 15s, 500ms or 1m")
    return float(found[1]) * _STEP_S[found[2]]
