"""The wheel that a user installs, built from this checkout, and environments that hold no more than a test says."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shared_data import ROOT


def build_wheel(folder: Path) -> Path:
    """A wheel of what git knows or would add, in `folder`; skips where that cannot be told or built."""
    source = folder / "source"
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.splitlines()):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    if "No matching distribution" in build.stderr:
        pytest.skip("no package index to fetch the build backend from")
    assert build.returncode == 0, build.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, target: Path) -> None:
    """`pip install --no-deps` into a folder that an environment may have on its path."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip


def bare_environment(folder: Path, names: list[str]) -> Path:
    """Links to installed distributions and to all that they require, and nothing else."""
    site = Path(sysconfig.get_path("purelib"))
    wanted, seen = list(names), set[str]()
    folder.mkdir(parents=True)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        for file in found.files or ():
            _link(site, folder, file.parts)
        for text in found.requires or ():
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                wanted.append(required.name)
    return folder


def _link(site: Path, folder: Path, parts: tuple[str, ...]) -> None:
    """File by file: namespaces such as `opentelemetry` are shared by distributions, of which only some are wanted."""
    if ".." in parts or "__pycache__" in parts or not site.joinpath(*parts).is_file():
        return
    place = folder.joinpath(*parts)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(site.joinpath(*parts))
