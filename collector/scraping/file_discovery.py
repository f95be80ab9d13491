"""Targets written to files, in the JSON form of Prometheus' `file_sd`: [{"targets": [...], "labels": {...}}, ...].

Files are looked at every few seconds. One that cannot be read, or is half written, keeps what it said before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phasewise.collector.scraping.jobs import Endpoint, Job, endpoint_of
from phasewise.rules.errors import InputError

LOOK_S = 5.0
FILE_BYTES = 4 << 20
FILES = 100
_REMEDY = 'write [{"targets": ["HOST:PORT"], "labels": {"host.name": "..."}}]'
_PATH, _SCHEME, _HIDDEN = "__metrics_path__", "__scheme__", "__"  # labels that Prometheus itself reads
Found = Callable[[Sequence[Endpoint], str], None]  # the targets there are now, and what is wrong ("" for nothing)


class FileDiscovery:
    """Tells `on_found` whenever the files of a job say something else."""

    kind = "file"

    def __init__(self, job: Job, look_s: float = LOOK_S) -> None:
        self._job = job
        self._look_s = look_s
        self._known: dict[str, tuple[tuple[int, int, int], list[Endpoint]]] = {}

    def run(self, stopping: threading.Event, on_found: Found) -> None:
        last: tuple[list[Endpoint], str] | None = None
        while True:
            now = self.look()
            if now != last:
                on_found(*now)
                last = now
            if stopping.wait(self._look_s):
                return

    def look(self) -> tuple[list[Endpoint], str]:
        """Targets of all files as they are, and the first fault."""
        problems = []
        paths = sorted({path for pattern in self._job.files for path in _matching(Path(pattern))})[:FILES]
        if not paths:
            problems.append(f"no file matches {', '.join(self._job.files)}")
        self._known = {path: known for path, known in self._known.items() if path in paths}
        for path in paths:
            try:
                status = Path(path).stat()
                mark = (status.st_mtime_ns, status.st_size, status.st_ino)
                if path not in self._known or self._known[path][0] != mark:
                    self._known[path] = (mark, self._read(path))
            except InputError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{path}: {(error.strerror or str(error)).lower()}")
        found = [one for _, endpoints in self._known.values() for one in endpoints]
        return sorted(found, key=lambda one: one.url), problems[0] if problems else ""

    def _read(self, path: str) -> list[Endpoint]:
        with Path(path).open("rb") as handle:
            body = handle.read(FILE_BYTES + 1)
        if len(body) > FILE_BYTES:
            raise InputError(path, "", f"is larger than {FILE_BYTES >> 20} MiB", "split it")
        try:
            groups = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(path, "", f"is not JSON: {error}", _REMEDY) from None
        if not isinstance(groups, list):
            raise InputError(path, "", "is no list of groups", _REMEDY)
        return [one for number, group in enumerate(groups) for one in self._group(path, f"[{number}]", group)]

    def _group(self, path: str, where: str, group: Any) -> list[Endpoint]:
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = group.get("labels", {}) if isinstance(group, dict) else None
        if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            raise InputError(path, f"{where}.targets", "is no list of addresses", _REMEDY)
        if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
            raise InputError(path, f"{where}.labels", "is no object of texts", _REMEDY)
        scheme, own_path = labels.get(_SCHEME, self._job.scheme), labels.get(_PATH, self._job.path)
        shown = {key: value for key, value in labels.items() if not key.startswith(_HIDDEN)}
        return [
            endpoint_of(one, f"{path}: {where}.targets", scheme, own_path, {**self._job.labels, **shown})
            for one in targets
        ]


def _matching(pattern: Path) -> list[str]:
    """Files of a pattern; as in Prometheus, only the last part of it may hold a star."""
    return [str(path) for path in pattern.parent.glob(pattern.name) if path.is_file()]
