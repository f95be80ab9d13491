"""The published diagnosis cases, scored as `score_cases.py` scores them: bars of this project, figures printed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from shared_data import shared_path

from phasewise.analyzer.summary import explain_summary
from phasewise.rules.load import Rulebook, load_rulebook


@cache
def rules() -> Rulebook:
    return load_rulebook()


def scorer() -> ModuleType:
    """The published scorer as a module: its way to hide signals and its choice of input fields are used, not copied."""
    spec = importlib.util.spec_from_file_location("score_cases", shared_path("cases", "score_cases.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("hide", [False, True])
def test_the_cases_are_answered(hide: bool, capsys: pytest.CaptureFixture[str]) -> None:
    module = scorer()
    cases = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(shared_path("cases").glob("C*.json"))]
    good = listed = bound = forbidden = abstained = confident = 0
    for case in cases:
        expected = case["expected"]
        verdict = explain_summary(module.seen(case, hide), rules())
        recommend, confidence = verdict["recommend"], verdict["confidence"]
        assert isinstance(recommend, list) and len(recommend) <= 3 and isinstance(confidence, dict)
        changes = {one["technique"] for one in recommend}
        right = verdict["primary"] in expected["acceptable"]
        good += right
        abstained += verdict["primary"] == "inconclusive"
        forbidden += len(changes & set(expected["must_not_recommend"]))
        confident += not right and confidence["level"] in ("medium", "high")
        if expected["primary"] != "inconclusive":
            bound += 1
            listed += bool(changes & set(expected["recommend"]))
    with capsys.disabled():
        print(f"\ncases {len(cases)}{', decisive signals hidden' if hide else ''}: acceptable {good}, abstained {abstained}, listed {listed}/{bound}, forbidden {forbidden}, wrong with confidence {confident}")  # fmt: skip
    assert confident == 0
    if hide:
        assert abstained >= 0.5 * len(cases)
    else:
        assert good >= 0.9 * len(cases)
        assert listed >= 0.9 * bound
        assert forbidden == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--hide-decisive"]])
def test_the_published_scorer_passes_the_command(options: list[str]) -> None:
    command = Path(sys.executable).with_name("phasewise")
    if not command.exists():
        pytest.skip("the phasewise command is not installed beside this Python")
    script, folder = shared_path("cases", "score_cases.py"), shared_path("cases")
    run = subprocess.run(
        [sys.executable, script, command, folder, *options], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
