"""Applications for the tests of the pages and the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stocked import Served, make_served

from phasewise.rules.load import Rulebook, load_rulebook


@pytest.fixture(scope="session")
def rulebook() -> Rulebook:
    return load_rulebook()


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
