"""What a figure was measured on: processor, system, load, and the versions of what was measured."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """cpu, cores (those this process may use), system, load_1m, python, versions. None: unknown, or a package that is not installed
    as one, as in a checkout."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def machine_line(packages: Iterable[str]) -> str:
    """The same as one line, for a benchmark that prints text."""
    told = machine(packages)
    versions = ", ".join(f"{name} {found or 'from the checkout'}" for name, found in told["versions"].items())
    return (
        f"{told['cpu'] or platform.machine()}, {told['cores']} cores, load {told['load_1m']:.1f}, {told['system']}; "
        f"Python {told['python']}, {versions}"
    )


def _cpu() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
