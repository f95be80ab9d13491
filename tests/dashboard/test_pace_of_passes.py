"""How long the store waits between two passes over the journal."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from phasewise.dashboard.commands.store_process import IDLE_PAUSE_S, PASS_EVERY_S, keep_writing, pause_after


def test_passes_take_what_came_in_the_meantime_together() -> None:
    assert pause_after(5, behind=False, spent_s=0.1) == PASS_EVERY_S - 0.1
    assert pause_after(5, behind=False, spent_s=PASS_EVERY_S + 1) == 0.0


def test_what_waits_in_the_journal_waits_no_longer() -> None:
    assert pause_after(5, behind=True, spent_s=0.1) == 0.0
    assert pause_after(0, behind=True, spent_s=0.1) == 0.0


def test_nothing_to_do_is_looked_for_again_soon() -> None:
    assert pause_after(0, behind=False, spent_s=0.01) == IDLE_PAUSE_S


@dataclass
class OnePass:
    """A writer that is told to stop once it has done one pass and what follows."""

    stop: threading.Event = field(default_factory=threading.Event)
    done: list[str] = field(default_factory=list)
    behind: bool = False

    def step(self) -> int:
        self.done.append("pass")
        return 0

    def shorten_log(self) -> bool:
        self.done.append("log")
        self.stop.set()
        return True


def test_the_log_is_shortened_after_a_pass_has_brought_its_rows() -> None:
    writer: Any = OnePass()
    keep_writing(writer, writer.stop)
    assert writer.done == ["pass", "log", "pass"]
