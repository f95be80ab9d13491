"""Accelerators that were measured: how they are written and read, and which of their figures are bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import make_figures, make_profile

from phasewise.instrumented_engine.calibration.profile import profile
from phasewise.instrumented_engine.executors.deployment import Deployment
from phasewise.rules.errors import InputError, RuleError
from phasewise.rules.hardware_file import read_gpu
from phasewise.rules.hardware_text import gpu_text
from phasewise.rules.load import OWN_FOLDER, OWN_VARIABLE, PACKAGED, load_rulebook
from phasewise.rules.measured import BEST_PRODUCT_RATIO, BEST_STREAM_RATIO
from phasewise.rules.schema import Gpu
from phasewise.rules.toml_table import TomlTable

RULES = load_rulebook(PACKAGED)
H100 = RULES.gpus["h100-sxm"]


def read_back(gpu: Gpu) -> Gpu:
    return read_gpu(gpu.id, TomlTable.parse("made.toml", gpu_text(gpu)))


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RULES.gpus))
def test_what_is_written_of_any_accelerator_is_read_back(name: str) -> None:
    gpu = replace(RULES.gpus[name], efficiency=None)
    assert read_back(gpu) == gpu


@settings(deadline=None)
@given(st.text(min_size=1).filter(str.strip), st.floats(1e6, 1e17), st.floats(1e6, 1e14))
def test_any_name_and_figure_survives_the_file(device: str, flops: float, bytes_per_s: float) -> None:
    figures = make_figures({"bf16": flops}, bytes_per_s, device.strip())
    made = profile(figures, "made", device.strip())
    assert read_back(made) == made
    assert made.measured is not None and made.measured.device == device.strip()


def test_a_profile_says_where_its_figures_come_from() -> None:
    made = read_back(make_profile())
    assert made.achieved_flops == {"fp32": pytest.approx(40e12), "bf16": pytest.approx(400e12)}
    assert made.achieved_bandwidth_bytes_per_s == pytest.approx(2e12)
    assert made.peak_flops == {} and made.memory_bandwidth_bytes_per_s is None
    for name in ("achieved_flops", "achieved_bandwidth_bytes_per_s", "memory_bytes"):
        assert made.sources[name].text.startswith(
            "measured on this machine by phasewise calibrate, phasewise 0.1.0, torch"
        )
        assert made.sources[name].date == "2026-11-30"
    assert made.measured is not None
    copy = made.measured.streams["copy"]
    assert copy.least <= copy.p10 < copy.median < copy.p90 <= copy.most and copy.repeats == 5
    assert "fp8" not in made.achieved_flops, "what could not be measured is unknown, not 0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("achieved_bandwidth_bytes_per_s = 2e+12\n", "", "memory_bandwidth_bytes_per_s: is missing"),
        ("[achieved_flops]", "[peak_flops]", "memory_bandwidth_bytes_per_s: is missing"),
        ("achieved_flops = {", "tdp_w = {", "sources.achieved_flops"),
        ("repeats = 5", "repeats = 0", "repeats: must be at least 1"),
        ("p10 = ", "p10 = 9", "are not in order"),
        ("[measured.stream.copy]", "[measured.stream.scale]", "measured.stream.scale: unknown key"),
        ("[measured.product.bf16]", "[measured.product.bf61]", "measured.product.bf61: unknown key"),
        ("date = 2026-11-30", 'date = "today"', "measured.date: must be a date"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_key(old: str, new: str, said: str) -> None:
    text = gpu_text(make_profile())
    assert old in text
    with pytest.raises(RuleError) as caught:
        read_gpu("made", TomlTable.parse("made.toml", text.replace(old, new, 1)))
    assert said in str(caught.value)


def test_more_bandwidth_than_the_data_sheet_states_is_refused() -> None:
    made = make_profile({"bf16": 500e12}, 3e12, H100)
    text = gpu_text(made).replace("achieved_bandwidth_bytes_per_s = 3e+12", "achieved_bandwidth_bytes_per_s = 4e+12")
    with pytest.raises(RuleError, match="lies above the bandwidth of the data sheet"):
        read_gpu("made", TomlTable.parse("made.toml", text))


# --- which figures are bounds -----------------------------------------------------------------------------------------


def test_the_data_sheet_is_kept_beside_what_was_reached() -> None:
    made = make_profile({"bf16": 500e12, "fp32": 50e12}, 3e12, H100)
    assert made.peak_flops == H100.peak_flops and made.achieved_flops["bf16"] == pytest.approx(500e12)
    assert made.sources["peak_flops"] == H100.sources["peak_flops"]
    assert made.roof("bf16") == H100.roof("bf16")
    assert (wide := made.roof("fp32")) is not None and wide.measured, "this data sheet states none"
    assert read_back(made) == made


@pytest.mark.parametrize(("bf16", "stream", "what"), [(1200e12, 3e12, "bf16"), (500e12, 4e12, "memory bandwidth")])
def test_a_data_sheet_that_was_beaten_is_that_of_another_device(bf16: float, stream: float, what: str) -> None:
    made = make_profile({"bf16": bf16}, stream, H100)
    assert made.peak_flops == {} and made.memory_bandwidth_bytes_per_s is None
    assert made.note is not None and f"h100-sxm was left out: more was reached than it states ({what})" in made.note
    assert read_back(made) == made


def test_of_a_measured_device_the_roof_is_what_was_reached() -> None:
    roof = make_profile().roof("bf16")
    assert roof is not None and roof.measured
    assert roof.ridge_flop_per_byte == pytest.approx(200)
    assert make_profile().roof("fp8") is None


def test_efficiencies_are_shares_of_what_a_data_sheet_would_state() -> None:
    made = make_profile()
    assert made.nominal_flops("bf16") == pytest.approx(400e12 / BEST_PRODUCT_RATIO)
    assert made.nominal_bandwidth_bytes_per_s == pytest.approx(2e12 / BEST_STREAM_RATIO)
    assert H100.nominal_flops("bf16") == H100.peak_flops["bf16"]
    assert H100.nominal_bandwidth_bytes_per_s == H100.memory_bandwidth_bytes_per_s


def test_the_time_law_starts_from_a_data_sheet() -> None:
    with pytest.raises(InputError, match=r"Some Card 9 \(measured\) was only measured"):
        Deployment(gpu=make_profile(), model=RULES.models["llama-3.1-8b"])


def test_a_smaller_type_counts_where_it_is_faster() -> None:
    made = make_profile({"fp32": 2e12, "bf16": 1e12, "int8": 5e12})
    assert made.multiplies("int8") is True
    assert made.multiplies("bf16") is False, "computed by other units, slower"
    assert made.multiplies("fp8") is None, "not measured is unknown"
    assert H100.multiplies("fp8") is True and RULES.gpus["a100-sxm-80gb"].multiplies("fp8") is False


# --- a user's own folder ----------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    (folder / "gpus").mkdir(parents=True)
    monkeypatch.setenv(OWN_VARIABLE, str(folder))
    return folder


def test_a_users_own_rules_are_read_beside_the_packaged_ones(own: Path) -> None:
    (own / "gpus" / "some-card-9.toml").write_text(gpu_text(make_profile()))
    found = load_rulebook()
    assert found.gpus["some-card-9"] == make_profile()
    assert found.find_gpu("some card 9") == make_profile()
    assert found.gpus["h100-sxm"] == H100 and found.techniques == RULES.techniques
    assert found.version != RULES.version
    assert "some-card-9" not in load_rulebook(PACKAGED).gpus


def test_the_folder_may_lie_where_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OWN_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert load_rulebook().version == RULES.version
    (tmp_path / OWN_FOLDER / "gpus").mkdir(parents=True)
    (tmp_path / OWN_FOLDER / "gpus" / "some-card-9.toml").write_text(gpu_text(make_profile()))
    assert "some-card-9" in load_rulebook().gpus


def test_a_file_named_like_a_packaged_one_stands_in_its_place(own: Path) -> None:
    text = (PACKAGED / "gpus" / "t4.toml").read_text()
    (own / "gpus" / "t4.toml").write_text(text.replace("tdp_w = 70", "tdp_w = 71"))
    assert load_rulebook().gpus["t4"].tdp_w == 71


@pytest.mark.parametrize("kind", ["models", "techniques", "engines"])
def test_other_kinds_are_read_from_it_too(own: Path, kind: str) -> None:
    (own / kind).mkdir()
    source = sorted((PACKAGED / kind).glob("*.toml"))[0]
    (own / kind / source.name).write_text(source.read_text() + "\nnonsense = 1\n")
    with pytest.raises(RuleError) as caught:
        load_rulebook()
    assert str(own / kind / source.name) in str(caught.value) and "nonsense" in str(caught.value)


def test_a_misplaced_file_and_a_missing_folder_stop_the_start(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "some-card-9.toml").write_text(gpu_text(make_profile()))
    with pytest.raises(RuleError, match=r"move it into one of the folders gpus, models"):
        load_rulebook()
    monkeypatch.setenv(OWN_VARIABLE, str(own / "nowhere"))
    with pytest.raises(RuleError, match="PHASEWISE_RULES: names no folder"):
        load_rulebook()


def test_two_files_of_one_name_are_told_where_they_lie(own: Path) -> None:
    (own / "gpus" / "mine.toml").write_text(gpu_text(replace(make_profile(), aliases=("H100",))))
    with pytest.raises(RuleError) as caught:
        load_rulebook()
    assert str(own / "gpus" / "mine.toml") in str(caught.value) and "'H100' already names 'h100-sxm'" in str(
        caught.value
    )
