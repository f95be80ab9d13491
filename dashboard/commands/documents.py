"""JSON documents from files or stdin: one object, an array, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.rules.errors import InputError


@dataclass(frozen=True, slots=True)
class Document:
    """One object and where it stands: file, and item or line where there are several."""

    place: str
    content: Mapping[str, Any]


@contextmanager
def placed(document: Document, field_names: str) -> Iterator[None]:
    """Errors about the content (which say `field_names` for the file) name the document's place instead."""
    try:
        yield
    except InputError as error:
        if error.source != field_names:
            raise
        text = str(error).removeprefix(f"{field_names}: ").removesuffix(f" ({error.remedy})")
        raise InputError(document.place, "", text, error.remedy) from None


def read_documents(sources: Sequence[str]) -> tuple[list[Document], bool]:
    """All documents of all sources (`-` is stdin), and whether the input was a single object."""
    found: list[Document] = []
    single = len(sources) == 1
    for source in sources:
        documents, alone = _parse(source, _text(source))
        found += documents
        single = single and alone
    return found, single


def _text(source: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(source, f"byte {error.start}", "is not UTF-8 text", "save the file as UTF-8") from None
    except OSError as error:
        raise InputError(
            source, "", (error.strerror or str(error)).lower(), "name a JSON file, or - for stdin"
        ) from None


def _parse(source: str, text: str) -> tuple[list[Document], bool]:
    """Documents of one text; a text of one object is told from JSON lines with one line by nothing, so it counts as one."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as fault:
        return _lines(source, text, fault), False
    if isinstance(whole, list):
        return [_object(source, f"item {number}", item) for number, item in enumerate(whole, 1)], False
    return [_object(source, "", whole)], True


def _lines(source: str, text: str, fault: json.JSONDecodeError) -> list[Document]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_object(source, f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            # Where already the first line is no JSON it is one broken document, and its own place is the helpful one.
            line_number, problem = (number, error) if found else (fault.lineno, fault)
            remedy = "give one object, an array, or one object a line"
            raise InputError(source, f"line {line_number}", f"is not JSON: {problem.msg}", remedy) from None
    if not found:
        raise InputError(source, "", "is empty", "give one object, an array, or one object a line")
    return found


def _object(source: str, where: str, value: object) -> Document:
    if not isinstance(value, dict):
        raise InputError(source, where, "is not a JSON object", "give one object, an array of them, or one a line")
    return Document(f"{source}: {where}" if where else source, value)
