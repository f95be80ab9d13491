"""What an engine tells of itself outside spans and metrics: where it is asked, and what its answers, arguments and logs mean.

The section `[facts]` of a profile. Whatever the source, its names are the engine's own (`tensor_parallel_size`); a setting names
those it is read from. Only settings named here are ever kept: a source holds API keys beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from phasewise.rules.engine_settings import FACTS
from phasewise.rules.toml_table import TomlTable, did_you_mean

KINDS = ("text", "integer", "number", "truth")
SOURCES = ("server_info", "startup_log", "pod_arguments")


@dataclass(frozen=True, slots=True)
class FactRule:
    """One setting: the engine's own names for it, the first that is told wins.

    inverse: the name says the opposite; unset: what a stated None means, else it tells nothing; words: the engine's word -> ours,

    others tell nothing.
    """

    name: str
    keys: tuple[str, ...]
    kind: str = "text"
    inverse: bool = False
    unset: str = ""
    words: Mapping[str, str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FactExample:
    """A text of one source, the settings it tells, and words that must not come through."""

    name: str
    kind: str
    text: str
    settings: Mapping[str, object]
    path: str = ""  # of the endpoint that answered it
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """endpoints: paths below the server's address; programs: words of a command line that is this engine's, and images: parts
    of the name of its container image; aliases: short argument -> its name; lines: expressions over a line of the start-up log whose
    groups are names of the engine, or `literal` (a Python dictionary) or `call` (`a=1, b='x'`)."""

    endpoints: tuple[str, ...]
    programs: tuple[str, ...]
    images: tuple[str, ...]
    positional: str
    aliases: Mapping[str, str]
    lines: tuple[re.Pattern[str], ...]
    rules: tuple[FactRule, ...]
    examples: tuple[FactExample, ...]


def read_facts(table: TomlTable | None) -> Facts | None:
    """The section `[facts]`; RuleError naming the key that is wrong."""
    if table is None:
        return None
    aliases = table.table_or_none("aliases")
    found = Facts(
        endpoints=table.texts("endpoints"),
        programs=table.texts("programs"),
        images=table.texts("images"),
        positional=table.text_or_none("positional") or "",
        aliases=MappingProxyType({name: aliases.text(name) for name in list(aliases.keys())} if aliases else {}),
        lines=tuple(_pattern(table, text) for text in table.texts("lines")),
        rules=tuple(_rule(part) for part in table.tables("setting")),
        examples=tuple(_example(part) for part in table.tables("example")),
    )
    table.finish()
    for path in found.endpoints:
        if not path.startswith("/"):
            raise table.error("endpoints", f"must be paths that begin with /, not {path!r}")
    if not found.rules:
        raise table.error("setting", "is missing: nothing would be read")
    if not found.examples:
        raise table.error("example", "is missing: the section carries at least one")
    return found


def _pattern(table: TomlTable, text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise table.error("lines", f"{text!r} is no regular expression: {error}") from None
    if not pattern.groupindex:
        raise table.error("lines", f"{text!r} has no named group: it would tell nothing")
    return pattern


def _rule(table: TomlTable) -> FactRule:
    name = table.text("name")
    if name not in FACTS:
        raise table.error("name", f"unknown setting {name!r}{did_you_mean(name, FACTS)}")
    keys = table.texts("from")
    if not keys:
        raise table.error("from", "is missing")
    words = table.table_or_none("words")
    found = FactRule(
        name=name,
        keys=keys,
        kind=table.word("type", KINDS) if table.has("type") else "text",
        inverse=table.truth("inverse"),
        unset=table.text_or_none("unset") or "",
        words=MappingProxyType({word: _word(words, word) for word in list(words.keys())} if words else {}),
    )
    table.finish()
    if found.inverse and found.kind != "truth":
        raise table.error("inverse", 'needs type = "truth"')
    return found


def _word(table: TomlTable, word: str) -> str | bool:
    value = table.scalar(word)
    return value if isinstance(value, bool) else str(value)


def _example(table: TomlTable) -> FactExample:
    settings = table.table("settings")
    found = FactExample(
        name=table.text("name"),
        kind=table.word("kind", SOURCES),
        text=table.text("text"),
        settings=MappingProxyType(settings.scalars()),
        path=table.text_or_none("path") or "",
        secret=table.text_or_none("secret") or "",
    )
    table.finish()
    return found
