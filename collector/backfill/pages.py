"""A window in pages: as wide as a server likes to answer, halved when it says that it is too much, widened when there is little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from phasewise.rules.errors import InputError

FIRST_MS = 5 * 60 * 1000
MOST_MS = 60 * 60 * 1000
MOST_EMPTY_MS = 6 * MOST_MS  # where nothing was found
SMALL_BYTES = 4 << 20  # of a page: below, the next one is wider


class TooMuch(Exception):
    """A server cannot or will not answer for so much at once: ask for less."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a source holds from one millisecond up to, not including, another. body: None where that is nothing."""

    from_ms: int
    to_ms: int
    body: bytes | None
    problems: list[str] = field(default_factory=list)


class Source(Protocol):
    """One system to read from. least_ms: the narrowest window worth asking for; remedy: where even that is too much."""

    @property
    def url(self) -> str: ...

    @property
    def least_ms(self) -> int: ...

    @property
    def remedy(self) -> str: ...

    def page(self, from_ms: int, to_ms: int) -> Page:
        """Raises TooMuch where a narrower window should be asked for."""
        ...


def pages(source: Source, from_ms: int, to_ms: int) -> Iterator[Page]:
    """The window from its beginning, without gaps. Raises InputError where the narrowest page is still too much."""
    at_ms, width_ms = from_ms, FIRST_MS
    while at_ms < to_ms:
        end_ms = min(at_ms + width_ms, to_ms)
        try:
            page = source.page(at_ms, end_ms)
        except TooMuch as told:
            if end_ms - at_ms <= source.least_ms:
                raise InputError(source.url, "", str(told), source.remedy) from None
            width_ms = max((end_ms - at_ms) // 2, source.least_ms)
            continue
        yield page
        at_ms = end_ms
        if page.body is None:
            width_ms = min(2 * width_ms, MOST_EMPTY_MS)
        elif len(page.body) < SMALL_BYTES:
            width_ms = max(width_ms, min(2 * width_ms, MOST_MS))
        else:
            width_ms = max(width_ms // 2, source.least_ms)
