"""`phasewise ingest FILE`: read once, gone on with after an interruption, the same store as one clean run."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from overlapping import REQUESTS, contents, lines
from shared_data import ROOT

from phasewise.collector.importers import pieces
from phasewise.dashboard import cli
from phasewise.dashboard.commands.connection import Server
from phasewise.dashboard.commands.store_process import StoreService, StoreSettings

PIECE = 14_000  # bytes: a dozen requests
# Ends like a power cut would, inside the transaction that stores a piece.
KILLED = """
import os, signal, sys
from phasewise.collector import imports
from phasewise.collector.importers import pieces
from phasewise.dashboard import cli
pieces.PIECE_BYTES, left = int(sys.argv[1]), int(sys.argv[2])
real = imports.write_mark
def write_mark(transaction, mark):
    global left
    real(transaction, mark)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
imports.write_mark = write_mark
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(lines()) + "\n")
    return path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)


def ingest(data: Path, *arguments: object) -> int:
    return cli.main(["ingest", "--data", str(data), *map(str, arguments)])


def killed_in(piece: int, data: Path, file: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(PIECE), str(piece), "ingest", "--data", str(data), str(file)]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "build" / "ns")}, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 3])
def test_killed_in_the_middle_and_run_again_it_is_the_same_store(
    tmp_path: Path, file: Path, piece: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ingest(tmp_path / "clean", file) == 0
    killed_in(piece, tmp_path / "killed", file)
    with duckdb.connect(str(tmp_path / "killed" / "phasewise.duckdb"), read_only=True) as store:
        found = store.execute("SELECT count(*) FROM requests").fetchone()
    assert found and (0 < found[0] < REQUESTS if piece > 1 else found[0] == 0)
    capsys.readouterr()
    assert ingest(tmp_path / "killed", file) == 0
    assert ("goes on at line" in capsys.readouterr().err) == (piece > 1)
    assert contents(tmp_path / "killed") == contents(tmp_path / "clean")


def test_the_same_file_twice_changes_nothing(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ingest(tmp_path / "d", file) == 0
    before = contents(tmp_path / "d")
    assert len(before["requests"]) == REQUESTS
    capsys.readouterr()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(file.read_bytes())
    assert ingest(tmp_path / "d", copy, "--json") == 0
    told = capsys.readouterr()
    assert "is stored already (--again reads it again)" in told.err
    assert json.loads(told.out) == {"counts": {}, "problems": []}
    assert ingest(tmp_path / "d", file, "--again") == 0
    after = contents(tmp_path / "d")
    assert {n: v for n, v in after.items() if n != "counters"} == {n: v for n, v in before.items() if n != "counters"}


@pytest.mark.slow
def test_a_stop_by_hand_keeps_what_was_stored_and_goes_on_to_the_same_store(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = pieces.pieces, [3]

    def interrupted(*arguments: Any) -> Any:
        for piece in real(*arguments):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(pieces, "pieces", interrupted)
    assert ingest(tmp_path / "d", file) == 130
    told = capsys.readouterr().err
    assert "stored" in told and "the same command goes on from there" in told
    monkeypatch.setattr(pieces, "pieces", real)
    assert ingest(tmp_path / "d", file) == 0
    assert ingest(tmp_path / "clean", file) == 0
    assert contents(tmp_path / "d") == contents(tmp_path / "clean")


def test_a_folder_of_rotated_files_and_one_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rotated"
    folder.mkdir()
    half = len(lines()) // 2
    (folder / "trace.000001.jsonl.gz").write_bytes(gzip.compress("\n".join(lines()[:half]).encode()))
    (folder / "trace.000002.jsonl").write_text("\n".join([*lines()[half:], "{broken"]))
    (folder / "zz.bin").write_bytes(b"\x80\x04nothing of ours")
    assert ingest(tmp_path / "d", folder) == 5
    told = capsys.readouterr().err
    assert f"trace.000002.jsonl: line {len(lines()) - half + 1}: is not JSON" in told
    assert "zz.bin: is neither text that holds JSON nor an OTLP request" in told
    assert len(contents(tmp_path / "d")["requests"]) == REQUESTS


@pytest.mark.live
def test_a_running_server_takes_the_pieces_and_knows_the_file_again(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = StoreService(StoreSettings(tmp_path / "served", port=0))
    server = Server(f"http://127.0.0.1:{service.start()}")
    try:
        assert cli.main(["ingest", "--server", server.url, str(file)]) == 0
        capsys.readouterr()
        assert cli.main(["ingest", "--server", server.url, str(file)]) == 0
        assert "is stored already" in capsys.readouterr().err
        nothing = tmp_path / "nothing.jsonl"
        nothing.write_text('{"a": 1}\n{"a": 2}\n')
        assert cli.main(["ingest", "--server", server.url, str(nothing)]) == 2
        assert "nothing.jsonl: line 1: has a format that is not known (keys: a)" in capsys.readouterr().err
    finally:
        service.stop()
    assert len(contents(tmp_path / "served")["requests"]) == REQUESTS


@pytest.mark.parametrize("most", [100, 1000, 10**6])
def test_pieces_end_with_whole_lines_and_lose_nothing(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LONGEST_BYTES", 5000)
    body = b"".join(b'{"a": "%s"}\n' % (b"x" * (n * 37 % 400)) for n in range(200))
    giant = b'{"a": "' + b"y" * 9000 + b'"}\n'
    path = tmp_path / "f"
    path.write_bytes(body + giant + body[: len(body) // 2])
    found = list(pieces.pieces(path, most_bytes=most))
    assert [one.last for one in found] == [False] * (len(found) - 1) + [True]
    if most < 9000:  # a line that no piece can hold is left out and named; in a larger piece it is read
        assert b"".join(one.body for one in found) == body + body[: len(body) // 2]
        assert [one.problem for one in found if one.problem] == [f"line 201: is longer than {5000 >> 20} MiB"]
    for one, following in itertools.pairwise(found):
        rest = list(pieces.pieces(path, one.end, most_bytes=most))
        assert b"".join(part.body for part in rest) == b"".join(part.body for part in found[found.index(following) :])
        assert rest[0].start == following.start
    assert sum(one.read_bytes for one in found) == path.stat().st_size
