"""Every script of tests/benchmarks: it says what it does, and a tiny run prints its figures with the machine and the versions."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import simulation
from shared_data import shared_path

from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.simulation import simulate

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
SENDER = "ingest_load"  # started by others with its load as one argument
NEED_TORCH = ("gpu", "picture_cpu", "torch_steps")
TINY = {
    "scan": ["--seconds", "0.2"],
    "scheduler": ["--steps", "2", "--rounds", "1"],
    "simulation": ["--requests", "40"],
    "picture": ["11"],
    "picture_cpu": ["1", "--rounds", "1", "--requests", "2", "--threads", "1"],
    "efficiency_fit": ["--check"],
    "time_law": ["--steps", "200"],
    "torch_steps": ["--context", "16", "--batches", "2", "--steps", "3", "--threads", "1"],
    "vllm_plugin": ["--steps", "200"],
    "indexing": ["--shape", "8", "--spans", "4096"],
    "senders": ["--seconds", "0.2"],
    "analysis": ["--requests", "3000", "--rounds", "1"],
}
ELSEWHERE = {"ingest", "truth", "gpu"}  # test_ingest_benchmark, test_scoreboard, test_gpu_bench


def main_of(name: str) -> Callable[[list[str]], int]:
    if name in NEED_TORCH:
        pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    found: Callable[[list[str]], int] = importlib.import_module(f"benchmarks.{name}").main
    return found


def test_each_script_is_run_by_a_test() -> None:
    assert {*TINY, *ELSEWHERE, SENDER} == set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != SENDER])
def test_a_script_says_what_it_measures_and_how_it_is_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main_of(name)(["--help"])
    assert left.value.code == 0
    assert f"python tests/benchmarks/{name}.py" in capsys.readouterr().out


# A process of its own each: `indexing` and the store's memory settings, torch's threads and the scanner's cache are the process's.
@pytest.mark.slow
@pytest.mark.live
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_run_prints_machine_versions_and_figures(name: str) -> None:
    main_of(name)  # skipped without torch
    if name == "efficiency_fit":
        shared_path("reference")
    command = [sys.executable, str(FOLDER / f"{name}.py"), *TINY[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout + done.stderr
    assert all(told in printed for told in ("cores", "phasewise", "ython")), printed
    assert len(re.findall(r"\d[\d.,]*", done.stdout)) >= 2, done.stdout


def test_a_request_that_was_not_served_ends_a_simulation_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses_one(*arguments: Any, **options: Any) -> Recording:
        recording = simulate(*arguments, **options)
        recording.finished.pop()
        return recording

    monkeypatch.setattr(simulation, "simulate", loses_one)
    with pytest.raises(SystemExit, match=r"10000 tokens were asked for, 9500 came, in 19 requests"):
        simulation.main(["--requests", "20"])


def test_tables_that_are_not_there_are_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHASEWISE_SHARED", str(tmp_path / "nowhere"))
    assert main_of("efficiency_fit")([]) == 4
    assert "PHASEWISE_SHARED" in capsys.readouterr().err
