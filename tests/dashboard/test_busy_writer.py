"""What health tells of a writer that is busy, and for how long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from phasewise.dashboard.answers import Answers


class Writer:
    """Tells how often it was looked at; while it is busy nobody gets an answer."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.looked = 0

    def health(self) -> dict[str, object]:
        assert self.free.wait(60)
        self.looked += 1
        return {"looked": self.looked}


def test_an_answer_that_came_late_is_not_told_as_news() -> None:
    writer: Any = Writer()
    clock = [10**18]
    nothing: Any = None
    answers = Answers(nothing, writer, nothing, Path(), lambda: clock[0])
    assert answers.writer_health() == {}  # it is busy, and nothing is known of it yet
    asked = answers._health_asked
    assert asked is not None
    writer.free.set()
    assert asked.result(60)[1] == {"looked": 1}
    clock[0] += 15 * 10**9  # and now somebody looks again
    assert answers.writer_health() == {"looked": 2}
    assert answers.writer_health() == {"looked": 2}  # a second has not gone by
    writer.free.clear()
    clock[0] += 2 * 10**9
    assert answers.writer_health() == {"looked": 2}  # busy again: the last known stand
    writer.free.set()
