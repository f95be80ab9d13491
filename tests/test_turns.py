"""A test that is marked `alone` runs while no other does, and is not overtaken."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import turns
from waiting import until

WORKER: Any = SimpleNamespace(workerinput={})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FOLDER", tmp_path / "turns")


class Turn:
    """A test of another worker, until `end` is set."""

    def __init__(self, alone: bool) -> None:
        self.began, self.end = Event(), Event()
        self.thread = Thread(target=self._run, args=(alone,))
        self.thread.start()

    def _run(self, alone: bool) -> None:
        with turns.taken(WORKER, alone):
            self.began.set()
            assert self.end.wait(60)

    def stop(self) -> None:
        self.end.set()
        self.thread.join()


def test_ordinary_tests_run_at_once_and_one_alone_waits_for_them() -> None:
    first, second = Turn(alone=False), Turn(alone=False)
    until(lambda: first.began.is_set() and second.began.is_set())
    alone = Turn(alone=True)
    first.stop()
    assert not alone.began.wait(0.2)
    second.stop()
    until(alone.began.is_set)
    alone.stop()


def test_nobody_overtakes_one_that_waits_to_be_alone() -> None:
    first = Turn(alone=False)
    until(first.began.is_set)
    alone = Turn(alone=True)
    assert not alone.began.wait(0.2)
    late = Turn(alone=False)
    assert not late.began.wait(0.2)
    first.stop()
    until(alone.began.is_set)
    assert not late.began.wait(0.2)
    alone.stop()
    until(late.began.is_set)
    late.stop()


def test_without_workers_nothing_is_waited_for(tmp_path: Path) -> None:
    with turns.taken(SimpleNamespace(), alone=True), turns.taken(SimpleNamespace(), alone=True):  # type: ignore[arg-type]  # no worker's settings
        assert not (tmp_path / "turns").exists()
