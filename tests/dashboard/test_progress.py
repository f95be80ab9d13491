"""What `phasewise ingest` shows while it reads: a bar on a terminal that leaves nothing behind, elsewhere a line now and then."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from overlapping import REQUESTS, lines

from phasewise.collector.importers import pieces, streams
from phasewise.dashboard import cli
from phasewise.dashboard.commands import progress as shown

STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """What was written to a terminal, and whether it was one."""

    def __init__(self) -> None:
        self.written = b""

    @property
    def text(self) -> str:
        return STEERING.sub("", self.written.decode())

    @property
    def left(self) -> str:
        """What stands there at the end: lines that were erased are not."""
        rows, at = [""], 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.written.decode()):
            if part == "\n":
                at += 1
                rows += [""] * (at + 1 - len(rows))
            elif re.fullmatch(r"\x1b\[\d*A", part):
                at = max(0, at - int(part[2:-1] or 1))
            elif part in ("\x1b[2K", "\x1b[K"):
                rows[at] = ""
            elif not part.startswith("\x1b") and part != "\r":
                rows[at] += part
        return "\n".join(rows).strip()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """sys.stderr is a terminal of 100 columns, read all the while as terminals are: else a writer would wait for ever."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    screen = Screen()
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def read() -> None:
        try:
            while part := os.read(own, 4096):
                screen.written += part
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield screen
    reader.join(10)
    os.close(own)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of some pieces, read in blocks that are as small."""
    for module, name in ((pieces, "PIECE_BYTES"), (streams, "_BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 16_000)
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(lines()) + "\n")
    return path


def ingest(data: Path, *arguments: object) -> int:
    return cli.main(["ingest", "--data", str(data), *map(str, arguments)])


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(monkeypatch) as screen:
        assert ingest(tmp_path / "data", file, "--json") == 0
    assert "reading traces.jsonl" in screen.text
    shares = [int(share) for share in re.findall(r"(\d+)%", screen.text)]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert screen.left == ""
    assert json.loads(capsys.readouterr().out)["counts"]["good"] == 2 * REQUESTS  # what programs read is not touched


@pytest.mark.parametrize("name", ["[red]a[blue].jsonl", "[/].jsonl", "b\x1b[2Jc\x07.jsonl"])
def test_a_files_name_is_shown_as_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup, and control signs steer nothing."""
    with terminal(monkeypatch) as screen, shown.progress(f"reading {name}", 2) as advance:
        advance(1)
    shown_as = "".join(sign if sign.isprintable() else "?" for sign in name)
    assert f"reading {shown_as}" in screen.text
    assert b"\x1b[2J" not in screen.written


class Hand:
    """A clock that goes on by some seconds with each look."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def monotonic(self) -> float:
        self._now_s += self._step_s
        return self._now_s


def test_elsewhere_a_line_comes_every_ten_seconds(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "time", Hand(step_s=11.0))
    assert ingest(tmp_path / "data", file) == 0
    said = capsys.readouterr().err.splitlines()
    shares = [int(line.removeprefix("reading traces.jsonl: ").removesuffix(" %")) for line in said]
    steps = sum(1 for _ in pieces.pieces(file, None))
    assert len(shares) == steps > 1
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] == 100


def test_elsewhere_nothing_is_said_of_what_is_over_in_a_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "time", Hand(step_s=3.0))
    with shown.progress("reading a.jsonl", 3) as advance:
        advance(1)
        advance(1)
    assert capsys.readouterr().err == ""


def test_work_without_an_end_in_sight_tells_no_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "time", Hand(step_s=11.0))
    with shown.progress("exporting") as advance:
        advance(1)
    assert capsys.readouterr().err == "exporting:\n"
