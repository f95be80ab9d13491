"""Applications for the tests of the pages and the API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import ARGUMENTS, CHROMIUM, Browsed, browsed
from stocked import Served, make_served

from phasewise.rules.load import Rulebook, load_rulebook


@pytest.fixture(scope="session")
def rulebook() -> Rulebook:
    return load_rulebook()


@pytest.fixture(scope="module")
def morning(tmp_path_factory: pytest.TempPathFactory, rulebook: Rulebook) -> Iterator[Served]:
    """One filled application for all tests of a file that only ask; who writes, or breaks something, takes `served`."""
    made = make_served(tmp_path_factory.mktemp("morning") / "data", rulebook)
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, rulebook: Rulebook) -> Served:
    """One whose store cannot be read."""
    made = make_served(tmp_path_factory.mktemp("broken") / "data", rulebook)
    made.store.close()
    return made


@pytest.fixture
def serve(tmp_path: Path, rulebook: Rulebook) -> Iterator[Callable[..., Served]]:
    """Makes an application; see `stocked.make_served`."""
    made: list[Served] = []

    def make(**more: Any) -> Served:
        made.append(make_served(tmp_path / f"data-{len(made)}", rulebook, **more))
        return made[-1]

    yield make
    for served in made:
        served.store.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium: Any) -> Iterator[Callable[[Served], Browsed]]:
    with contextlib.ExitStack() as stack:
        yield lambda served: stack.enter_context(browsed(chromium, served))
