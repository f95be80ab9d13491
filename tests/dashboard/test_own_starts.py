"""The server marks on the time axis that it began anew, and whether it had been stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from writing import bench, engine_span

from phasewise.collector.records import Annotation
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.dashboard.own_starts import ENDED, RUNS, STOPPED, OwnStart

HOUR_NS = 3600 * 10**9


def marks(store: Store) -> list[tuple[int, str, str]]:
    found = store.query("SELECT unix_ns, kind, text FROM annotations ORDER BY unix_ns")
    return [(unix_ns // HOUR_NS, kind, text) for unix_ns, kind, text in found.iter_rows()]


def test_the_first_start_has_no_mark_and_later_ones_say_how_the_one_before_ended(tmp_path: Path) -> None:
    def run(hour: int, spans: int = 1, stopped: bool = True) -> list[tuple[int, str, str]]:
        with bench(tmp_path) as at:
            start = OwnStart(at.store, tmp_path)
            start.mark(at.writer, hour * HOUR_NS)
            assert (tmp_path / RUNS).exists()
            if spans:
                at.receive([engine_span()])
                at.run(5.0)
            if stopped:
                start.unmark()
            return marks(at.store)

    assert run(1, spans=0) == []  # nothing was stored: the next is a first one as well
    assert run(2) == []
    assert run(3, stopped=False) == [(3, "restart", STOPPED)]
    assert run(4) == [(3, "restart", STOPPED), (4, "restart", ENDED)]
    assert run(5)[-1] == (5, "restart", STOPPED)


def test_a_disk_that_takes_no_mark_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Writer, marks: list[Annotation]) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / RUNS).touch()
    with bench(tmp_path) as at:
        start = OwnStart(at.store, tmp_path)
        monkeypatch.setattr(Writer, "annotate", refuses)
        start.mark(at.writer, HOUR_NS)
        assert marks(at.store) == []
        start.unmark()
    assert not (tmp_path / RUNS).exists()
