"""Statements out of what engines and their platform write: an answer of the server, its start-up log, a command line."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePosixPath

from phasewise.collector.facts import Statement, flat, settings_from
from phasewise.collector.profiles import Profiles
from phasewise.rules.engine_facts import Facts
from phasewise.rules.engine_profile import EngineProfile

SHELL_ENDS = frozenset({"&&", "||", ";", "|", "&"})
LONGEST_LINE = 1 << 20
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?)\d*(Z|[+-]\d\d:\d\d) ")  # kubectl logs --timestamps
_OPEN, _CLOSE = "([{", ")]}"


def knowing(profiles: Profiles) -> list[tuple[EngineProfile, Facts]]:
    """The profiles that say what their engine tells of itself."""
    return [(profile, profile.facts) for profile in profiles.ordered if profile.facts is not None]


# --- an answer of the server -----------------------------------------------------------------------------------------


def answer_told(documents: Iterable[object]) -> dict[str, object]:
    """Names and values of several answers of one server; the first that tells a name wins."""
    told: dict[str, object] = {}
    for document in documents:
        told = {**flat(document), **told}
    return told


def of_answer(profile: EngineProfile, facts: Facts, documents: Iterable[object], unix_ns: int | None) -> Statement:
    return Statement("server_info", profile.id, settings_from(facts, answer_told(documents)), unix_ns)


# --- a start-up log --------------------------------------------------------------------------------------------------


def of_log(profile: EngineProfile, facts: Facts, text: str) -> Statement | None:
    """What the start-up lines of a log tell; the last start in it counts. None where it has no line of this engine."""
    told: dict[str, object] = {}
    since: int | None = None
    for line in text.splitlines():
        if len(line) > LONGEST_LINE:
            continue
        for pattern in facts.lines:
            if match := pattern.search(_ANSI.sub("", line)):
                since = since if since is not None else _stamp(line)
                for name, value in match.groupdict().items():
                    told |= _group(name, value)
    return Statement("startup_log", profile.id, settings_from(facts, told), since) if told else None


def _group(name: str, text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    if name == "literal":
        try:
            return flat(ast.literal_eval(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return call_told(text.strip("{}"), ":")
    return call_told(text, "=") if name == "call" else {name: text}


def call_told(text: str, mark: str) -> dict[str, object]:
    """`a=1, b='x', c=Foo(d=2)` as names and values, as far as it goes; a value that is no literal stays text."""
    told: dict[str, object] = {}
    for part in _parts(text):
        name, found, raw = part.partition(mark)
        key = name.strip().strip("'\"")
        if found and key.replace(".", "").isidentifier():
            told |= flat(_literal(raw.strip()), key)
    return told


def _parts(text: str) -> list[str]:
    """Cut at commas (or blanks between them) that no bracket and no quote holds; ends where the brackets do."""
    parts: list[str] = []
    depth, quote, start = 0, "", 0
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[index - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth -= 1
            if depth < 0:
                return [*parts, text[start:index]]
        elif sign == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.removeprefix("torch.")


def _stamp(line: str) -> int | None:
    match = _STAMP.match(line)
    if match is None:
        return None
    moment = datetime.fromisoformat(match[1] + match[2].replace("Z", "+00:00"))
    return round(moment.timestamp() * 1e9)


# --- a command line --------------------------------------------------------------------------------------------------


def of_command(
    profiles: Profiles,
    words: Sequence[str],
    *,
    image: str = "",
    unix_ns: int | None = None,
    names: tuple[str, ...] = (),
) -> Statement | None:
    """What the arguments of a process tell; None where neither program nor image is one of a known engine."""
    for profile, facts in knowing(profiles):
        own = _own_arguments(facts, words)
        if own is None and any(part in image for part in facts.images):
            own = list(words)
        if own is None:
            continue
        told = arguments_told(facts, own)
        settings = settings_from(facts, told)
        if "engine_version" not in settings and (version := _tag_version(facts, image)):
            settings["engine_version"] = version
        used = {key for rule in facts.rules for key in rule.keys}
        ignored = sum(name not in used for name in told)
        return Statement("pod_arguments", profile.id, settings, unix_ns, (*names, *_ports(told, names)), ignored)
    return None


def command_words(text: str) -> list[str]:
    """A shell command as words; what cannot be read as one is split at blanks."""
    joined = text.replace("\\\r\n", " ").replace("\\\n", " ")
    try:
        lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        return list(lexer)
    except ValueError:
        return joined.split()


def _own_arguments(facts: Facts, words: Sequence[str]) -> list[str] | None:
    """The words after the engine's program, up to the end of its command; a word that holds a whole command is opened."""
    for index, word in enumerate(words):
        if _is_program(facts, word):
            rest = list(words[index + 1 :])
            ends = [place for place, one in enumerate(rest) if one in SHELL_ENDS]
            return rest[: ends[0]] if ends else rest
        inner = command_words(word) if any(sign.isspace() for sign in word.strip()) else []
        if inner and inner != list(words) and (found := _own_arguments(facts, inner)) is not None:
            return found
    return None


def _is_program(facts: Facts, word: str) -> bool:
    name = PurePosixPath(word).name
    return any(name == program or name.startswith(f"{program}.") for program in facts.programs)


def arguments_told(facts: Facts, words: Sequence[str]) -> dict[str, object]:
    """Names and values of arguments: `--name value`, `--name=value`, `--name`, `--no-name`; JSON values are opened."""
    told: dict[str, object] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-") or word == "-" or _is_number(word):
            if facts.positional and facts.positional not in told and word not in ("serve", "server", "launch_server"):
                told[facts.positional] = _argument(word)
            continue
        name, given, value = word.lstrip("-").partition("=")
        name = facts.aliases.get(name, name).replace("-", "_")
        raw: object = value
        if not given:
            if index < len(words) and (not words[index].startswith("-") or _is_number(words[index])):
                raw = words[index]
                index += 1
            elif name.startswith("no_"):
                name, raw = name.removeprefix("no_"), False
            else:
                raw = True
        told |= flat(_argument(raw), name)
    return {name: value for name, value in told.items() if value is not None}


def _argument(raw: object) -> object:
    """The value; None where the shell puts in something that is not known here."""
    return None if isinstance(raw, str) and ("$" in raw or "`" in raw) else raw


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _tag_version(facts: Facts, image: str) -> str | None:
    match = re.search(r":v?(\d+\.\d+(?:\.\w+)*)", image.partition("@")[0])
    return match[1] if match and any(part in image for part in facts.images) else None


def _ports(told: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """`IP:PORT` for names that are bare addresses: what a scrape of the pod is called."""
    port = told.get("port")
    return [f"{name}:{port}" for name in names if port is not None and re.fullmatch(r"[\d.]+", name)]


def document_of(text: str) -> object:
    """The JSON in a text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
