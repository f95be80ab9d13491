"""The journal: what was synced comes back, whatever happens to the bytes in between."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_files import metric_rows, names_in, span_rows, write

from phasewise.collector.journal import (
    JournalFull,
    JournalReader,
    JournalWriter,
    Position,
)
from phasewise.collector.records import SPAN_SCHEMA
from phasewise.collector.segment import HEADER_BYTES, header, segment_numbers, segment_path
from phasewise.rules.errors import InputError, MachineError


def test_rows_of_both_kinds_come_back_in_order(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal") as writer:
        first = writer.append("spans", span_rows("a", "b"))
        second = writer.append("metrics", metric_rows(3))
        writer.sync()
        entries = JournalReader(tmp_path / "journal").read(None)
    assert [(entry.kind, entry.position) for entry in entries] == [("spans", first), ("metrics", second)]
    assert first < second
    assert entries[0].rows.equals(span_rows("a", "b"))
    assert entries[1].rows.equals(metric_rows(3))


def test_reading_goes_on_behind_a_position(tmp_path: Path) -> None:
    positions = write(tmp_path, "a", "b", "c")
    reader = JournalReader(tmp_path)
    assert [names_in(tmp_path, after) for after in (None, *positions)] == [["a", "b", "c"], ["b", "c"], ["c"], []]
    assert [entry.rows.num_rows for entry in reader.read(None, limit=2)] == [1, 1]
    assert len(reader.read(None, limit_rows=1)) == 1
    assert reader.lag_bytes(positions[-1]) == 0
    assert reader.lag_bytes(positions[0]) == positions[-1].offset - positions[0].offset


def test_a_position_can_be_written_down(tmp_path: Path) -> None:
    assert Position.parse(str(Position(3, 4711))) == Position(3, 4711)
    for text in ("", "3", "3:", "a:b", "-1:2"):
        with pytest.raises(InputError):
            Position.parse(text)
    assert names_in(tmp_path / "nothing here") == []


def test_what_is_appended_is_readable_while_the_writer_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys, pyarrow as pa; from pathlib import Path\n"
        "from phasewise.collector.journal import JournalWriter\n"
        "from phasewise.collector.records import METRIC_SCHEMA\n"
        "with JournalWriter(Path(sys.argv[1]), segment_bytes=20_000) as writer:\n"
        "    for i in range(200):\n"
        "        row = {'name': str(i), 'kind': 'gauge', 'unix_ns': i}\n"
        "        writer.append('metrics', pa.Table.from_pylist([row], METRIC_SCHEMA)); writer.sync()\n"
    )
    writing = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    reader = JournalReader(tmp_path)
    seen: list[int] = []
    after: Position | None = None
    ended = False
    while not ended or len(seen) < 200:
        ended = writing.poll() is not None
        entries = reader.read(after, limit=7)
        seen += [value for entry in entries for value in entry.rows["unix_ns"].to_pylist()]
        after = entries[-1].position if entries else after
        if ended and not entries:
            break
    assert writing.wait() == 0
    assert seen == list(range(200))
    assert not any(reader.counters.values())


def test_segments_are_cut_by_size_and_by_age(tmp_path: Path) -> None:
    now = 0.0
    with JournalWriter(tmp_path, segment_bytes=10_000, segment_age_s=60, monotonic=lambda: now) as writer:
        positions = [writer.append("spans", span_rows(str(i))) for i in range(10)]
        sizes = [segment_path(tmp_path, n).stat().st_size for n in segment_numbers(tmp_path)]
        assert len(sizes) > 1
        assert max(sizes) <= 10_000
        now = 61.0
        aged = writer.append("spans", span_rows("late"))
        assert aged.segment == positions[-1].segment + 1
        now = 500.0
    assert names_in(tmp_path) == [*map(str, range(10)), "late"]


def test_an_empty_segment_is_never_replaced(tmp_path: Path) -> None:
    now = 0.0
    with JournalWriter(tmp_path, monotonic=lambda: now) as writer:
        now = 1000.0
        assert writer.append("spans", span_rows("a")).segment == 1


def test_each_writer_begins_a_segment_of_its_own(tmp_path: Path) -> None:
    (first,) = write(tmp_path, "a")
    (second,) = write(tmp_path, "b")
    assert (first.segment, second.segment) == (1, 2)
    assert names_in(tmp_path, first) == ["b"]


def test_a_position_committed_by_the_reader_stays_before_all_later_rows(tmp_path: Path) -> None:
    """Power loss: the reader has seen rows that the disk then lost."""
    positions = write(tmp_path, "kept", "seen, then lost")
    os.truncate(segment_path(tmp_path, 1), positions[0].offset)
    write(tmp_path, "new")
    assert names_in(tmp_path, after=positions[1]) == ["new"]


def test_a_torn_tail_is_cut_at_the_next_start_and_costs_nothing_else(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    positions = write(whole, "a", "b")
    data = segment_path(whole, 1).read_bytes()
    for cut in range(positions[0].offset, positions[1].offset, 37):
        torn = tmp_path / f"torn-{cut}"
        torn.mkdir()
        segment_path(torn, 1).write_bytes(data[:cut])
        assert names_in(torn) == ["a"]
        with JournalWriter(torn) as writer:
            assert writer.torn_bytes == cut - positions[0].offset
            writer.append("spans", span_rows("c"))
        assert segment_path(torn, 1).stat().st_size == positions[0].offset
        assert names_in(torn) == ["a", "c"]
        shutil.rmtree(torn)


def test_zeros_behind_the_last_entry_are_a_torn_tail_too(tmp_path: Path) -> None:
    positions = write(tmp_path, "a")
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(bytes(5000))
    assert names_in(tmp_path) == ["a"]
    with JournalWriter(tmp_path) as writer:
        assert writer.torn_bytes == 5000
    assert segment_path(tmp_path, 1).stat().st_size == positions[0].offset


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 0.999), bit=st.integers(0, 7), victim=st.integers(0, 2))
def test_a_damaged_entry_costs_itself_and_is_counted(
    tmp_path_factory: pytest.TempPathFactory, where: float, bit: int, victim: int
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    positions = write(directory, "0", "1", "2")
    write(directory, "3")
    begin = positions[victim - 1].offset if victim else 0
    at = begin + int((positions[victim].offset - begin) * where)
    data = bytearray(segment_path(directory, 1).read_bytes())
    data[at] ^= 1 << bit
    segment_path(directory, 1).write_bytes(data)
    reader = JournalReader(directory)
    for _ in range(2):
        names = [name for entry in reader.read(None) for name in entry.rows["name"].to_pylist()]
        padding = begin + HEADER_BYTES - 4 <= at < begin + HEADER_BYTES
        assert names == [str(i) for i in range(4) if i != victim or padding]
    lost = reader.counters["corrupt_bytes"] + reader.counters["torn_bytes"]
    assert lost == (0 if padding else positions[victim].offset - begin)
    shutil.rmtree(directory)


def test_foreign_bytes_between_entries_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "a")
    path = segment_path(tmp_path, 1)
    entry = path.read_bytes()
    path.write_bytes(os.urandom(3000) + entry + entry[:50] + os.urandom(100) + entry)
    reader = JournalReader(tmp_path)
    assert len(reader.read(None)) == 2
    assert reader.counters["corrupt_gaps"] == 2
    assert reader.counters["corrupt_bytes"] == 3150


def test_an_unfinished_entry_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path, "a")
    path = segment_path(tmp_path, 1)
    entry = path.read_bytes()
    path.write_bytes(entry + entry[:100])
    reader = JournalReader(tmp_path)
    (first,) = reader.read(None)
    assert reader.read(first.position) == []
    path.write_bytes(entry + entry)
    assert len(reader.read(first.position)) == 1
    assert not any(reader.counters.values())


def test_entries_of_other_releases(tmp_path: Path) -> None:
    """Unknown kinds are counted; missing columns are unknown, additional ones dropped."""
    older = pa.table({"name": ["old"], "no_longer_kept": [1]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, older.schema) as stream:
        stream.write_table(older)
    payload = sink.getvalue().to_pybytes()
    segment_path(tmp_path, 1).write_bytes(
        b"".join(header(kind, 1, data) + data for kind, data in ((99, b"future"), (1, payload), (1, b"no arrow")))
    )
    reader = JournalReader(tmp_path)
    (entry,) = reader.read(None)
    assert entry.rows.schema.equals(SPAN_SCHEMA)
    assert entry.rows.select(["name", "trace_id"]).to_pylist() == [{"name": "old", "trace_id": None}]
    assert (reader.counters["unknown_entries"], reader.counters["unreadable_entries"]) == (1, 1)


def test_only_segments_wholly_before_a_position_are_dropped(tmp_path: Path) -> None:
    positions = [write(tmp_path, name)[0] for name in "abc"]
    reader = JournalReader(tmp_path)
    assert reader.drop_before(positions[1]) == 1
    assert segment_numbers(tmp_path) == [2, 3]
    assert names_in(tmp_path, positions[1]) == ["c"]
    assert reader.drop_before(Position(99, 0)) == 1
    assert segment_numbers(tmp_path) == [3]  # the next writer takes its number from it
    assert write(tmp_path, "d")[0].segment == 4


def test_a_journal_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    write(tmp_path, "a")
    reader = JournalReader(tmp_path)
    assert len(reader.read(Position(7, 100))) == 1
    assert reader.counters["resets"] == 1


def test_a_full_journal_refuses_until_segments_are_dropped(tmp_path: Path) -> None:
    now = 0.0
    with JournalWriter(tmp_path, limit_bytes=30_000, segment_bytes=10_000, monotonic=lambda: now) as writer:
        position = Position(0, 0)
        with pytest.raises(JournalFull, match="is it running"):
            for i in range(100):
                position = writer.append("spans", span_rows(str(i)))
        assert not writer.has_room(5000)
        assert writer.facts()["bytes"] <= 30_000
        JournalReader(tmp_path).drop_before(position)
        assert writer.has_room(5000)
        writer.append("spans", span_rows("more"))


def test_a_nearly_full_volume_refuses(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, free_bytes=1 << 62) as writer, pytest.raises(JournalFull, match="left on the volume"):
        writer.append("spans", span_rows("a"))


def test_the_default_limit_is_a_tenth_of_the_volume_or_8_gib(tmp_path: Path) -> None:
    volume = os.statvfs(tmp_path)
    with JournalWriter(tmp_path) as writer:
        assert writer.limit_bytes == min(8 << 30, int(volume.f_blocks * volume.f_frsize * 0.1))


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with (
        JournalWriter(tmp_path),
        pytest.raises(MachineError, match=rf"another process writes this journal \(pid {os.getpid()}\)"),
    ):
        JournalWriter(tmp_path)
    write(tmp_path, "after it was closed")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MachineError, match=r"file/journal: cannot open the journal"):
        JournalWriter(blocked / "journal")


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    write(tmp_path / "journal", "a")
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    assert stat.S_IMODE(segment_path(tmp_path / "journal", 1).stat().st_mode) == 0o600


def test_facts_are_json(tmp_path: Path) -> None:
    with JournalWriter(tmp_path) as writer:
        writer.append("spans", span_rows("a"))
        assert json.loads(json.dumps(writer.facts()))["segment"] == 1
