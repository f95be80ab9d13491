"""What every test run gets: a skip without the hardware a test needs, and a closing table of what did not run and why."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import thorough
from _pytest.terminal import TerminalReporter

# Code compiled for the receiver, also by the processes that tests start: kept, so that only the first run waits for it.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "compiled"))
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    thorough.leave_out(slow="not slow" in str(config.option.markexpr))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts what `-m` left out, by its marker."""
    for item in items:
        marker = next((name for name in ("nightly", "slow") if item.get_closest_marker(name)), None)
        if marker:
            item.config.stash.setdefault(LEFT_OUT, Counter())[marker] += 1


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """The table: reason, how many tests, the first of them."""
    rows: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        rows.setdefault(str(reason).removeprefix("Skipped: "), []).append(report.nodeid)
    left_out = config.stash.get(LEFT_OUT, Counter[str]())
    terminalreporter.section("not run, and why")
    for reason, names in sorted(rows.items()):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        terminalreporter.write_line(f"{len(names):4d}  {reason}  [{names[0]}{more}]")
    how = {"slow": "too long for make test; run by make test SLOW=1", "nightly": "by hand: pytest -m nightly"}
    for marker, count in sorted(left_out.items()):
        terminalreporter.write_line(f"{count:4d}  {marker}: {how[marker]}")
    if not rows and not left_out:
        terminalreporter.write_line("      nothing was left out")
