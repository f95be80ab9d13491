"""Every engine profile is read strictly, and its own examples come out as it says."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from span_tables import at, span_frame

from phasewise.collector.exposition import read_exposition
from phasewise.collector.kv_tiers import IS_TIER, loaded
from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import EngineSample, Request, columns
from phasewise.rules import engine_parts
from phasewise.rules.engine_parts import Example
from phasewise.rules.engine_profile import EngineProfile, load_engine
from phasewise.rules.errors import RuleError

FOLDER = Path(str(files("phasewise.rules"))) / "engines"
ENGINES = {path.stem: load_engine(path) for path in sorted(FOLDER.glob("*.toml"))}
PROFILES = Profiles(ENGINES)
EXAMPLES = [(profile, example) for profile in ENGINES.values() for example in profile.examples]


def matches(found: object, expected: object) -> bool:
    if isinstance(expected, float):
        return isinstance(found, int | float) and abs(found - expected) < 1e-6
    return found == expected


def check_request(row: dict[str, Any], profile: EngineProfile, example: Example) -> None:
    expected = dict(example.request or {})
    expected.setdefault("engine", profile.id)
    for name, value in expected.items():
        if name == "quality":
            assert value in json.loads(row["quality"] or "[]"), row["quality"]
        elif name.endswith("_at_s"):
            column = name.removesuffix("_at_s") + "_unix_ns"
            assert row[column] == at(value), name
        else:
            assert matches(row[name], value), f"{name}: {row[name]!r}, expected {value!r}"
    for name in example.absent:
        assert row[name] is None, f"{name}: {row[name]!r}, expected unknown"


@pytest.mark.parametrize(("profile", "example"), EXAMPLES, ids=[f"{p.id}: {e.name}" for p, e in EXAMPLES])
def test_example_gives_the_row_it_promises(profile: EngineProfile, example: Example) -> None:
    if example.scrape:
        read = read_exposition(example.scrape, at(0), PROFILES, instance="x")
        assert read is not None
        row = read.samples.row(0, named=True)
        for name, value in example.sample.items():
            assert matches(row[name], value), f"{name}: {row[name]!r}, expected {value!r}"
        for name in example.absent:
            assert row[name] is None, name
        assert {name: read.settings[name] for name in example.settings} == dict(example.settings)
        return
    done = normalize(span_frame(example.spans), PROFILES)
    assert done.requests.height == example.requests_count
    assert not done.unmapped
    told = {name: value for _, values in done.settings for name, value in values.items()}
    assert {name: told.get(name) for name in example.settings} == dict(example.settings)
    if example.requests_count:
        rows = loaded(done.requests, done.supplements.filter(IS_TIER))
        check_request(rows.row(0, named=True), profile, example)


def test_every_profile_has_its_place_in_the_order() -> None:
    orders = [profile.order for profile in ENGINES.values() if profile.detect]
    assert len(set(orders)) == len(orders)


def test_columns_a_profile_may_fill_exist() -> None:
    request, sample = columns(Request), columns(EngineSample)
    for names in (
        engine_parts.TIME_FIELDS,
        engine_parts.COUNT_FIELDS,
        engine_parts.TEXT_FIELDS,
        engine_parts.MOMENT_FIELDS,
    ):
        assert names <= set(request)
    for names in (engine_parts.SAMPLE_GAUGES, engine_parts.SAMPLE_COUNTERS):
        assert names <= set(sample)
    assert {f"{name}_{part}" for name in engine_parts.SAMPLE_HISTOGRAMS for part in ("count", "sum_s")} <= set(sample)


def test_unknown_spans_are_counted_and_make_no_row() -> None:
    done = normalize(span_frame([{"name": "mystery", "scope": "acme", "start_s": 0, "end_s": 1}]), PROFILES)
    assert done.requests.is_empty()
    assert done.unmapped == {"acme / mystery": 1}


GOOD = """
title = "Acme"
order = 99
sources = ["test"]
[[detect]]
name = "acme"
[time]
queue_s = { from = "q", unit = "ms" }
[[example]]
name = "x"
spans = [{ name = "acme", start_s = 0, end_s = 1, attributes = { q = 250 } }]
request = { queue_s = 0.25 }
"""


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ('unit = "ms"', 'unit = "minutes"', "time.queue_s.unit", "minutes"),
        ("queue_s = { from", "queu_s = { from", "time.queu_s", "queue_s"),
        ('title = "Acme"', "", "title", "missing"),
        ('name = "acme"\n[time]', "[time]", "detect[0]", "no condition"),
        ("order = 99", "order = 99\nordr = 1", "ordr", "order"),
        ("[[example]]", '[[derive]]\nfield = "decode_s"\nplus = "nothing_s"\n[[example]]', "decode_s", "nothing_s"),
        ("[[example]]", '[[derive]]\nfield = "queue_s"\nplus = "queue_s"\n[[example]]', "derive", "circle"),
        ("[[example]]", '[[derive]]\nfield = "combined_s"\nplus = "queue_s"\n[[example]]', "covers", "combined_s"),
        ("title =", "title", "syntax", "line"),
        ("order = 99", "order = 99\nserves = true", "serves", "call_boundary"),
        ("order = 99", "order = 99\nof_parts = true", "of_parts", "slices"),
        ("order = 99", "order = 99\nkv_tier = true", "kv_tier", "settle"),
        (
            "order = 99",
            "order = 99\nkv_tier = true\nsettle = 'trace'\nslices.context_s = { names = 'load' }",
            "kv_tier",
            "request_id",
        ),
        (
            "[[example]]",
            "[[derive]]\nfield = 'decode_s'\nplus = 'queue_s'\nbefore = '0.x'\n[[example]]",
            "before",
            "0.17",
        ),
        ("[time]", "[[release]]\nsays = 's'\nsource = 't'\n[time]", "release[0]", "since or before"),
        (
            "[time]",
            "[[release]]\nsince = '0.10'\nbefore = '0.9'\nsays = 's'\nsource = 't'\n[time]",
            "release[0].before",
            "not after",
        ),
        ("order = 99", "order = 99\nid_tail = '-x'", "id_tail", "kv_tier"),
        ("order = 99", "order = 99\nid_tail = '-('", "id_tail", "regular expression"),
        ("[[example]]", '[[derive]]\nfield = "decode_s"\nper_gap = "gap_s"\n[[example]]', "decode_s", "gap_s"),
        (
            "[[example]]",
            '[[derive]]\nfield = "decode_s"\nplus = "queue_s"\nper_gap = "queue_s"\n[[example]]',
            "derive",
            "one of",
        ),
        ("[[example]]", "[moments]\nqueued_unix_ns = { sole = true, start_of = 'x' }\n[[example]]", "sole", "event"),
        (
            "[[example]]",
            "[moments]\nqueued_unix_ns = { event = 'x', at = 'y' }\n[[example]]",
            "queued_unix_ns",
            "event",
        ),
    ],
)
def test_a_wrong_profile_names_file_and_key(tmp_path: Path, old: str, new: str, key: str, hint: str) -> None:
    path = tmp_path / "acme.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(RuleError) as raised:
        load_engine(path)
    assert str(path) in str(raised.value)
    assert key in str(raised.value)
    assert hint in str(raised.value)


def test_a_new_engine_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "acme.toml"
    path.write_text(GOOD)
    engine = load_engine(path)
    row = normalize(span_frame(engine.examples[0].spans), Profiles({"acme": engine})).requests.row(0, named=True)
    assert row["queue_s"] == 0.25
    assert row["residual_s"] == 0.75
    assert pl.Series([row["e2e_s"]]).item() == 1.0
