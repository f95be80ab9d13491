"""Traces that go on after they have settled, and a crash before they settle again."""

from __future__ import annotations

from pathlib import Path

from writing import bench, engine_span


def test_a_late_span_that_was_read_but_not_settled_survives_a_restart(tmp_path: Path) -> None:
    root = "00f067aa0ba902b7"
    with bench(tmp_path) as b:
        b.receive([engine_span(span_id="b7ad6b7169203331", parent=root)])
        b.run(1.5)
        assert b.rows("SELECT * FROM turns") == []
        b.clock.forward(0.1)
        b.receive([{"name": "agent", "span_id": root, "start_s": 0.0, "end_s": 3.0}])
        b.run()  # read and committed, not yet a second old
        assert b.rows("SELECT * FROM turns") == []
        b.reopen()
        b.run(1.5)
        (turn,) = b.rows("SELECT * FROM turns")
        assert (turn["name"], turn["e2e_s"]) == ("agent", 3.0)
        assert b.counter("spans") == 2
