"""A request that one engine prefills and another decodes is one request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from halves import DYNAMO, KNOWN, LLMD, ROW, UNKNOWN, routed, sglang
from span_tables import at, span_table
from writing import Bench, bench


def rows_of(folder: Path, *batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    with bench(folder) as b:
        for batch in batches:
            b.writer.add_spans(span_table(batch))
        return b.rows()


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
@pytest.mark.parametrize("trace", [None, 7], ids=["two traces", "one trace"])
def test_the_halves_of_sglang_meet_in_their_room(tmp_path: Path, order: tuple[str, str], trace: int | None) -> None:
    rows = rows_of(tmp_path, *(sglang(role, 1, "0xabc", trace=trace) for role in order))
    assert len(rows) == 1
    assert {name: rows[0][name] for name in ROW} == ROW
    assert rows[0]["quality"] == '["disaggregated"]'
    assert rows[0]["residual_s"] == pytest.approx(0.0)
    assert rows[0]["scheduled_unix_ns"] == at(1.25)


def test_many_rooms_stay_apart(tmp_path: Path) -> None:
    halves = [sglang(role, n, f"0x{n:x}", start_s=n * 0.01) for n in range(1, 21) for role in ("prefill", "decode")]
    rows = rows_of(tmp_path, [span for half in halves[::2] for span in half], [s for h in halves[1::2] for s in h])
    assert len(rows) == 20
    assert {row["queue_s"] for row in rows} == {1.0}


def test_a_room_that_two_requests_share_pairs_nobody(tmp_path: Path) -> None:
    halves = [("prefill", 1), ("decode", 2), ("decode", 3)]
    rows = rows_of(tmp_path, [span for role, number in halves for span in sglang(role, number, "0x1")])
    assert [row["queue_s"] for row in rows] == [None, None]


def test_half_a_request_is_none_until_the_other_half_comes(tmp_path: Path) -> None:
    assert rows_of(tmp_path, sglang("prefill", 1, "0xabc")) == []


def waited(b: Bench, seconds: float) -> list[dict[str, Any]]:
    b.run(seconds)
    for _ in range(12):
        b.run(10)
    return b.rows()


def test_half_a_request_whose_other_half_never_comes_is_a_row_with_what_is_known(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(sglang("prefill", 1, "0xabc"))
        assert waited(b, 1.5) == []
        (row,) = waited(b, 3700)
        assert {name: row[name] for name in KNOWN} == KNOWN
        assert [row[name] for name in UNKNOWN] == [None] * len(UNKNOWN)
        assert (row["final"], row["finished_unix_ns"]) == (True, at(1.75))
        assert (b.counter("prefill_without_decode"), b.counter("requests")) == (1, 1)
        b.reopen()
        assert waited(b, 3700) == [row]
        assert b.counter("prefill_without_decode") == 1
        assert b.rows("SELECT sum(requests)::BIGINT AS n FROM rollups WHERE width_s = 3600") == [{"n": 1}]


@pytest.mark.slow
def test_a_decode_half_that_comes_after_all_is_paired_as_ever(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.receive(sglang("prefill", 1, "0xabc"))
        assert len(waited(b, 3700)) == 1
        b.receive(sglang("decode", 1, "0xabc"))
        (row,) = waited(b, 100)
        assert {name: row[name] for name in ROW} == ROW
        assert row["quality"] == '["disaggregated"]'
        assert row["residual_s"] == pytest.approx(0.0)
        assert (b.counter("prefill_without_decode"), b.counter("requests")) == (0, 1)
        assert b.rows("SELECT sum(requests)::BIGINT AS n FROM rollups WHERE width_s = 3600") == [{"n": 1}]
        assert b.rows("SELECT * FROM supplements") == []


@pytest.mark.parametrize(
    ("front", "markers"), [("llm_d.pd_proxy.request", LLMD), ("http-request", DYNAMO)], ids=["llm-d", "Dynamo"]
)
def test_the_halves_under_a_router_are_one_request(tmp_path: Path, front: str, markers: Any) -> None:
    spans = routed(front, markers, traces=3)
    rows = rows_of(tmp_path, spans, spans[:1])
    assert [row["instance"] for row in rows] == ["d-0"] * 3
    for row in rows:
        assert (row["queue_s"], row["prefill_s"]) == (0.25, 0.25), "the prefill half's"
        assert (row["decode_s"], row["output_tokens"]) == (1.5, 5), "the decode half's"
        assert row["e2e_s"] == pytest.approx(1.0 + 2.0), "durations of both, no difference of clocks"
        assert row["ttft_s"] == pytest.approx(1.0 + 0.5)
        assert row["arrival_unix_ns"] == at(0)
        assert row["entry_e2e_s"] == pytest.approx(4.0)


def test_two_decodes_under_one_front_stay_apart(tmp_path: Path) -> None:
    assert len(rows_of(tmp_path, routed("llm_d.pd_proxy.request", [*LLMD, LLMD[1]]))) == 3
