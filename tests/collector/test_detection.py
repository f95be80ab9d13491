"""A span is recognised as it would be if every detector looked at it."""

from __future__ import annotations

import polars as pl
import pytest
from span_tables import span_frame
from writing import rulebook

from phasewise.collector import detection
from phasewise.collector.detection import FirstMatch
from phasewise.collector.profiles import Profiles

PROFILES = Profiles(rulebook().engines)


def spans() -> pl.DataFrame:
    """The examples of all profiles, and some spans that nobody knows."""
    examples = [example.spans for engine in rulebook().engines.values() for example in engine.examples if example.spans]
    strange = {
        "name": "job 17",
        "scope": None,
        "start_s": 0,
        "end_s": 1,
        "attributes": {"gen_ai.operation.name": "chat"},
    }
    return pl.concat([*(span_frame(one) for one in examples), span_frame([strange, {**strange, "attributes": {}}])])


def everyone(match: FirstMatch, frame: pl.DataFrame) -> pl.Series:
    return match._matched(frame, tuple(range(len(match._groups))))


@pytest.mark.parametrize("match", [PROFILES._own, PROFILES._part])
def test_what_need_not_be_looked_at_would_not_have_matched(match: FirstMatch) -> None:
    frame = spans()
    expected = everyone(match, frame)
    assert expected.null_count() not in (0, len(frame))
    assert match.of(frame).equals(expected, null_equal=True)
    assert match.of(frame.head(1)).equals(expected.head(1), null_equal=True)
    assert match.of(frame.clear()).len() == 0


def test_without_detectors_nothing_is_recognised() -> None:
    frame = spans()
    assert FirstMatch([("acme", ())]).of(frame).null_count() == len(frame)


def test_many_names_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = spans()
    expected = PROFILES._own.of(frame)
    monkeypatch.setattr(detection, "_MOST_KINDS", 2)
    assert PROFILES._own.of(frame).equals(expected, null_equal=True)
