"""What another sender knows of a request finds the row of that sequence, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from writing import bench, engine_span


def supplement(e2e_s: float, output_tokens: int, preemptions: int) -> dict[str, Any]:
    """As the vLLM plugin sends it."""
    told = {
        "phasewise.supplement": True, "gen_ai.request.id": "cmpl-1-0", "phasewise.preemptions": preemptions,
        "gen_ai.latency.e2e": e2e_s, "gen_ai.usage.output_tokens": output_tokens,
    }  # fmt: skip
    return {"name": "llm_request", "scope": "phasewise.engine", "start_s": 0, "end_s": e2e_s, "attributes": told}


def test_supplements_of_the_sequences_of_one_call_find_their_own(tmp_path: Path) -> None:
    """Three sequences share an identifier; two ended in the same step, and what is said of them differs."""
    ends = [(2.0, 8), (3.0, 9), (3.0, 9)]
    spans = [
        engine_span(
            trace=f"{i + 1:032x}",
            end_s=e2e,
            attributes={
                "gen_ai.request.id": "cmpl-1-0",
                "gen_ai.latency.e2e": e2e,
                "gen_ai.usage.completion_tokens": tokens,
            },
        )
        for i, (e2e, tokens) in enumerate(ends)
    ]
    with bench(tmp_path) as b:
        b.receive([supplement(3.0, 9, 1)], "a" * 32)
        b.receive(spans[:1])
        b.run(1.5)
        assert [row["preemptions"] for row in b.rows()] == [None]  # another sequence's
        b.receive([supplement(2.0, 8, 5)], "b" * 32)
        b.receive([supplement(3.0, 9, 2)], "c" * 32)
        b.receive(spans[1:])
        b.run(1.5)
        assert sorted(((row["e2e_s"], row["preemptions"]) for row in b.rows()), key=str) == [
            (2.0, 5),
            (3.0, None),
            (3.0, None),
        ]


def test_sequences_of_which_the_same_is_said_are_all_filled(tmp_path: Path) -> None:
    spans = [
        engine_span(
            trace=f"{i + 1:032x}",
            attributes={
                "gen_ai.request.id": "cmpl-1-0",
                "gen_ai.latency.e2e": 2.0,
                "gen_ai.usage.completion_tokens": 8,
            },
        )
        for i in range(2)
    ]
    with bench(tmp_path) as b:
        b.receive(spans)
        b.receive([supplement(2.0, 8, 1)], "a" * 32)
        b.receive([supplement(2.0, 8, 1)], "b" * 32)
        b.run(1.5)
        assert [row["preemptions"] for row in b.rows()] == [1, 1]
        assert b.rows("SELECT * FROM supplements") == []


def test_a_supplement_that_no_row_comes_for_waits_an_hour(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive([supplement(2.0, 8, 1)], "a" * 32)
        b.run(1.5)
        assert len(b.rows("SELECT * FROM supplements")) == 1
        b.clock.forward(1800)
        b.receive([engine_span(start_s=1800.0, trace="b" * 32)])
        b.run()
        assert len(b.rows("SELECT * FROM supplements")) == 1
        b.clock.forward(3600)
        b.receive([supplement(2.0, 9, 1) | {"start_s": 5400.0, "end_s": 5402.0}], "c" * 32)
        b.run(1.5)
        assert [row["output_tokens"] for row in b.rows("SELECT * FROM supplements")] == [9]


def test_a_supplement_finds_a_row_that_was_stored_long_before(tmp_path: Path) -> None:
    attributes = {"gen_ai.request.id": "cmpl-1-0", "gen_ai.latency.e2e": 2.0, "gen_ai.usage.completion_tokens": 8}
    with bench(tmp_path) as b:
        b.receive([engine_span(attributes=attributes, trace="b" * 32), engine_span(start_s=1.0, trace="c" * 32)])
        b.run()
        b.reopen()
        b.receive([supplement(2.0, 8, 3)], "a" * 32)
        b.run(1.5)
        assert [row["preemptions"] for row in b.rows()] == [3, None]
        assert b.rows("SELECT * FROM supplements") == []


def test_settings_come_with_supplements(tmp_path: Path) -> None:
    told = {"service.instance.id": "i-1", "service.name": "engine", "phasewise.max_num_seqs": 8}
    with bench(tmp_path) as b:
        b.receive([engine_span()])
        b.run()
        b.receive([supplement(2.0, 8, 1) | {"resource": told}], "a" * 32)
        b.run(1.5)
        b.run(6.0)
        (instance,) = b.rows("SELECT * FROM instances")
        assert instance["engine"] == "vllm_v1"
        assert json.loads(instance["settings"])["max_num_seqs"]["value"] == 8
