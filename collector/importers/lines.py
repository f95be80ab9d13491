"""JSON objects of a file: one object, an array of them, or one a line; bad ones are counted and named, good ones go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Self

from phasewise.rules.errors import InputError

PROBLEMS = 20  # named; the rest is only counted


class Lines:
    """The objects of a file, or of the piece of it that begins with line `first_number`, with the place of each for messages."""

    def __init__(self, name: str, body: bytes, first_number: int = 1) -> None:
        self.name = name
        self.counts = {"good": 0, "bad": 0}
        self.problems: list[str] = []
        self._objects = list(self._read(body, first_number))

    @classmethod
    def of(cls, name: str, place: str, document: dict[str, Any]) -> Self:
        """One object that is known already."""
        found = cls(name, b"")
        found._objects.append((place, document))
        return found

    @property
    def first(self) -> dict[str, Any]:
        """Raises InputError where there is no object at all."""
        if not self._objects:
            found = self.problems[0].removeprefix(f"{self.name}: ") if self.problems else "holds no JSON object"
            raise InputError(self.name, "", found, "write one JSON object a line")
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
            if self.problems:
                raise InputError(self.name, "", self.problems[0].removeprefix(f"{self.name}: "))
            raise InputError(self.name, "", "holds nothing to import", remedy)

    def _read(self, body: bytes, first_number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        body = body.removeprefix(b"\xef\xbb\xbf") if first_number == 1 else body
        whole = self._whole(body) if first_number == 1 else None
        if whole is not None:
            yield from whole
            return
        for number, line in enumerate(body.split(b"\n"), first_number):
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError) as error:
                self.bad(f"line {number}", "", f"is not JSON: {_told(error)}", "write one JSON object a line")
                continue
            if isinstance(found, dict):
                yield f"line {number}", found
            else:
                self.bad(
                    f"line {number}", "", f"is a {type(found).__name__}, not an object", "write one JSON object a line"
                )

    @staticmethod
    def _whole(body: bytes) -> list[tuple[str, dict[str, Any]]] | None:
        """The file as one JSON document, or None when it is JSON lines."""
        text = body.strip()
        newline = text.find(b"\n")
        if newline >= 0 and text.startswith(b"{"):
            try:
                json.loads(text[:newline].decode("utf-8", "replace"))
                return None
            except (ValueError, RecursionError):
                pass
        try:
            document = json.loads(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
        items = document if isinstance(document, list) else [document]
        return [(f"item {number}", item) for number, item in enumerate(items, 1) if isinstance(item, dict)]


def _told(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)
