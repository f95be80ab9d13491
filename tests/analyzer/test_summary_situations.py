"""Invented deployments of every kind the format can tell, with what may and may not be said about each.

`tests/cases/summary_situations.jsonl`: acceptable classes, changes of which one must be offered (none: no demand), changes
that must never be; where given, the paths that carry the answer. The numbers are invented; the answers follow from the
definitions of the classes, not from the code.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from phasewise.analyzer.summary import DETECTORS, explain_summary
from phasewise.analyzer.summary.machine import read_machine
from phasewise.analyzer.summary.reader import read_summary
from phasewise.rules.load import Rulebook, load_rulebook

PATH = Path(__file__).parent.parent / "cases" / "summary_situations.jsonl"
SITUATIONS = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
KEPT = ("schema", "id", "name", "kind", "parent", "adapter", "view")


@cache
def rules() -> Rulebook:
    return load_rulebook()


def offered(verdict: Mapping[str, object]) -> list[str]:
    recommend = verdict["recommend"]
    assert isinstance(recommend, list)
    return [str(one["technique"]) for one in recommend]


def level(verdict: Mapping[str, object]) -> str:
    confidence = verdict["confidence"]
    assert isinstance(confidence, dict)
    return str(confidence["level"])


@pytest.mark.parametrize("situation", SITUATIONS, ids=[s["document"]["id"] for s in SITUATIONS])
def test_an_invented_situation_is_told_apart(situation: Mapping[str, object]) -> None:
    document = situation["document"]
    assert isinstance(document, dict)
    verdict = explain_summary(document, rules())
    assert verdict["primary"] in _list(situation["acceptable"])
    changes = offered(verdict)
    wanted = _list(situation["offers"])
    assert not wanted or set(changes) & set(wanted), changes
    assert not set(changes) & set(_list(situation["never"]))


def test_without_what_carries_the_answer_it_abstains() -> None:
    carried = [s for s in SITUATIONS if s.get("decisive")]
    good = abstained = 0
    confident: list[str] = []
    for situation in carried:
        document = copy.deepcopy(situation["document"])
        for path in situation["decisive"]:
            _hide(document, path)
        verdict = explain_summary(document, rules())
        right = verdict["primary"] in (*situation["acceptable"], "inconclusive")
        good += right
        abstained += verdict["primary"] == "inconclusive"
        if not right and level(verdict) not in ("low", "insufficient"):
            confident.append(str(document["id"]))
    assert len(carried) >= 80
    assert good >= 0.95 * len(carried)
    assert abstained >= 0.5 * len(carried)
    assert confident == []


def test_every_detector_speaks_in_some_situation() -> None:
    silent = {detector.__name__ for detector in DETECTORS}
    for situation in SITUATIONS:
        summary = read_summary(situation["document"])
        machine = read_machine(summary, rules())
        silent -= {d.__name__ for d in DETECTORS if next(d(summary, machine), None) is not None}
    assert silent <= {"slowed_clock", "admission_jump", "swapping"}, "these have tests of their own"


@pytest.mark.parametrize("kept", [0.6, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (0.85, 0.35))])
def test_with_numbers_missing_it_abstains_rather_than_errs(kept: float) -> None:
    """Each number and setting is left out at random: wrong answers stay rare, and rarer still with confidence."""
    draw = random.Random(17)
    wrong = confident = total = 0
    for situation in SITUATIONS:
        for _ in range(3):
            document = copy.deepcopy(situation["document"])
            for parent, key in list(_leaves(document)):
                if draw.random() > kept:
                    parent[key] = None
            verdict = explain_summary(document, rules())
            total += 1
            if verdict["primary"] not in (*situation["acceptable"], "inconclusive"):
                wrong += 1
                confident += level(verdict) != "low"
    assert wrong <= 0.04 * total
    assert confident <= 0.01 * total


def test_the_answer_does_not_hang_on_the_last_digit() -> None:
    """Numbers moved by up to a tenth, each on its own: hardly any verdict changes for the worse."""
    draw = random.Random(5)
    good = total = 0
    for situation in SITUATIONS:
        for _ in range(2):
            document = copy.deepcopy(situation["document"])
            for parent, key in list(_leaves(document)):
                value = parent[key]
                if key.endswith("_ms") and isinstance(value, int | float):
                    parent[key] = value * draw.uniform(0.9, 1.1)
            good += explain_summary(document, rules())["primary"] in situation["acceptable"]
            total += 1
    assert good >= 0.97 * total


def _hide(document: dict[str, object], path: str) -> None:
    """Removes a field; of a required section its content."""
    section, _, name = path.partition(".")
    held = document.get(section)
    if name and isinstance(held, dict):
        held.pop(name, None)
    elif not name:
        document.pop(section, None)
        if section in ("hardware", "engine", "model", "workload", "observed"):
            document[section] = {}


def _list(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def _leaves(node: object) -> Iterator[tuple[dict[str, object], str]]:
    """(container, key) of every value that may be unknown."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in KEPT or key == "differs":
                continue
            if isinstance(value, dict | list):
                yield from _leaves(value)
            else:
                yield node, key
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value)
