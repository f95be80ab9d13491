"""`--set name=value`: any switch of the engine's scheduler, memory and server, read by the type its field declares."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.serving.server_settings import ServerSettings
from phasewise.rules.errors import InputError

OPTION = "--set"
# What has an option of its own, or is nobody's to choose.
_NOT_SET = {"config", "executor", "export", "gpu", "host", "instance", "marks", "model", "port", "seed", "switches"}
SWITCHES: Mapping[str, Any] = typing.get_type_hints(EngineConfig)
SERVER: Mapping[str, Any] = {
    name: kind for name, kind in typing.get_type_hints(ServerSettings).items() if name not in _NOT_SET
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """switches: fields of EngineConfig; server: fields of ServerSettings."""

    switches: Mapping[str, Any]
    server: Mapping[str, Any]


def chosen(pairs: Sequence[str], options: Mapping[str, Any] | None = None) -> Chosen:
    """What was asked for. options: switches that have an option of their own.

    Raises InputError naming the setting, with the nearest name or what it must be.
    """
    switches: dict[str, Any] = dict(options or {})
    server: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InputError(OPTION, pair, "has no value", "write name=value, e.g. max_num_seqs=8")
        into, kinds = (switches, SWITCHES) if name in SWITCHES else (server, SERVER)
        if name not in kinds:
            raise InputError(OPTION, name, "is no setting of the engine", near(name, [*SWITCHES, *SERVER]))
        if name in into:
            raise InputError(OPTION, name, "is given twice", "give it once")
        into[name] = _read(name, text, kinds[name])
    return Chosen(switches, server)


def near(name: str, known: Iterable[str]) -> str:
    """The close matches as a question, else all that there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def words(kind: Any) -> str:
    """What a value of a type is, for people."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("none" if part is type(None) else words(part) for part in parts)
    if origin is Literal:
        return " or ".join(parts)
    if dataclasses.is_dataclass(kind):
        return "a JSON object with " + ", ".join(_fields(kind))
    if origin is tuple:
        return f"a JSON list, each item {words(parts[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a JSON object of names, each with {words(parts[1])}"
    named = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return named[kind]


def _read(name: str, text: str, kind: Any) -> Any:
    """Words for words, else JSON; `none` where the setting may be absent."""
    if text.lower() in ("none", "null") and type(None) in get_args(kind):
        return None
    value: Any = text
    try:
        if not _is_words(kind):
            value = json.loads(text, parse_constant=_no_number)
        return _typed(name, value, kind)
    except (TypeError, ValueError):
        raise InputError(OPTION, name, f"{text!r} does not fit", f"give {words(kind)}") from None


def _no_number(text: str) -> None:
    """NaN and Infinity, which JSON does not have and Python reads."""
    raise ValueError(text)


def _is_words(kind: Any) -> bool:
    """A text stands for itself, without quotes."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return all(_is_words(part) for part in parts if part is not type(None))
    return origin is Literal or kind in (str, Path)


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as its type; TypeError or ValueError where it is none. Unknown keys of an object: InputError."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = [part for part in parts if part is not type(None)]
        return _typed(name, value, inner)
    if origin is Literal:
        if value not in parts:
            raise ValueError(value)
        return value
    if dataclasses.is_dataclass(kind):
        return _object(name, value, kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(value)
        return tuple(_typed(f"{name}[{index}]", item, parts[0]) for index, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise TypeError(value)
        return {key: _typed(f"{name}.{key}", item, parts[1]) for key, item in value.items()}
    if kind is Path:
        return Path(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):  # 1e999
            raise ValueError(value)
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(value)
    return value


def _object(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(value)
    fields = _fields(kind)
    for key in value:
        if key not in fields:
            raise InputError(OPTION, f"{name}.{key}", "is unknown", near(key, fields))
    return kind(**{key: _typed(f"{name}.{key}", item, fields[key]) for key, item in value.items()})


def _fields(kind: Any) -> dict[str, Any]:
    """Those that can be written down: a Python function cannot."""
    hints = typing.get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if not any(get_origin(p) is Callable for p in get_args(hint))}
