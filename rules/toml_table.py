"""Reading a TOML table strictly: every key is asked for by type, every key nobody asked for is an error.

A wrong rule file stops the start with the file, the dotted key and, for a name, what was probably meant.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from difflib import get_close_matches
from pathlib import Path

from phasewise.rules.errors import RuleError


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?` for the closest of the known names, else a list of them when it is short, else nothing."""
    if close := get_close_matches(name, known, n=1, cutoff=0.6):
        return f"; did you mean {close[0]!r}?"
    if len(known) <= 12:
        return f"; known: {', '.join(sorted(known))}"
    return ""


class TomlTable:
    """One table of one file. Each getter marks its key as known; `finish` refuses the rest."""

    __slots__ = ("_asked", "_data", "path", "prefix")

    def __init__(self, path: Path | str, data: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self._data = data
        self._asked: set[str] = set()

    @classmethod
    def parse(cls, path: Path | str, text: str) -> TomlTable:
        """The root table of a file's text; a syntax error is a RuleError naming the line."""
        try:
            return cls(path, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise RuleError(path, "syntax", str(error)) from None

    def dotted(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key

    def error(self, key: str, message: str) -> RuleError:
        return RuleError(self.path, self.dotted(key), message)

    def has(self, key: str) -> bool:
        return key in self._data

    def keys(self) -> list[str]:
        return list(self._data)

    def raw(self, key: str) -> object:
        """The value as TOML gave it, None when absent."""
        self._asked.add(key)
        return self._data.get(key)

    def finish(self) -> None:
        """Raise for the first key that no getter asked for."""
        for key in self._data:
            if key not in self._asked:
                raise self.error(key, f"unknown key{did_you_mean(key, self._asked)}")

    # --- one value -------------------------------------------------------------------------------------------------

    def text(self, key: str) -> str:
        value = self.text_or_none(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def text_or_none(self, key: str) -> str | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"must be a text that is not empty, not {value!r}")
        return value.strip()

    def word(self, key: str, known: Collection[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self.error(key, f"unknown value {value!r}{did_you_mean(value, known)}")
        return value

    def word_or_none(self, key: str, known: Collection[str]) -> str | None:
        return self.word(key, known) if self.has(key) else self.text_or_none(key)

    def number(self, key: str) -> float:
        value = self.number_or_none(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def number_or_none(self, key: str) -> float | None:
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r}")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            raise self.error(key, f"must be above 0, not {value!r}")
        return value

    def positive_or_none(self, key: str) -> float | None:
        return self.positive(key) if self.number_or_none(key) is not None else None

    def count(self, key: str) -> int:
        value = self.count_or_none(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def count_or_none(self, key: str) -> int | None:
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"must be a whole number of at least 0, not {value!r}")
        return value

    def truth(self, key: str, default: bool = False) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def day(self, key: str) -> str:
        """An ISO date, written as a TOML date or as text."""
        value = self.raw(key)
        if isinstance(value, date):
            return value.isoformat()
        try:
            return date.fromisoformat(str(value)).isoformat()
        except ValueError:
            raise self.error(key, f"must be a date like 2026-08-22, not {value!r}") from None

    def scalar(self, key: str) -> float | str | bool:
        """A number, text or truth value, as conditions compare with."""
        value = self.raw(key)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool | str):
            return value
        if isinstance(value, int | float):
            return float(value)
        raise self.error(key, f"must be a number, text or truth value, not {value!r}")

    # --- collections -----------------------------------------------------------------------------------------------

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise self.error(key, f"must be a list of texts, not {value!r}")
        return tuple(item.strip() for item in value)

    def words(self, key: str, known: Collection[str]) -> tuple[str, ...]:
        found = self.texts(key)
        for item in found:
            if item not in known:
                raise self.error(key, f"unknown value {item!r}{did_you_mean(item, known)}")
        return found

    def table(self, key: str) -> TomlTable:
        found = self.table_or_none(key)
        if found is None:
            raise self.error(key, "is missing")
        return found

    def table_or_none(self, key: str) -> TomlTable | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table, not {value!r}")
        return TomlTable(self.path, value, self.dotted(key))

    def tables(self, key: str) -> Iterator[TomlTable]:
        """The tables of an array of tables; none when absent."""
        value = self.raw(key)
        if value is None:
            return
        if not isinstance(value, list):
            raise self.error(key, f"must be a list of tables, not {value!r}")
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.error(f"{key}[{index}]", f"must be a table, not {item!r}")
            yield TomlTable(self.path, item, self.dotted(f"{key}[{index}]"))

    def scalars(self) -> dict[str, float | str | bool]:
        """All keys of this table as scalars."""
        return {key: self.scalar(key) for key in self._data}
