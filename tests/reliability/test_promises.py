"""The page of promises, faults and attacks: each is there, names tests that exist, and says what came out of them."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from crash_counts import in_words
from shared_data import ROOT

from phasewise.collector import limits, spill
from phasewise.collector.journal_writer import FREE_BYTES, FREE_RATIO, JOURNAL_BYTES, VOLUME_RATIO
from phasewise.collector.patience import PAGE_LIMIT_S, REPORT_LIMIT_S
from phasewise.collector.readers import AT_ONCE, MOST_WAITING
from phasewise.collector.store import MEMORY_LIMIT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([PFS]\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.M)
# What this page has to answer for: the tenants of P16 and what else was left out are said under "What is not promised".
PROMISES = [number for number in range(1, 18) if number != 16]
FAULTS = [1, 2, 3, 4, *range(6, 15), 17, *range(19, 23), *range(25, 30), 32, 33, 35, 36, *range(40, 44)]
ATTACKS = [*range(1, 17), 18, 20, 22, 23, 24, 28, 29]


@cache
def named_in(name: str) -> set[str]:
    """Names of the tests in a file; empty where it does not exist."""
    path = ROOT / "tests" / name
    if not path.exists():
        return set()
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_promise_fault_and_attack_is_there() -> None:
    wanted = [f"P{n}" for n in PROMISES] + [f"F{n:02}" for n in FAULTS] + [f"S{n:02}" for n in ATTACKS]
    assert [name for name, *_ in ROWS] == wanted
    assert all(last.strip("- ") for *_, last in ROWS), "a row without what came out"


@pytest.mark.parametrize(("promise", "named"), [(name, named) for name, _, named, _ in ROWS])
def test_a_row_names_tests_that_exist(promise: str, named: str) -> None:
    references = re.findall(r"`([\w/]+\.py)::(\w+)`", named)
    assert references and len(references) == named.count("`") // 2, promise
    missing = [f"{file}::{name}" for file, name in references if name not in named_in(file)]
    assert not missing


@pytest.mark.parametrize("marker", ["slow", "nightly"])
def test_the_crashes_are_counted(marker: str) -> None:
    assert in_words(marker) in " ".join(PAGE.split())


def test_the_limits_are_those_of_the_program() -> None:
    span, intake = limits.SPAN_LIMITS, limits.INTAKE_LIMITS
    gib = 1 << 30
    rows = [
        f"| {intake.request_bytes // limits.MIB} MiB; OTLP/JSON {intake.json_bytes // limits.MIB} MiB |",
        f"| {intake.queue_bytes // limits.MIB} MiB or {intake.queue_rows:,} rows |",
        f"| of these, of requests that come slowly | {intake.late_bytes // limits.MIB} MiB |",
        f"| the smaller of {JOURNAL_BYTES // gib} GiB and {VOLUME_RATIO:.0%} of the volume |".replace("%", " %"),
        f"| the smaller of {FREE_BYTES // limits.MIB} MiB and {FREE_RATIO:.0%} of the volume |".replace("%", " %"),
        f"| {span.attributes}, and {span.known_attributes} in all of keys that are read; the rest is counted |",
        f"| {span.key_bytes} B, else dropped; {span.value_bytes:,} B, else cut and marked |",
        f"| {span.events:,}, {span.links}, {span.depth} levels |",
        f"| any past; a start over {span.future_s / 60:.0f} min ahead is flagged",
        f"| {intake.header_s:.0f} s, {intake.body_s:.0f} s and at least {intake.body_bytes_per_s / 1024:.0f} kB/s |",
        f"| {intake.unread_s:.0f} s, on Linux |",
        f"| {intake.idle_s:.0f} s, {intake.age_s:.0f} s |",
        f"| {intake.connections:,}, {intake.connections:,}, {intake.streams} |",
        f"| {PAGE_LIMIT_S:.0f} s on a page, {REPORT_LIMIT_S:.0f} s in a command",
        f"four at once, {MOST_WAITING} wait |",
        f"| {MEMORY_LIMIT.replace('MB', ' MB')} |",
        f"| the smaller of {spill.SPILL_BYTES // gib} GiB and {spill.SPILL_RATIO:.0%} of what is free |".replace("%", " %"),
    ]  # fmt: skip
    assert AT_ONCE == 4
    missing = [row for row in rows if row not in PAGE]
    assert not missing
