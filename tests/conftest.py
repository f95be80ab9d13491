"""What every test run gets: a skip without the hardware a test needs, and a closing table of what did not run and why."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import thorough
import turns
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Where several workers run the tests (`pytest -n`), those marked `alone` have the machine to themselves, with their fixtures."""
    with turns.taken(item.config, alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts what `-m` left out, by its marker."""
    for item in items:
        marker = next((name for name in ("nightly", "slow") if item.get_closest_marker(name)), None)
        if marker:
            item.config.stash.setdefault(LEFT_OUT, Counter())[marker] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints the table what it left out."""
    if hasattr(session.config, "workeroutput"):
        left_out = session.config.stash.get(LEFT_OUT, Counter[str]())
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker reads all tests, so that what one of them left out is what all did."""
    told: dict[str, int] = getattr(node, "workeroutput", {}).get("left_out", {})
    if told:  # nothing of a worker that crashed
        node.config.stash[LEFT_OUT] = Counter(told)


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
