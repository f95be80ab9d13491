"""The format phasewise-summary/1: its schema, and errors that name the field and what to do about it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from phasewise.rules.errors import InputError

SCHEMA_PATH = Path(__file__).with_name("phasewise-summary-1.schema.json")
FORMAT = "phasewise-summary/1"
SETTING_SECTIONS = ("hardware", "engine", "model", "workload")
POINT_SECTIONS = ("observed", "client", "server", "baseline")
LIST_SECTIONS = ("sweep", "arms", "timeline", "requests")


@cache
def schema() -> Mapping[str, object]:
    """The JSON Schema (draft 2020-12) of phasewise-summary/1."""
    loaded: dict[str, object] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    return loaded


@cache
def metric_names() -> frozenset[str]:
    """The closed vocabulary of measured numbers, the same at every place of a summary."""
    definitions = schema()["$defs"]
    assert isinstance(definitions, dict)
    return frozenset(definitions["metrics"]["properties"])


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(schema())


@cache
def _known_names() -> frozenset[str]:
    def names(node: object) -> Iterator[str]:
        if isinstance(node, Mapping):
            properties = node.get("properties")
            if isinstance(properties, Mapping):
                yield from properties
            for value in node.values():
                yield from names(value)
        elif isinstance(node, list):
            for value in node:
                yield from names(value)

    return frozenset(names(schema()))


def validate_summary(document: object, source: str = "summary") -> None:
    """Raise InputError for a document that is not phasewise-summary/1.

    Names the first wrong field by its path and says what it must be; a field that does not exist is an error of the
    sender (the closest known name is offered), a number must be finite. source: file or option, for the message.
    """
    if not isinstance(document, Mapping):
        raise InputError(source, "", "is not a JSON object", "send one object in the format phasewise-summary/1")
    found = document.get("schema")
    if found != FORMAT:
        raise InputError(source, "schema", f"is {_shown(found)}", f'set "schema": "{FORMAT}"')
    for path, value in _numbers(document, ""):
        if not math.isfinite(value):
            raise InputError(
                source, path, f"is {value}, no finite number", "leave it out or set it to null when unknown"
            )
    # a wrong value inside a point also makes its fields count as unevaluated: only a name that does not exist is that
    error = best_match(e for e in _validator().iter_errors(document) if not _only_unevaluated(e))
    if error is not None:
        field, problem, remedy = _explained(error)
        raise InputError(source, field, problem, remedy)


def _numbers(node: object, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(node, float):
        yield path, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _numbers(value, f"{path}[{index}]")


def _explained(error: ValidationError) -> tuple[str, str, str]:
    """Field, problem and remedy of one schema violation."""
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    rule, told = str(error.validator), error.validator_value
    value: object = error.instance
    if rule in ("additionalProperties", "unevaluatedProperties"):
        known = _names_here(error.schema, rule)
        name = min((str(n) for n in value if n not in known), default="?") if isinstance(value, Mapping) else "?"
        close = get_close_matches(name, known or _known_names(), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "see the schema for the names that exist here"
        return f"{field}.{name}".lstrip("."), "is no field of phasewise-summary/1", hint
    if rule == "required" and isinstance(told, list) and isinstance(value, Mapping):
        name = min(str(n) for n in told if n not in value)
        return f"{field}.{name}".lstrip("."), "is missing", "add it; sections without numbers are empty objects {}"
    if rule == "enum" and isinstance(told, list):
        choices = ", ".join(str(v) for v in told if v is not None)
        return field, f"is {_shown(value)}", f"use one of {choices}, or null when unknown"
    if rule == "type":
        kinds = told if isinstance(told, list) else [told]
        readable = " or ".join(str(k) for k in kinds if k != "null")
        return field, f"is {_shown(value)}, not of type {readable}", "null or absent means unknown"
    if rule in ("minimum", "maximum"):
        word = "below" if rule == "minimum" else "above"
        return field, f"is {_shown(value)}, {word} {told}", "check the unit in the field's name"
    if rule == "pattern":
        return field, f"{_shown(value)} is no setting", "name it section.field, as in workload.concurrency"
    return field, error.message[:200], "see the schema of phasewise-summary/1"


def _only_unevaluated(error: ValidationError) -> bool:
    if error.validator != "unevaluatedProperties" or not isinstance(error.instance, Mapping):
        return False
    return set(error.instance) <= _names_here(error.schema, "unevaluatedProperties")


def _names_here(at: object, rule: str) -> set[str]:
    """Fields that exist at the place of a violation; points carry the metric vocabulary as well."""
    properties = at.get("properties") if isinstance(at, Mapping) else None
    known = set(properties) if isinstance(properties, Mapping) else set()
    return known | metric_names() if rule == "unevaluatedProperties" else known


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
