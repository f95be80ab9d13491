from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serving import PHASEWISE, phasewise

from phasewise.dashboard import cli
from phasewise.dashboard.commands import documents, rules
from phasewise.dashboard.commands.connection import find_server, make_directory
from phasewise.dashboard.commands.ports import Wanted, holder, is_loopback, listener, require_free
from phasewise.dashboard.commands.supervisor import FIRST_PAUSE_S, LONGEST_PAUSE_S, Child
from phasewise.rules.errors import InputError, MachineError
from phasewise.rules.load import load_rulebook

HEAVY = ("duckdb", "pyarrow", "polars", "pandas", "dash", "plotly", "fastapi", "rich", "grpc", "ibis")


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    code = f"import sys; from phasewise.dashboard.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    times = []
    for _ in range(3):
        start = time.monotonic()
        phasewise("--help")
        times.append(time.monotonic() - start)
    assert min(times) < 0.3


def test_every_verb_has_a_module_with_run() -> None:
    import importlib

    for verb in cli.VERBS:
        assert callable(importlib.import_module(f"phasewise.dashboard.commands.{verb}").run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "invalid choice"),
        (["serve", "--port", "99999"], "is no port"),
        (["serve", "--port", "8²"], "is no port"),
        (["serve", "--scrape", "localhost:8000"], "is no URL"),
        (["rules"], "list|show"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["explain"], 2, "needs an ID or --summary"),
        (["explain", "x", "--summary", "y"], 2, "not both"),
        (["explain", "--summary", "/nowhere.json"], 2, "/nowhere.json: no such file"),
        (["rules", "show", "raise_max_num_sqes"], 2, "did you mean raise_max_num_seqs"),
        (["analyze", "--data", "/nowhere", "--from", "yesterday"], 2, "is not a time"),
        (["analyze", "--data", "/nowhere"], 2, "holds no phasewise data"),
        (["analyze", "--server", "http://127.0.0.1:1"], 4, "no answer from http://127.0.0.1:1"),
        (["ingest"], 2, "names no file"),
        (["ingest", "/nowhere.json"], 2, "/nowhere.json: no such file"),
        (["serve", "--host", "0.0.0.0"], 2, "phasewise keys create"),
        (["serve", "--host", "::"], 2, "--insecure-no-auth"),
        (["doctor", "--quick", "--data", "/nowhere"], 1, ""),
    ],
)
def test_an_error_is_one_line_with_its_remedy(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == (1 if said else 0)
    assert "Traceback" not in told.err


def test_a_fault_of_ours_is_exit_code_70_with_an_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rules, "run", lambda _: 1 / 0)
    assert cli.main(["rules", "list"]) == 70
    line = capsys.readouterr().err
    assert line.startswith("phasewise: internal error ") and "ZeroDivisionError" in line
    path = Path(line.split("the trace is in ")[1].rstrip(")\n"))
    assert "Traceback" in path.read_text()
    path.unlink()


def test_an_interruption_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(rules, "run", interrupt)
    assert cli.main(["rules", "list"]) == 130


def test_a_closed_pipe_says_nothing() -> None:
    command = f"{' '.join(PHASEWISE)} rules list --json | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("phasewise ")


def test_rules_are_listed_and_shown_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rules", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rulebook = load_rulebook()
    assert set(told["techniques"]) == set(rulebook.techniques)
    assert set(told["engines"]) == set(rulebook.engines)
    assert cli.main(["rules", "show", next(iter(rulebook.gpus))]) == 0
    assert "source" in capsys.readouterr().out


def test_documents_are_one_object_an_array_or_lines(tmp_path: Path) -> None:
    def read(text: str) -> tuple[Any, bool]:
        path = tmp_path / "x.json"
        path.write_text(text)
        found, single = documents.read_documents([str(path)])
        return [document.content for document in found], single

    assert read('{"a": 1}') == ([{"a": 1}], True)
    assert read('[{"a": 1}]') == ([{"a": 1}], False)
    assert read('{"a": 1}\n\n{"a": 2}\n') == ([{"a": 1}, {"a": 2}], False)
    with pytest.raises(InputError, match=r"x\.json: line 2: is not JSON"):
        read('{"a": 1}\n{"a": }\n')
    with pytest.raises(InputError, match=r"x\.json: line 3: is not JSON"):
        read('{\n"a": 1,\n}')
    with pytest.raises(InputError, match="item 2: is not a JSON object"):
        read('[{"a": 1}, 3]')
    with pytest.raises(InputError, match="is empty"):
        read("  ")


def test_a_taken_port_is_named_with_its_holder_and_option() -> None:
    with listener("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        assert holder(port) == os.getpid()
        with pytest.raises(MachineError, match=rf"port {port} .* process {os.getpid()} .* --otlp-grpc-port"):
            require_free("127.0.0.1", [Wanted(0, "--port"), Wanted(port, "--otlp-grpc-port")])


def test_two_options_may_not_share_a_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(InputError, match="is also --port"):
        require_free("127.0.0.1", [Wanted(port, "--port"), Wanted(port, "--otlp-http-port")])


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.1.2.3", False)],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="is not a directory"):
        make_directory(tmp_path / "file")


def test_a_file_left_by_a_killed_server_counts_as_none(tmp_path: Path) -> None:
    assert find_server(tmp_path) is None
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / "serve.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": int(dead.stdout)}))
    assert find_server(tmp_path) is None
    (tmp_path / "serve.json").write_text("{")
    with pytest.raises(MachineError, match=r"serve\.json: unreadable"):
        find_server(tmp_path)


def test_restarts_come_later_each_time_and_a_steady_child_starts_afresh() -> None:
    child = Child("x", "x", {}, started_s=time.monotonic())
    pauses = [child.pause_s() for _ in range(9)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    child.started_s = time.monotonic() - 3600
    assert child.pause_s() == FIRST_PAUSE_S
