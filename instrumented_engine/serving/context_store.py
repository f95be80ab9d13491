"""Conversations on disk: the context stage loads a turn's history from here, and the finished turn is added behind it.

A conversation belongs to its tenant: the same id of another tenant is another conversation. Loading can be slowed down on
purpose, so that a context-bound engine can be had.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from phasewise.rules.errors import MachineError

Message = dict[str, str]
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS turns (tenant TEXT NOT NULL, conversation TEXT NOT NULL, number INTEGER NOT NULL, "
    "messages TEXT NOT NULL, PRIMARY KEY (tenant, conversation, number)) WITHOUT ROWID"
)


class ContextStore:
    """delay_s: added to every load, by `sleep`. Usable from any thread; every call opens the file anew."""

    def __init__(self, folder: Path, *, delay_s: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> None:
        """Raises MachineError where the folder cannot be used."""
        self.delay_s = delay_s
        self._sleep = sleep
        self._path = folder / "conversations.sqlite"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(self._open()) as opened, opened:
                opened.execute("PRAGMA journal_mode=WAL")
                opened.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as problem:
            raise MachineError(f"{folder}: conversations cannot be kept there: {problem}") from problem

    def load(self, conversation: str, tenant: str | None = None) -> list[Message]:
        """All messages so far, oldest first; empty for a new conversation. Raises MachineError where the file is broken."""
        if self.delay_s:
            self._sleep(self.delay_s)
        rows = self._run(
            "SELECT messages FROM turns WHERE tenant = ? AND conversation = ? ORDER BY number", tenant, conversation
        )
        return [message for (text,) in rows for message in json.loads(text)]

    def append(self, conversation: str, messages: Sequence[Message], tenant: str | None = None) -> None:
        """One turn, whole or not at all. Raises MachineError."""
        self._run(
            "INSERT INTO turns SELECT ?1, ?2, coalesce(max(number), 0) + 1, ?3 FROM turns WHERE tenant = ?1 AND conversation = ?2",
            tenant,
            conversation,
            json.dumps(list(messages), ensure_ascii=False),
        )

    def _run(self, statement: str, tenant: str | None, *values: str) -> list[tuple[str]]:
        try:
            with closing(self._open()) as opened, opened:
                return opened.execute(statement, (tenant or "", *values)).fetchall()
        except sqlite3.Error as problem:
            raise MachineError(f"{self._path}: {problem}") from problem

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=5.0)
