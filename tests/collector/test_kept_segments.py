"""How long segments of the journal stay beside the store, and what is made of them on the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from span_tables import span_table
from writing import SLICES, Bench, bench, engine_span, stand_still, traces

from phasewise.collector.sealing import Sealer, due_hours


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)


def test_segments_stay_until_their_hours_are_sealed_and_late_spans_still_find_their_trace(tmp_path: Path) -> None:
    def segments() -> list[str]:
        return sorted(p.name for p in (tmp_path / "journal").glob("*.seg"))

    with bench(tmp_path) as b:
        whole = span_table(SLICES, received_unix_ns=b.clock.now)
        b.journal.append("spans", whole.slice(0, 3))
        b.journal.sync()
        b.run(1.5)
        b.journal._begin_segment()  # as its age would
        b.receive(traces(1))
        b.run(400)
        b.run(61)
        assert segments() == ["00000001.seg", "00000002.seg"]  # archived, and the hot file could be made again from it
        b.clock.forward(3 * 3600)
        for due in due_hours(b.store, b.clock.now):
            assert Sealer(b.store, b.clock).seal(due)
        b.run(61)
        assert segments() == ["00000002.seg"]
        b.journal.append("spans", whole.slice(3))
        b.journal.sync()
        b.run(1)
        b.run(1.5)
        row = next(row for row in b.rows() if row["engine"] == "sglang")
        assert (row["queue_s"], row["decode_s"]) == (1.0, 1.0)


def test_rows_are_stored_between_the_parts_of_a_segment_that_is_archived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasewise.collector.writer.ARCHIVE_S", -1.0)  # a part is all that a pass has time for
    monkeypatch.setattr("phasewise.collector.archive._PIECE_BYTES", 1)

    def archived(b: Bench) -> int:
        journal = b.writer.health()["journal"]
        assert isinstance(journal, dict)
        return int(journal["archived_segment"])

    with bench(tmp_path) as b:
        for i in range(6):
            b.receive([engine_span(start_s=float(i), trace=f"{i + 1:032x}")])
        b.run(1.5)
        b.journal._begin_segment()
        seen = []
        b.clock.forward(6)
        for i in range(6, 12):
            b.receive([engine_span(start_s=float(i), trace=f"{i + 1:032x}")])
            b.writer.step()
            seen.append((archived(b), len(b.rows())))
        assert seen == [(0, i) for i in range(7, 13)]
        for _ in range(4):
            b.writer.step()
        assert archived(b) == 1


def test_kept_segments_make_room_for_what_is_received(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer._kept._kept_bytes = 0
        b.receive(traces(2))
        b.run(1.5)
        b.journal._begin_segment()
        b.receive([engine_span(trace="9" * 32, span_id="9" * 16)])
        b.run(70)
        assert sorted(p.name for p in (tmp_path / "journal").glob("*.seg")) == ["00000002.seg"]
        journal = b.writer.health()["journal"]
        assert isinstance(journal, dict)
        assert journal["segments_dropped_early"] == 1
