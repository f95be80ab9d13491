"""JSON objects of a file: one object, an array of them, or one a line; bad ones are counted and named, good ones go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phasewise.rules.errors import InputError

PROBLEMS = 20  # named; the rest is only counted


class Lines:
    """The objects of a file, with the place of each for messages."""

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.counts = {"good": 0, "bad": 0}
        self.problems: list[str] = []
        self._objects = list(self._read(body))
        if not self._objects:
            detail = self.problems[0] if self.problems else "holds no JSON object"
            raise InputError(name, "", detail, "write one JSON object a line")

    @property
    def first(self) -> dict[str, Any]:
        return self._objects[0][1]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place ("line 3") and object."""
        yield from self._objects

    def good(self, count: int = 1) -> None:
        self.counts["good"] += count

    def bad(self, place: str, field: str, problem: str, remedy: str = "") -> None:
        """Count a line that cannot be used."""
        self.counts["bad"] += 1
        if len(self.problems) < PROBLEMS:
            where = f"{place}, {field}" if field else place
            self.problems.append(f"{self.name}: {where}: {problem}" + (f" ({remedy})" if remedy else ""))

    def require_some(self, remedy: str) -> None:
        """Raise when nothing in the file could be used."""
        if not self.counts["good"]:
            raise InputError(self.name, "", self.problems[0] if self.problems else "holds nothing to import", remedy)

    def _read(self, body: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        text = body.decode("utf-8", "replace").lstrip("\ufeff")
        whole = self._whole(text)
        if whole is not None:
            yield from whole
            return
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                self.bad(f"line {number}", "", f"is not JSON: {error}", "write one JSON object a line")
                continue
            if isinstance(found, dict):
                yield f"line {number}", found
            else:
                self.bad(
                    f"line {number}", "", f"is a {type(found).__name__}, not an object", "write one JSON object a line"
                )

    @staticmethod
    def _whole(text: str) -> list[tuple[str, dict[str, Any]]] | None:
        """The file as one JSON document, or None when it is JSON lines."""
        newline = text.strip().find("\n")
        if newline >= 0 and text.lstrip().startswith("{"):
            try:
                json.loads(text.strip()[:newline])
                return None
            except ValueError:
                pass
        try:
            document = json.loads(text)
        except ValueError:
            return None
        items = document if isinstance(document, list) else [document]
        return [(f"item {number}", item) for number, item in enumerate(items, 1) if isinstance(item, dict)]
