"""`phasewise rules`: what the verdicts rest on, as it stands in the rule files."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from phasewise.rules.errors import InputError
from phasewise.rules.load import Rulebook, load_rulebook
from phasewise.rules.vocabulary import CLASS_OF_CAUSE, SIGNALS


def run(options: Namespace) -> int:
    """Lists or shows rules."""
    rulebook = load_rulebook()
    kinds = kinds_of(rulebook)
    if options.action == "list":
        chosen = {options.kind: kinds[options.kind]} if options.kind else kinds
        _print_list(chosen, as_json=options.json)
        return 0
    kind, rule = find(kinds, options.identifier)
    if options.json:
        print(json.dumps({"kind": kind, "id": options.identifier, **plain(rule)}, indent=2, ensure_ascii=False))
    else:
        print(f"{options.identifier} ({kind}, rules {rulebook.version})")
        for line in _lines(plain(rule), 1):
            print(line)
    return 0


def kinds_of(rulebook: Rulebook) -> dict[str, Mapping[str, Any]]:
    """Every kind of rule, by the word the command line uses."""
    return {
        "techniques": rulebook.techniques,
        "gpus": rulebook.gpus,
        "models": rulebook.models,
        "engines": rulebook.engines,
        "signals": SIGNALS,
        "causes": {cause: {"title": category} for cause, category in CLASS_OF_CAUSE.items()},
    }


def find(kinds: Mapping[str, Mapping[str, Any]], identifier: str) -> tuple[str, Any]:
    """Kind and rule of an id; InputError with the nearest ids where there is none."""
    import difflib

    for kind, rules in kinds.items():
        if identifier in rules:
            return kind, rules[identifier]
    near = difflib.get_close_matches(identifier, [name for rules in kinds.values() for name in rules], 3)
    remedy = f"did you mean {', '.join(near)}?" if near else "phasewise rules list shows all"
    raise InputError("rules show", repr(identifier), "is no rule", remedy)


def title_of(rule: Any) -> str:
    """A line about a rule: its title, name or text."""
    told = plain(rule)
    return str(next((told[key] for key in ("title", "name", "text") if told.get(key)), ""))


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON would have them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(item) for item in value]
        return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _print_list(kinds: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        listed = {kind: {name: title_of(rule) for name, rule in rules.items()} for kind, rules in kinds.items()}
        print(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    width = max((len(name) for rules in kinds.values() for name in rules), default=0)
    for kind, rules in kinds.items():
        print(f"{kind} ({len(rules)})")
        for name, rule in rules.items():
            print(f"  {name:{width}}  {title_of(rule)}".rstrip())


def _lines(value: Any, depth: int) -> Iterator[str]:
    """Indented text of nested values; what is empty or unknown is left out."""
    margin = "  " * depth
    pairs = value.items() if isinstance(value, Mapping) else [("-", item) for item in value]
    for key, item in pairs:
        if item in (None, "", [], {}):
            continue
        if isinstance(item, (Mapping, list)):
            yield f"{margin}{key}"
            yield from _lines(item, depth + 1)
        else:
            yield f"{margin}{key}{'' if key == '-' else ':'} {item}"
