"""What sources say of one engine's settings, side by side: who is believed, and who else says what.

The column `settings` of `instances` keeps, by name, the value believed with its source and time, and under `others` what further
sources say. A source that says a name again replaces what it said before.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from phasewise.collector.context import Setting
from phasewise.collector.redact import CREDENTIAL_WORDS
from phasewise.rules.engine_facts import FactRule, Facts
from phasewise.rules.engine_settings import PRECEDENCE

Value = str | int | float | bool
LONGEST_TEXT = 200
DEEPEST = 8  # no setting lies deeper in what engines answer
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_FACTOR = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_SECRET = re.compile(r"\b(hf_|sk-|ghp_|gho_|glpat-|AKIA|xox[bp]-|eyJ)[A-Za-z0-9_\-.]{8,}")


@dataclass(frozen=True, slots=True)
class Statement:
    """What one source says of one engine process.

    names: span or scrape names the source itself gives the process, none where it gives none; unix_ns: since when it holds, None
    where the source does not tell; ignored: how many arguments or keys it holds that are no setting known here.
    """

    source: str
    engine: str
    settings: Mapping[str, Value]
    unix_ns: int | None = None
    names: tuple[str, ...] = ()
    ignored: int = 0


def settings_from(facts: Facts, told: Mapping[str, object]) -> dict[str, Value]:
    """Settings out of an engine's own names (dotted where nested) and values; what is not told is absent."""
    found: dict[str, Value] = {}
    for rule in facts.rules:
        if rule.name in found:
            continue
        for key in rule.keys:
            if key in told and (value := _value(rule, told[key])) is not None:
                found[rule.name] = value
                break
    return found


def flat(value: object, prefix: str = "", depth: int = 0) -> dict[str, object]:
    """Leaves of nested objects and lists by dotted path (`data.0.id`); JSON text inside is opened."""
    if depth > DEEPEST:
        return {}
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {prefix: value}
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    found: dict[str, object] = {}
    for key, one in items:
        found |= flat(one, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    return found


def _value(rule: FactRule, raw: object) -> Value | None:
    """One value by its rule; None where it says nothing."""
    if raw is None or (isinstance(raw, str) and raw.strip() in ("None", "null", "")):
        return rule.unset or None
    if rule.words:
        return rule.words.get(str(raw).strip().lower())
    if rule.kind == "truth":
        told = raw if isinstance(raw, bool) else _TRUTH.get(str(raw).strip().lower())
        return None if told is None else told is not rule.inverse
    if rule.kind == "text":
        return clean_text(str(raw))
    number = _number(raw)
    if number is None:
        return None
    return round(number) if rule.kind == "integer" else number


def _number(raw: object) -> float | None:
    if isinstance(raw, bool):
        return None
    if isinstance(raw, int | float):
        return float(raw) if math.isfinite(raw) else None
    match = _SIZE.fullmatch(str(raw).strip().replace(",", ""))
    return float(match[1]) * _FACTOR[match[2]] if match else None


def clean_text(text: str) -> str | None:
    """The text without what may give access; None where it looks like a credential itself, or is no name any more."""
    if len(text) > LONGEST_TEXT or not text.isprintable():
        return None
    if "://" in text:
        try:
            parts = urlsplit(text)
        except ValueError:
            return None
        text = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    if _SECRET.search(text) or any(word in text.lower() for word in CREDENTIAL_WORDS):
        return None
    return text


# --- side by side ----------------------------------------------------------------------------------------------------


def noted(settings: Mapping[str, object], source: str, unix_ns: int | None = None) -> dict[str, Any]:
    """Settings of one source as the column keeps them."""
    when = {} if unix_ns is None else {"unix_ns": unix_ns}
    return {name: {"value": value, "source": source, **when} for name, value in settings.items()}


def merged(*columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as one: of one source the newest statement (the later column where no time is told), of several the one believed,
    the rest under `others`."""
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for column in columns:
        for name, entry in column.items():
            if not isinstance(entry, Mapping) or "source" not in entry:
                continue
            said = by_name.setdefault(name, {})
            for one in (entry, *entry.get("others", ())):
                source = str(one["source"])
                if source not in said or one.get("unix_ns", 0) >= said[source].get("unix_ns", 0):
                    said[source] = {key: value for key, value in one.items() if key != "others"}
    found = {}
    for name, said in by_name.items():
        first, *rest = sorted(said.values(), key=_belief)
        found[name] = {**first, "others": rest} if rest else first
    return found


def valid_facts(rows: Iterable[Mapping[str, Any]], last_unix_ns: int) -> list[Mapping[str, Any]]:
    """Rows of `instances` of kind `facts` that hold at the end of some time, in order of time: those that began by then. Where all
    of a name's began later the first holds: nothing tells that it was otherwise before."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda one: one["first_seen_unix_ns"]):
        by_name.setdefault(row["instance"], []).append(row)
    found: list[Mapping[str, Any]] = []
    for own in by_name.values():
        found += [row for row in own if row["first_seen_unix_ns"] <= last_unix_ns] or own[:1]
    return sorted(found, key=lambda one: one["first_seen_unix_ns"])


def _belief(entry: Mapping[str, Any]) -> tuple[int, str]:
    source = str(entry["source"])
    return (PRECEDENCE.index(source) if source in PRECEDENCE else len(PRECEDENCE), source)


def as_settings(column: Mapping[str, Any]) -> dict[str, Setting]:
    """The column as analysis reads it: the value believed, its source, and who says otherwise."""
    found = {}
    for name, entry in column.items():
        if isinstance(entry, Mapping):
            value, source = entry.get("value"), str(entry.get("source", ""))
            others = [(one.get("value"), str(one.get("source", ""))) for one in entry.get("others", ())]
            found[name] = Setting(value, source, tuple(other for other in others if other[0] != value))
    return found
