"""Cards on a terminal: as wide as it is, without colour where NO_COLOR or a pipe says so, cut nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from phasewise.dashboard.cards import Card, Change, Row, markdown
from phasewise.dashboard.format import NARROW

REFUSED_SHOWN = 4  # the most tempting come first; the rest would push the change itself off the screen
_TONES = {"slow": "bold red", "healthy": "bold green", "unknown": "bold yellow"}
_LEVELS = {"high": "green", "medium": "yellow", "low": "red", "insufficient": "red"}
_SAYS = {"for": "green", "context": "dim"}


def console() -> Console:
    """Standard output; rich itself honours NO_COLOR, FORCE_COLOR, COLUMNS and whether it is a terminal."""
    return Console(highlight=False, emoji=False, markup=False)


def show(card: Card, *, compact: bool = False, as_markdown: bool = False, to: Console | None = None) -> None:
    """Prints a card."""
    if as_markdown:
        print(markdown(card))
        return
    screen = to or console()
    if not compact:
        screen.print(Rule(style="dim", characters="─"))
    screen.print(_head(card))
    screen.print(_grid(_compact(card) if compact else _full(card)))


def show_lines(lines: Iterable[str]) -> None:
    """Plain text, one print a line."""
    for line in lines:
        print(line)


def _head(card: Card) -> Text:
    title = Text(f"{card.category}: {card.title}", style=_TONES.get(card.tone, "bold"))
    title.append(f"  confidence {card.confidence}", style=_LEVELS.get(card.confidence, ""))
    return title


def _grid(rows: Iterable[tuple[str, Text | Table]]) -> Table:
    """A column of labels, a column of text that wraps."""
    grid = Table.grid(padding=(0, 1, 0, 0), expand=False)
    grid.add_column(style="bold", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid


def _text(words: str, style: str = "") -> Text:
    # The narrow space between number and unit is one column wide everywhere, but not in every terminal's font.
    return Text(words.replace(NARROW, " "), style=style)


def _labelled(label: str, texts: Iterable[str]) -> Iterator[tuple[str, Text | Table]]:
    for number, words in enumerate(texts):
        yield (label if number == 0 else ""), _text(words)


def _full(card: Card) -> Iterator[tuple[str, Text | Table]]:
    if card.badge:
        label, text = _badge(card.badge)
        yield label, _text(text, "cyan")
    yield "status", _text(f"{card.sentence or card.tone}\n{card.standing}")
    if card.affected:
        yield "affected", _text(card.affected)
    if card.shares:
        yield "time", _text(f"of {card.shares_of}: " + " · ".join(f"{name} {share}" for name, share in card.shares))
    if card.evidence:
        yield "evidence", _evidence(card.evidence)
    for number, change in enumerate(card.changes):
        yield ("try" if number == 0 else ""), _changed(change)
    yield from _labelled("not", card.refused[:REFUSED_SHOWN])
    if len(card.refused) > REFUSED_SHOWN:
        yield "", _text(f"and {len(card.refused) - REFUSED_SHOWN} more that will not help (--json, --markdown)", "dim")
    yield from _labelled("prove", card.verify)
    yield from _labelled("missing", card.missing)
    yield "", _text(card.provenance, "dim")


def _badge(badge: str) -> tuple[str, str]:
    """Label and rest: the first word, where it says what kind of rows these are."""
    kind, _, rest = badge.partition(" ")
    return (kind.rstrip(","), rest) if kind in ("recorded", "live,", "simulated") else ("about", badge)


def _compact(card: Card) -> Iterator[tuple[str, Text | Table]]:
    """Title line and four more: what, two numbers, the first change, the check."""
    yield "affected", _text("; ".join(filter(None, (card.badge, card.affected))))
    numbers = [
        f"{row.name} {row.observed} ({row.expected})" if row.expected else f"{row.name} {row.observed}"
        for row in card.strongest
    ]
    yield "evidence", _text("  ".join(numbers) or "none that speaks for a cause")
    if card.changes:
        first = card.changes[0]
        flags = f"  {first.flags[0]}" if first.flags else ""
        yield "try", _text(f"{first.title}{flags}  {first.gain}  risk {first.risk}")
    elif card.missing:
        yield "missing", _text(card.missing[0])
    if card.verify:
        yield "prove", _text(card.verify[0])


def _evidence(rows: Iterable[Row]) -> Table:
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", overflow="fold", ratio=5)
    table.add_column("observed", justify="right", overflow="fold")
    table.add_column("expected", overflow="fold", ratio=3)
    table.add_column("says", overflow="fold")
    for row in rows:
        table.add_row(
            _text(row.name), _text(row.observed), _text(row.expected), _text(row.says, _SAYS.get(row.says, "yellow"))
        )
    return table


def _changed(change: Change) -> Table:
    """The letter in front, everything else in one column beside it, so that a wrapped line keeps its place."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(_text(change.letter, "bold"), _text(change.title, "bold"))
    table.add_row("", _text(f"{change.gain}; risk {change.risk}"))
    for words in (*change.flags, *change.notes):
        table.add_row("", _text(words, "dim"))
    return table
