from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from phasewise.collector.recordings import FACTS, note_recordings, recordings_of
from phasewise.collector.registry import Registry
from phasewise.collector.store import Store


def spans(*rows: tuple[int, int, dict[str, str]]) -> pl.DataFrame:
    return pl.DataFrame(
        [(start, end, json.dumps(resource)) for start, end, resource in rows],
        schema={"start_unix_ns": pl.Int64, "end_unix_ns": pl.Int64, "resource": pl.String},
        orient="row",
    )


def test_live_spans_are_no_recording() -> None:
    assert recordings_of(spans((1, 2, {"service.name": "vllm"}))) == []


def test_a_recording_is_named_with_its_time_and_facts() -> None:
    (run,) = recordings_of(
        spans(
            (5, 9, {"phasewise.dataset": "a", FACTS: '{"badge": "x"}'}),
            (3, 4, {"phasewise.dataset": "a", FACTS: '{"badge": "x"}'}),
        )
    )
    assert (run.name, run.from_unix_ns, run.to_unix_ns, run.facts) == ("a", 3, 9, '{"badge": "x"}')


@pytest.mark.parametrize("facts", ["no json", "[1]", ""])
def test_facts_that_are_no_object_are_none(facts: str) -> None:
    (run,) = recordings_of(spans((1, 2, {"phasewise.dataset": "a", FACTS: facts})))
    assert run.facts is None


def test_a_run_grows_and_stays_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.duckdb")
    for start, end in ((10, 20), (30, 40), (10, 20)):
        with store.write() as transaction:
            note_recordings(transaction, spans((start, end, {"phasewise.dataset": "a", FACTS: "{}"})))
    assert store.query("SELECT name, from_unix_ns, to_unix_ns FROM runs").rows() == [("a", 10, 40)]
    store.close()


def test_what_the_operator_states_wins_over_telemetry() -> None:
    registry = Registry(
        pl.DataFrame(schema={"instance": pl.String, "kind": pl.String}), {"accelerator": "h100-sxm", "model": "m"}
    )
    seen = pl.DataFrame(
        {
            "instance": ["i"],
            "engine": ["vllm_v1"],
            "engine_version": [None],
            "model": ["told"],
            "service": ["s"],
            "arrival_unix_ns": [1],
            "finished_unix_ns": [2],
        },
        schema_overrides={"engine_version": pl.String},
    )
    registry.see_requests(seen)
    settings = registry.settings("i")
    assert (settings["accelerator"].value, settings["accelerator"].source) == ("h100-sxm", "user")
    assert settings["model"].value == "m"
