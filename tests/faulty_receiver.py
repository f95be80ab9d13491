"""The process `receive` with faults that the name of a span calls for, so that each answer can be asked for at will.

`python faulty_receiver.py SETTINGS`: a span named queue-full, journal-full, journal-failed, draining, bug or slow meets just that.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from phasewise.collector import intake as intake_module
from phasewise.collector import receiver, redact
from phasewise.collector.committer import Committer
from phasewise.collector.intake import Body, Intake, Reply
from phasewise.collector.journal import JournalFailed, JournalFull, JournalWriter

SLOW_S = 0.8
MUCH = 10**9  # rows, more than any queue may hold


def _names(rows: Any) -> set[str]:
    return set(rows["name"].to_pylist()) if "name" in rows.column_names else set()


def put_in_faults() -> None:
    """Below the answers, where the real faults come from."""
    submit, append, take, cleaned = Committer.submit, JournalWriter.append, Intake.take, redact.redact_spans

    def full_queue(self: Committer, kind: Any, rows: Any) -> Any:
        others = MUCH if "queue-full" in _names(rows) else 0
        self._rows += others
        try:
            return submit(self, kind, rows)
        finally:
            self._rows -= others

    def bad_disk(self: JournalWriter, kind: Any, rows: Any) -> Any:
        names = _names(rows)
        if "journal-full" in names:
            raise JournalFull("asked for")
        if "journal-failed" in names:
            raise JournalFailed("asked for")
        if "slow" in names:
            time.sleep(SLOW_S)
        return append(self, kind, rows)

    async def at_the_end(self: Intake, body: Body) -> Reply:
        self.draining = b"draining" in body.data
        try:
            return await take(self, body)
        finally:
            self.draining = False

    def bug(rows: Any, *arguments: Any) -> Any:
        if "bug" in _names(rows):
            raise ZeroDivisionError
        return cleaned(rows, *arguments)

    Committer.submit = full_queue  # type: ignore[method-assign]
    JournalWriter.append = bad_disk  # type: ignore[method-assign]
    Intake.take = at_the_end  # type: ignore[method-assign]
    vars(intake_module)["redact_spans"] = bug


if __name__ == "__main__":
    put_in_faults()
    code = receiver.main(sys.argv[1:])
    os._exit(code)
