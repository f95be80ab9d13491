"""How far each imported file is read: committed with its rows, so that an import that was interrupted goes on from there."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction

DONE = "done"
_PREFIX = "import:"


@dataclass(frozen=True, slots=True)
class Mark:
    """identity: of the file, by its content; position: a place in it, or DONE."""

    identity: str
    position: str


def position_of(store: Store, identity: str) -> str:
    """The position of the last mark; "" where there is none."""
    found = store.query("SELECT position FROM positions WHERE name = ?", [_PREFIX + identity])
    return str(found["position"].item()) if found.height else ""


def write_mark(transaction: Transaction, mark: Mark) -> None:
    transaction.execute("DELETE FROM positions WHERE name = ?", [_PREFIX + mark.identity])
    transaction.execute("INSERT INTO positions VALUES (?, ?)", [_PREFIX + mark.identity, mark.position])


def forget_marks(transaction: Transaction) -> None:
    """No file counts as stored any more."""
    transaction.execute("DELETE FROM positions WHERE starts_with(name, ?)", [_PREFIX])
