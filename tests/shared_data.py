"""Third-party data that the repository does not hold: where it is, and a reason to skip where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_root() -> Path:
    """The folder named by PHASEWISE_SHARED, relative paths from the root of the repository; by default its sibling."""
    return (ROOT / os.environ.get("PHASEWISE_SHARED", "../shared")).resolve()


def shared_path(*parts: str) -> Path:
    """A file or folder of the shared data; skips the test where it is not on this machine."""
    path = shared_root().joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no shared data ({'/'.join(parts)}): set PHASEWISE_SHARED to the folder that holds it")
    return path
