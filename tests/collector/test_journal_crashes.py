"""The journal on a disk that fails, and in a process that is ended: nothing that was acknowledged is lost, and no failure is taken back."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journal_files import metric_rows, names_in, span_rows

from phasewise.collector.journal import JournalFailed, JournalFull, JournalReader, JournalWriter


def failing(call: Callable[..., Any], number: int, times: int) -> Callable[..., Any]:
    left = [times]

    def wrapped(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return wrapped


def test_a_failed_sync_is_never_taken_back_by_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournalWriter(tmp_path) as writer:
        doubtful = writer.append("spans", span_rows("doubtful"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing(os.fdatasync, errno.EIO, 1))
            with pytest.raises(JournalFailed):
                writer.sync()
        kept = writer.append("spans", span_rows("kept"))
        writer.sync()
        assert kept.segment == doubtful.segment + 1
        assert writer.facts()["failed_syncs"] == 1
    assert names_in(tmp_path)[-1] == "kept"


def test_no_space_cuts_the_partial_entry_and_asks_to_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def half_then_full(descriptor: int, parts: list[memoryview]) -> int:
        if len(parts) == 2:
            return real(descriptor, [parts[0], parts[1][: 500 - len(parts[0])]])
        raise OSError(errno.ENOSPC, "no space")

    with JournalWriter(tmp_path) as writer:
        writer.append("spans", span_rows("a"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", half_then_full)
            with pytest.raises(JournalFull, match="no space left"):
                writer.append("spans", span_rows("b"))
        writer.append("spans", span_rows("c"))
    reader = JournalReader(tmp_path)
    assert [entry.rows["name"][0].as_py() for entry in reader.read(None)] == ["a", "c"]
    assert not any(reader.counters.values())


def test_threads_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow(descriptor: int) -> None:
        calls.append(descriptor)
        time.sleep(0.02)

    monkeypatch.setattr(os, "fdatasync", slow)
    with JournalWriter(tmp_path) as writer:

        def work() -> None:
            for _ in range(5):
                writer.append("spans", span_rows("x"))
                writer.sync()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(names_in(tmp_path)) == 40
    assert len(calls) < 25


def test_a_sync_of_one_thread_never_covers_the_failure_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JournalWriter(tmp_path) as writer:
        writer.append("spans", span_rows("mine"))
        monkeypatch.setattr(os, "fdatasync", failing(os.fdatasync, errno.EIO, 1))
        errors: list[BaseException] = []

        def sync_elsewhere() -> None:
            writer.append("spans", span_rows("theirs"))
            try:
                writer.sync()
            except JournalFailed as error:
                errors.append(error)

        other = threading.Thread(target=sync_elsewhere)
        other.start()
        other.join()
        assert errors
        with pytest.raises(JournalFailed):
            writer.sync()


CRASHING = """
import json, os, sys
from pathlib import Path
import pyarrow as pa
from phasewise.collector.journal import JournalWriter
from phasewise.collector.records import METRIC_SCHEMA
out = os.open(sys.argv[2], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
with JournalWriter(Path(sys.argv[1]), segment_bytes=30_000) as writer:
    for i in range(int(sys.argv[3]), 10**9):
        rows = pa.Table.from_pylist([{"name": str(i), "kind": "gauge", "unix_ns": i}], METRIC_SCHEMA)
        writer.append("metrics", rows)
        writer.sync()
        os.write(out, b"%d\\n" % i)  # the acknowledgement: the page cache outlives the process
"""


def acknowledged(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def stored(directory: Path) -> list[int]:
    entries = JournalReader(directory).read(None, limit=10**9, limit_rows=10**9)
    return [value for entry in entries for value in entry.rows["unix_ns"].to_pylist()]


@pytest.mark.slow
def test_ten_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acks = tmp_path / "acks"
    for round_number in range(10):
        command = [sys.executable, "-c", CRASHING, str(tmp_path / "journal"), str(acks), str(round_number * 10**6)]
        with subprocess.Popen(command) as process:
            before = len(acknowledged(acks))
            while len(acknowledged(acks)) < before + 5 + 7 * round_number:
                time.sleep(0.005)
            process.kill()
    found = stored(tmp_path / "journal")
    assert set(acknowledged(acks)) <= set(found)
    assert len(found) - len(acknowledged(acks)) <= 10  # at most one in doubt a kill
    assert len(set(found)) == len(found)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_crash_at_each_sync_point_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for call in ("fdatasync", "fsync"):
        for when in range(1, 21):
            place = tmp_path / f"{call}-{when}"
            place.mkdir()
            inject = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}"]
            inject += ["-e", f"inject={call}:signal=SIGKILL:when={when}"]
            command = [sys.executable, "-c", CRASHING, str(place / "journal"), str(place / "acks"), "0"]
            ended = subprocess.run([*inject, *command], check=False, capture_output=True, timeout=60)
            if b"ptrace" in ended.stderr:
                pytest.skip("this machine does not allow ptrace")
            assert ended.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), ended
            found = stored(place / "journal")
            assert set(acknowledged(place / "acks")) <= set(found)
            with JournalWriter(place / "journal") as writer:
                writer.append("metrics", metric_rows(1))
            assert len(stored(place / "journal")) == len(found) + 1
