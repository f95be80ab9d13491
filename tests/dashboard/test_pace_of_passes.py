"""How long the store waits between two passes over the journal."""

from __future__ import annotations

from phasewise.dashboard.commands.store_process import IDLE_PAUSE_S, PASS_EVERY_S, pause_after


def test_passes_take_what_came_in_the_meantime_together() -> None:
    assert pause_after(5, behind=False, spent_s=0.1) == PASS_EVERY_S - 0.1
    assert pause_after(5, behind=False, spent_s=PASS_EVERY_S + 1) == 0.0


def test_what_waits_in_the_journal_waits_no_longer() -> None:
    assert pause_after(5, behind=True, spent_s=0.1) == 0.0
    assert pause_after(0, behind=True, spent_s=0.1) == 0.0


def test_nothing_to_do_is_looked_for_again_soon() -> None:
    assert pause_after(0, behind=False, spent_s=0.01) == IDLE_PAUSE_S
