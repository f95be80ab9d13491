"""Numbers that no time, duration or count can be: a record with one is named or kept without it, and the others are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pytest
from client_files import AIPERF, BENCH, OPENAI, guidellm
from writing import NOW, rulebook

from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError

PROFILES = Profiles(rulebook().engines)
ABSURD = [10**400, -(10**400), 1e302, -1e302, 1 << 63, 10**19, 9.3e18, float("inf"), float("nan")]


def numbers(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers in a document."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from numbers(value, (*path, key))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield path


def changed(document: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    found = copy.deepcopy(document)
    node: Any = found
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return found


def lines(*documents: dict[str, Any]) -> str:
    return "\n".join(json.dumps(one) for one in documents)


def report(*documents: dict[str, Any]) -> str:
    groups = {"successful": list(documents), "incomplete": [], "errored": []}
    return json.dumps({"metadata": {"version": 1}, "args": {"model": "m"}, "benchmarks": [{"requests": groups}]})


@pytest.mark.parametrize(
    ("document", "written"),
    [(AIPERF, lines), (BENCH, lines), (OPENAI, lines), (guidellm(), report)],
    ids=["aiperf", "bench", "openai", "guidellm"],
)
def test_an_absurd_number_costs_its_own_record_at_most(document: dict[str, Any], written: Callable[..., str]) -> None:
    places = list(numbers(document))
    assert len(places) > 3
    for place in places:
        for value in ABSURD:
            body = written(document, changed(document, place, value)).encode()
            try:
                found = import_bytes(body, "f.jsonl", PROFILES, modified_unix_ns=NOW)
            except InputError as error:
                pytest.fail(f"{place} = {value}: {error}")
            rows = found.requests
            assert rows is not None, (place, value)
            assert found.counts["good"] + found.counts["bad"] == 2
            assert rows.filter(pl.col("arrival_unix_ns") < 0).is_empty(), (place, value)
