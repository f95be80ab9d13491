"""`phasewise calibrate` but for the measuring: what it is told, what it refuses, what it writes and offers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_device import MadeDevice
from profiles import make_profile

from phasewise.dashboard import cli
from phasewise.dashboard.commands import calibrate, doctor
from phasewise.dashboard.commands.configuration import require_known
from phasewise.instrumented_engine.calibration import numpy_device
from phasewise.rules.engine_settings import MEASURE_IT, NAME_IT
from phasewise.rules.errors import InputError
from phasewise.rules.hardware_text import gpu_text
from phasewise.rules.load import OWN_VARIABLE, load_rulebook


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of own rules, which is not there yet."""
    monkeypatch.setenv(OWN_VARIABLE, str(tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.fixture
def made(own: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeDevice]:
    device = MadeDevice()
    monkeypatch.setattr(calibrate, "_device", lambda _: device)
    yield device


@pytest.fixture
def no_torch(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the extra, with arrays that a test can wait for."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    monkeypatch.setattr(numpy_device, "stream_array_bytes", lambda *_: 1 << 20)


def run(*arguments: object) -> int:
    return cli.main(["calibrate", "--seconds", "0.1", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "'tpu' is no device: cpu, cuda or cuda:N"),
        (["--device", "cuda:x"], "is no device"),
        (["--dtypes", "bf16,bf61"], "'bf61' is no data type: some of fp32"),
        (["--seconds", "0"], "'0' is no such time: 0.1 to 3600 seconds"),
        (["--seconds", "soon"], "is no such time"),
        (["--seconds", "nan"], "is no such time"),
        (["--id", "My Card"], "is no id"),
        (["--id", "../up"], "is no id"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["calibrate", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_profile_lies_where_it_is_read_and_says_so(
    own: Path, made: MadeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    told = capsys.readouterr()
    assert 'name it in phasewise.toml: [hardware] accelerator = "made-device-measured"' in told.err
    rows = {line.split()[0] for line in told.out.splitlines()[4:]}
    assert rows >= {"fp32", "bf16", "int8", "copy"}
    assert "p10 to p90" in told.out
    found = load_rulebook()
    gpu = found.gpus["made-device-measured"]
    assert found.find_gpu("Made (R) Device") == gpu and gpu.measured is not None
    assert f"{gpu.measured.products['bf16'].repeats}" in told.out
    assert sorted(path.name for path in (own / "gpus").iterdir()) == ["made-device-measured.toml"]


def test_measuring_again_replaces_the_profile_and_another_id_stands_beside_it(
    own: Path, made: MadeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--id", "mine") == 0
    assert run("--id", "mine", "--dtypes", "fp32") == 0
    assert set(load_rulebook().gpus["mine"].achieved_flops) == {"fp32"}
    capsys.readouterr()
    assert run("--id", "other", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["id"] == "other" and told["file"] == str(own / "gpus" / "other.toml")
    assert told["measured"]["products"]["fp32"]["repeats"] >= 5
    found = load_rulebook()
    assert found.find_gpu("Made (R) Device") == found.gpus["mine"], "a name stays with the first that has it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "DIR/mine.json"], "is no rule file (let its name end in .toml)"),
        (["--output", "DIR/mine.toml", "--id", "other"], "is not the name of"),
        (["--id", "t4"], "is a rule of the package (choose another)"),
        (["--output", "DIR/h100-sxm.toml"], "is a rule of the package"),
        (["--output", "DIR/written.toml"], "exists, and is no profile that calibrate wrote"),
        (["--dtypes", "fp4"], "cannot be measured on Made (R) Device (some of fp32, bf16, int8"),
    ],
)
def test_what_cannot_be_written_or_measured_is_refused_first(
    arguments: list[str], said: str, tmp_path: Path, made: MadeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "written.toml").write_text("[serve]\n")
    assert run(*(argument.replace("DIR", str(tmp_path)) for argument in arguments)) == 2
    assert said in capsys.readouterr().err
    assert made.calls == 0
    assert (tmp_path / "written.toml").read_text() == "[serve]\n"


def test_a_profile_elsewhere_says_where_to_put_it(
    tmp_path: Path, made: MadeDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OWN_VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert run("--output", tmp_path / "out" / "mine.toml") == 0
    assert "put it into phasewise-rules/gpus, then name it" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine.toml").exists() and not (tmp_path / "phasewise-rules").exists()


def test_a_folder_that_cannot_be_written_is_exit_code_4(
    tmp_path: Path, made: MadeDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(OWN_VARIABLE, str(tmp_path / "file" / "rules"))
    assert run() == 4
    assert "cannot write" in capsys.readouterr().err
    assert made.calls == 0


# --- without torch ----------------------------------------------------------------------------------------------------


def test_without_torch_a_cuda_device_is_one_sentence(no_torch: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cuda:1") == 4
    assert capsys.readouterr().err == (
        "phasewise: cuda:1 is measured with PyTorch, and torch is not installed (pip install 'phasewise[engine]')\n"
    )


def test_without_torch_another_type_says_what_to_install(no_torch: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dtypes", "bf16") == 2
    assert "(some of fp32; more with PyTorch: pip install 'phasewise[engine]')" in capsys.readouterr().err


def test_without_torch_numpy_measures_and_the_profile_says_so(
    no_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--id", "mine") == 0
    gpu = load_rulebook().gpus["mine"]
    assert set(gpu.achieved_flops) == {"fp32"} and gpu.kind == "cpu"
    assert gpu.measured is not None and "torch is not installed" in gpu.measured.notes[0]
    assert "numpy" in gpu.sources["achieved_flops"].text
    assert "note: torch is not installed" in capsys.readouterr().out


# --- where it is offered ----------------------------------------------------------------------------------------------


def test_an_accelerator_that_the_rules_do_not_hold_can_be_measured() -> None:
    with pytest.raises(InputError, match=r"did you mean h100-sxm\?; or ") as caught:
        require_known({"accelerator": "h100-smx"}, load_rulebook())
    assert MEASURE_IT in str(caught.value)
    with pytest.raises(InputError) as caught:
        require_known({"model": "llama-9"}, load_rulebook())
    assert MEASURE_IT not in str(caught.value)


def test_doctor_says_what_the_roofline_stands_on(own: Path) -> None:
    (own / "gpus").mkdir(parents=True)
    (own / "gpus" / "some-card-9.toml").write_text(gpu_text(make_profile()))
    assert NAME_IT in doctor._accelerator({})
    assert doctor._accelerator({"accelerator": "Tesla T4"}) == "t4, by its data sheet"
    assert doctor._accelerator({"accelerator": "some card 9"}) == "some-card-9, as it was measured"
    with pytest.raises(InputError, match="phasewise calibrate"):
        doctor._accelerator({"accelerator": "nothing like it"})
