"""The script for a borrowed accelerator, rehearsed without one: every stage runs and leaves its figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="needs the extra `engine` (torch)")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_bench", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_bench"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_rehearsal_measures_every_stage(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCHES", (1, 4))
    monkeypatch.setattr(bench, "CONTEXTS", (64, 256))
    monkeypatch.setattr(bench, "PROMPTS", (64, 128))
    status = bench.main(
        ["--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--minutes", "0.1", "--dtype", "float32"]
    )
    assert status == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found) == {"facts", "calibrate", "decode", "prefill", "spans"}
    assert found["calibrate"]["matmul_flops_per_s"]["least"] > 1e8
    assert found["calibrate"]["stream_bytes_per_s"]["median"] > 1e8
    assert all(0 < cell["s"]["least"] <= cell["s"]["median"] for cell in found["decode"] + found["prefill"])
    assert found["decode"][0]["batch"] == 1 and found["decode"][0]["share_of_matmul"] < 1
    assert found["spans"]["wall_ratio"]["median"] > 0.3
    table = (tmp_path / "gpu.md").read_text()
    assert "| 1 x 64 |" in table and "Telemetry on over off" in table


def test_a_device_on_which_no_step_runs_is_exit_code_1(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> object:
        raise RuntimeError("out of memory")

    measured = {
        name: {"median": 1.0, "least": 1.0, "most": 1.0} for name in ("matmul_flops_per_s", "stream_bytes_per_s")
    }
    monkeypatch.setattr(bench, "resident", full)
    monkeypatch.setattr(bench, "calibrate", lambda *_: measured)
    monkeypatch.setattr(bench, "PROMPTS", ())
    monkeypatch.setattr(bench, "spans", lambda *_: {"pairs": 1, "wall_ratio": measured["stream_bytes_per_s"]})
    asked = ["--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--dtype", "float32"]
    assert bench.main(asked) == 1
    assert "no step could be run: out of memory" in capsys.readouterr().err


def test_a_load_of_which_a_request_was_not_served_has_no_figure(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle(bench.EngineCore):  # type: ignore[misc, name-defined]
        def run(self, specs: object) -> None:
            """Serves nobody."""

    monkeypatch.setattr(bench, "EngineCore", Idle)
    model = bench.random_llama(bench.TINY, 1, dtype="float32", device="cpu")
    with pytest.raises(SystemExit, match="0 of 3 requests were served"):
        bench.closed_load(bench.Bench(bench.load_rulebook(), model, "tiny", None, "float32"), 3, False)


def test_without_a_device_it_says_so(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path)]) == 4
    assert "no CUDA device" in capsys.readouterr().err
    assert bench.main(["--out", str(tmp_path), "--device", "cpu", "--shape", "nothing"]) == 2
