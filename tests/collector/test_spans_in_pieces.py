"""Spans of one call, or of one tree, that come in pieces and in any order: one row."""

from __future__ import annotations

from pathlib import Path

import pytest
from span_tables import span_table
from writing import SLICES, bench, engine_span, stand_still

from phasewise.collector import refresher

CLIENT = [
    {"name": "turn", "id": "t", "scope": "app", "kind": 1, "start_s": -0.5, "end_s": 3.0},
    {"name": "chat m", "id": "c", "parent": "t", "scope": "genai", "kind": 3, "start_s": -0.25, "end_s": 2.5,
     "attributes": {"gen_ai.operation.name": "chat", "gen_ai.response.model": "m", "gen_ai.response.id": "chatcmpl-9"}},
]  # fmt: skip
BELOW = engine_span(parent="0000000000000002", attributes={"gen_ai.request.id": "chatcmpl-9"})


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)


@pytest.mark.parametrize(
    ("engine_first", "pause_s"),
    [
        (True, 0.0),
        (False, 200.0),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((True, 1.5), (True, 200.0), (False, 0.0), (False, 1.5))
        ),
    ],
)
def test_the_sides_of_a_call_are_one_row_whatever_comes_first(
    tmp_path: Path, engine_first: bool, pause_s: float
) -> None:
    engine = [
        {**CLIENT[0], "start_s": 0, "end_s": 0},
        {**CLIENT[1]},
        BELOW,
    ]  # ids are by position: only the last is sent
    with bench(tmp_path) as b:
        own = span_table(engine, received_unix_ns=b.clock.now).slice(2)
        client = span_table(CLIENT, received_unix_ns=b.clock.now)
        for rows in (own, client) if engine_first else (client, own):
            b.journal.append("spans", rows)
            b.journal.sync()
            b.run(pause_s)
        b.run(1.5)
        (row,) = b.rows()
        assert (row["engine"], row["entry_e2e_s"], row["model"], row["e2e_s"]) == ("vllm_v1", 2.75, "m", 2.0)
        (turn,) = b.rows("SELECT * FROM turns")
        assert (turn["calls"], turn["calls_s"], turn["e2e_s"], turn["unattributed_s"]) == (1, 2.75, 3.5, 0.75)
        assert row["turn_key"] == turn["turn_key"]


def test_a_client_in_another_trace_is_the_same_call_by_its_response_id(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(CLIENT, "1" * 32)
        b.run(1.5)
        assert [row["engine"] for row in b.rows()] == ["genai_client"]
        b.receive([engine_span(attributes={"gen_ai.request.id": "chatcmpl-9"})], "2" * 32)
        b.run()
        (row,) = b.rows()
        assert (row["engine"], row["entry_e2e_s"], row["client_request_id"]) == ("vllm_v1", 2.75, "chatcmpl-9")


@pytest.mark.parametrize("pause_s", [0.0, pytest.param(5.0, marks=pytest.mark.slow), 700.0])
def test_a_tree_that_comes_in_pieces_is_one_row(tmp_path: Path, pause_s: float) -> None:
    with bench(tmp_path) as b:
        whole = span_table(SLICES, received_unix_ns=b.clock.now)
        for index in (1, 2, 3, 0):  # the root comes last
            b.journal.append("spans", whole.slice(index, 1))
            b.journal.sync()
            b.run(pause_s)
        b.run(1.5)
        (row,) = b.rows()
        assert (row["queue_s"], row["prefill_s"], row["decode_s"]) == (1.0, 1.0, 1.0)


def test_a_late_slice_rebuilds_the_row(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        whole = span_table(SLICES, received_unix_ns=b.clock.now)
        b.journal.append("spans", whole.slice(0, 3))
        b.journal.sync()
        b.run(1.5)
        assert b.rows()[0]["decode_s"] is None
        b.journal.append("spans", whole.slice(3))
        b.journal.sync()
        b.run(300)
        (row,) = b.rows()
        assert (row["queue_s"], row["prefill_s"], row["decode_s"], row["revision"]) == (1.0, 1.0, 1.0, 1)


def test_a_row_that_changes_before_its_attribution_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresher.Refresher, "rests", lambda self, now_ns: True)
    with bench(tmp_path) as b:
        whole = span_table(SLICES, received_unix_ns=b.clock.now)
        for part in (whole.slice(0, 3), whole.slice(3)):
            b.journal.append("spans", part)
            b.journal.sync()
            b.run(1.5)
        (row,) = b.rows()
        assert (row["decode_s"], row["revision"]) == (1.0, None)
        assert b.counter("requests") == 1
