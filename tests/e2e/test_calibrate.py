"""`phasewise calibrate` on this CPU for real, and a window that is then judged by what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import phasewise

from phasewise.dashboard import cli
from phasewise.rules.load import OWN_VARIABLE, load_rulebook


def test_a_measured_machine_labels_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OWN_VARIABLE, str(tmp_path / "rules"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = phasewise("calibrate", "--device", "cpu", "--seconds", "0.5", "--id", "this-machine", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["file"] == str(tmp_path / "rules" / "gpus" / "this-machine.toml")
    fp32 = told["measured"]["products"]["fp32"]
    assert 0 < fp32["least"] <= fp32["p10"] <= fp32["median"] <= fp32["p90"] <= fp32["most"]
    assert fp32["repeats"] >= 5 and " x " in fp32["shape"]
    gpu = load_rulebook().gpus["this-machine"]
    assert gpu.achieved_flops["fp32"] == fp32["median"]
    assert gpu.achieved_bandwidth_bytes_per_s == max(rate["median"] for rate in told["measured"]["streams"].values())
    assert gpu.memory_bytes > 0 and gpu.peak_flops == {}

    data = tmp_path / "data"
    asked = ["--data", str(data), "--json"]
    (tmp_path / "phasewise").mkdir()
    stated = '[hardware]\naccelerator = "this-machine"\nweight_dtype = "fp32"\n'
    (tmp_path / "phasewise" / "phasewise.toml").write_text(stated)
    assert cli.main(["engine", "simulate", "full_seats", "--requests", "60", *asked]) == 0
    capsys.readouterr()
    assert cli.main(["analyze", "--from", "0", *asked]) == 0
    verdict = json.loads(capsys.readouterr().out)
    decode = verdict["roofline"]["decode"]
    assert (decode["accelerator"], decode["roof"], decode["dtype"]) == ("this-machine", "measured", "fp32")
    assert decode["bound"] in ("compute", "bandwidth")
    ridge = fp32["median"] / gpu.achieved_bandwidth_bytes_per_s
    assert decode["ridge_flop_per_byte"] == pytest.approx(ridge, rel=1e-4)
    assert decode["least_time_s"] is None and decode["reached_time_s"] > 0
