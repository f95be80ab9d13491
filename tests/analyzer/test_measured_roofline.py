"""Devices that `phasewise calibrate` measured: judged by what they reached, which is a bound of nothing; and how a refusal offers it."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiles import make_profile
from summary_documents import make_summary

from phasewise.analyzer.machine import Machine
from phasewise.analyzer.missing import HOW
from phasewise.analyzer.roofline import judge_decode, judge_prefill, known_ridges, physics_check
from phasewise.analyzer.rooflines import judgement_json
from phasewise.analyzer.step_bounds import bounds_of
from phasewise.analyzer.summary.definitions import impossible_numbers
from phasewise.analyzer.summary.machine import read_machine
from phasewise.analyzer.summary.reader import read_summary
from phasewise.rules.counting import Precision
from phasewise.rules.engine_settings import HOW_TO_READ, MEASURE_IT, NAME_IT
from phasewise.rules.hardware_text import gpu_text
from phasewise.rules.load import OWN_VARIABLE, PACKAGED, load_rulebook

RULES = load_rulebook(PACKAGED)
H100, LLAMA = RULES.gpus["h100-sxm"], RULES.models["llama-3.1-8b"]
KNOWN = tuple(RULES.gpus.values())
MINE = make_profile({"bf16": 400e12, "fp32": 40e12}, 2e12)


def test_a_measured_device_is_judged_by_what_it_reached() -> None:
    judged = judge_decode(LLAMA, MINE, 1, 512, known=KNOWN)
    assert judged.bound == "bandwidth"
    assert judged.ridge_flop_per_byte == pytest.approx(200)
    assert judged.measured and judged.time_s is not None
    assert judged.least_time_s is None, "what was reached once can be surpassed"
    assert judge_prefill(LLAMA, MINE, 4096, known=KNOWN).bound == "compute"
    told = judgement_json(judged, Machine(LLAMA, MINE, Precision(), "bf16", 1))
    assert (told["roof"], told["least_time_s"]) == ("measured", None)
    assert told["reached_time_s"] == pytest.approx(judged.time_s, rel=1e-5)


def test_faster_than_what_was_measured_is_no_impossibility() -> None:
    judged = judge_decode(LLAMA, MINE, 1, 2048)
    assert judged.time_s is not None
    assert physics_check(judged, judged.time_s / 2) is None
    beside_its_data_sheet = make_profile({"bf16": 500e12}, 3e12, H100)
    assert physics_check(judge_decode(LLAMA, beside_its_data_sheet, 1, 2048), 0.002) is not None


def test_what_was_measured_moves_no_ridge_of_an_accelerator_that_nobody_named() -> None:
    slow = make_profile({"bf16": 1e12, "int4": 1e12}, 1e12)
    assert known_ridges((*KNOWN, slow), "bf16") == known_ridges(KNOWN, "bf16")
    assert known_ridges((*KNOWN, slow), "int4") is None


def test_every_refusal_says_how_to_measure() -> None:
    nobody = judge_decode(LLAMA, None, 200, 16, known=KNOWN)
    assert nobody.offer == NAME_IT
    t4 = judge_prefill(LLAMA, RULES.gpus["t4"], 128, dtype="bf16", known=KNOWN)
    assert t4.offer == MEASURE_IT, "it is named already"
    other = judge_prefill(LLAMA, make_profile({"fp32": 1e12}), 128, dtype="bf16", known=KNOWN)
    assert other.offer == MEASURE_IT
    assert other.reason is not None and "Some Card 9 (measured) was measured without bf16" in other.reason
    assert "phasewise calibrate" in MEASURE_IT and MEASURE_IT in NAME_IT
    assert NAME_IT in HOW["accelerator"]
    assert {HOW_TO_READ[name] for name in ("decode_bound", "prefill_bound", "device_kind")} == {NAME_IT}


def test_times_of_a_measured_device_stand_on_what_a_data_sheet_would_state() -> None:
    mine, h100 = (bounds_of(Machine(LLAMA, gpu, Precision(), "bf16", 1)) for gpu in (MINE, H100))
    assert mine is not None and h100 is not None and H100.memory_bandwidth_bytes_per_s is not None
    assert mine.context_s / h100.context_s == pytest.approx(H100.memory_bandwidth_bytes_per_s / (2e12 / 0.9))
    assert mine.token_s / h100.token_s == pytest.approx(H100.peak_flops["bf16"] / (400e12 / 0.8))


def test_a_summary_faster_than_what_was_measured_contradicts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus").mkdir()
    a100 = RULES.gpus["a100-sxm-80gb"]
    mine = make_profile({"bf16": 300e12}, a100.nominal_bandwidth_bytes_per_s)
    (tmp_path / "gpus" / f"{mine.id}.toml").write_text(gpu_text(mine))
    monkeypatch.setenv(OWN_VARIABLE, str(tmp_path))
    found = {}
    for name in (a100.id, mine.id):
        document = make_summary(
            hardware={"kind": "gpu", "accelerator": name},
            model={"name": "meta-llama/Llama-3.1-8B", "weight_dtype": "bf16"},
            observed={"tpot_p50_ms": 5},
        )
        summary = read_summary(document)
        machine = read_machine(summary, load_rulebook())
        assert machine.bandwidth_bytes_per_s == pytest.approx(a100.nominal_bandwidth_bytes_per_s, rel=1e-5)
        found[name] = list(impossible_numbers(summary, machine))
    assert len(found[a100.id]) == 1
    assert found[mine.id] == []
