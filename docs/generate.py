"""Writes docs/rules.md and docs/signals.md from the rule files. Run by `make docs`; a test compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phasewise.dashboard.commands.rules import kinds_of, plain, title_of
from phasewise.dashboard.wording import cause_text, class_title
from phasewise.rules.load import PACKAGED, Rulebook, load_rulebook
from phasewise.rules.vocabulary import CLASS_OF_CAUSE, SIGNALS

KINDS = {"techniques": "Techniques", "gpus": "Accelerators", "models": "Models", "engines": "Engine profiles"}
NOTICE = "<!-- Written by docs/generate.py (make docs). Change the rule files instead. -->\n"


def signals() -> str:
    """One heading a signal: its unit, and what is measured over which rows."""
    lines = [
        NOTICE,
        "# Signals",
        "",
        "What a rule file may ask for: numbers, words and truth values about the window under question.",
    ]
    lines += ["Unknown is not zero: a condition on an unknown signal neither holds nor fails.", ""]
    for name, signal in SIGNALS.items():
        lines += [f"## {name}", "", f"{signal.text[0].upper()}{signal.text[1:]} ({signal.unit}).", ""]
    return "\n".join(lines)


def rules(rulebook: Rulebook) -> str:
    """One heading a rule, with its sources; causes first, because everything else speaks of them."""
    lines = [NOTICE, "# Rules", "", "`phasewise rules show ID` prints a rule in full.", "", "## Causes", ""]
    for cause, category in CLASS_OF_CAUSE.items():
        lines += [f"### {cause}", "", f"{cause_text(cause).title} (class {class_title(category)}).", ""]
    for kind, heading in KINDS.items():
        lines += [f"## {heading}", ""]
        for name, rule in kinds_of(rulebook)[kind].items():
            lines += [f"### {name}", "", *_described(kind, name, plain(rule)), ""]
    return "\n".join(lines)


def _described(kind: str, name: str, told: dict[str, Any]) -> Iterator[str]:
    title = title_of(told)
    if title and title != name:
        yield f"{title}."
    if kind == "techniques":
        yield ""
        yield f"Acts on {', '.join(f'`{cause}`' for cause in told.get('acts_on') or ())}; output effect: {told.get('output_effect')}."
    sources = _sources(told)
    if sources:
        yield ""
        yield from (f"- {source}" for source in sources)


def _sources(value: object) -> list[str]:
    """Every source named anywhere in a rule, once, in the order of the file."""
    found: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _cited(item) if key in ("source", "sources") else _sources(item)
    elif isinstance(value, list):
        found = [source for item in value for source in _sources(item)]
    return list(dict.fromkeys(found))


def _cited(value: object) -> list[str]:
    """A source is a text, or a text with date and address; several stand in a list or under names."""
    if isinstance(value, str):
        return [" ".join(value.split())]
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        parts = [" ".join(value["text"].split()), *(str(value[key]) for key in ("date", "url") if value.get(key))]
        return [", ".join(parts)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [source for item in items for source in _cited(item)]


def pages() -> dict[str, str]:
    """File name to content."""
    return {"signals.md": signals().rstrip() + "\n", "rules.md": rules(load_rulebook(PACKAGED)).rstrip() + "\n"}


def main() -> int:
    folder = Path(__file__).parent
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
