"""One row a request, whenever its halves come, what comes late of either, and whatever was given up in between."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from halves import KNOWN, LLMD, ROW, UNKNOWN, routed, sglang
from writing import Bench, Instant, bench, give_time

from phasewise.collector.requests import REQUEST_SCHEMA

SLOW = pytest.mark.slow
AN_HOUR_S = 3700.0  # after it a half is given up
HOURLY = "SELECT sum(requests)::BIGINT AS n FROM rollups WHERE width_s = 3600"


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    give_time(monkeypatch, Instant())


def note(role: str) -> list[dict[str, Any]]:
    """One more span below a half, of nothing that a phase is read from."""
    half = sglang(role, 1, "0xabc")[0]
    own = {"span_id": half["span_id"].replace("000000", "00000f"), "parent": half["span_id"], "trace": half["trace"]}
    return [
        {"name": "note", "scope": "app", "kind": 1, "start_s": 0.5, "end_s": 0.75, "resource": half["resource"], **own}
    ]


SENT = {
    "prefill": sglang("prefill", 1, "0xabc"),
    "decode": sglang("decode", 1, "0xabc"),
    "note of prefill": note("prefill"),
    "note of decode": note("decode"),
}
ORDERS = [
    order
    for order in itertools.permutations(SENT)
    if order.index("prefill") < order.index("note of prefill") and order.index("decode") < order.index("note of decode")
]


def feed(b: Bench, spans: Sequence[dict[str, Any]], gap_s: float, restart: bool = False) -> None:
    b.receive(spans, spans[0]["trace"])
    b.clock.forward(1.5)
    b.writer.step()
    if restart:
        b.reopen()
    b.clock.forward(gap_s)
    b.writer.step()
    for _ in range(2):
        b.clock.forward(10)
        b.writer.step()


def says(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("order", "gap_s", "restart"),
    [
        pytest.param(order, gap_s, restart, marks=[] if gap_s == AN_HOUR_S and restart and place == 2 else SLOW)
        for place, order in enumerate(ORDERS)
        for gap_s in (30.0, AN_HOUR_S)
        for restart in (False, True)
    ],
)
def test_two_halves_and_what_comes_late_of_them_are_one_row_at_any_time(
    tmp_path: Path, order: Sequence[str], gap_s: float, restart: bool
) -> None:
    with bench(tmp_path) as b:
        for place, name in enumerate(order):
            feed(b, SENT[name], gap_s, restart)
            seen = set(order[: place + 1])
            if "decode" not in seen and gap_s < AN_HOUR_S:
                assert b.rows() == []
                continue
            (row,) = b.rows()
            if "decode" not in seen:
                says(row, KNOWN | dict.fromkeys(UNKNOWN))
            elif "prefill" not in seen:
                says(row, {"instance": "d-0", "e2e_s": 4.0, "quality": None})
            else:
                says(row, ROW | {"quality": '["disaggregated"]'})
                assert row["residual_s"] == pytest.approx(0.0)
            lone = int("decode" not in seen)
            assert (b.counter("requests"), b.counter("prefill_without_decode")) == (1, lone)
        assert b.rows("SELECT * FROM supplements") == []
        b.run(130)
        assert b.rows(HOURLY) == [{"n": 1}]


def test_what_a_given_up_half_says_late_changes_its_row(tmp_path: Path) -> None:
    half = sglang("prefill", 1, "0xabc")
    with bench(tmp_path) as b:
        feed(b, half[:-1], AN_HOUR_S)
        (before,) = b.rows()
        assert (before["prefill_s"], before["quality"]) == (None, '["decode_missing"]')
        feed(b, half[-1:], AN_HOUR_S)
        (row,) = b.rows()
        says(row, KNOWN | dict.fromkeys(UNKNOWN))
        feed(b, sglang("decode", 1, "0xabc"), AN_HOUR_S)
        (row,) = b.rows()
        says(row, ROW)


def test_what_a_decode_half_says_late_changes_its_row_and_leaves_what_the_other_half_told(tmp_path: Path) -> None:
    half = sglang("decode", 1, "0xabc")
    with bench(tmp_path) as b:
        feed(b, half[:-1], 30)  # without its decode_forward
        feed(b, sglang("prefill", 1, "0xabc"), 30)
        (before,) = b.rows()
        assert before["decode_s"] != ROW["decode_s"]
        feed(b, half[-1:], 30)
        (row,) = b.rows()
        says(row, ROW | {"quality": '["disaggregated"]'})
        assert row["residual_s"] == pytest.approx(0.0)


def test_a_given_up_half_pairs_with_no_other_half_of_its_room(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        feed(b, sglang("prefill", 1, "0xabc"), AN_HOUR_S)
        feed(b, sglang("prefill", 2, "0xabc"), AN_HOUR_S)
        rows = b.rows()
        assert len(rows) == 2
        for row in rows:
            says(row, KNOWN | dict.fromkeys(UNKNOWN))
        assert (b.counter("requests"), b.counter("prefill_without_decode")) == (2, 2)


def test_a_half_that_waits_although_it_has_a_row_makes_no_second_one(tmp_path: Path) -> None:
    """As an older release left it."""
    with bench(tmp_path) as b:
        feed(b, sglang("prefill", 1, "0xabc"), AN_HOUR_S)
        before = b.rows()
        with b.store.write() as transaction:
            transaction.execute(f"INSERT INTO supplements BY NAME SELECT {', '.join(REQUEST_SCHEMA)} FROM requests")
        b.run(10)
        assert b.rows() == before
        assert b.rows("SELECT * FROM supplements") == []
        assert b.counter("prefill_without_decode") == 1


def some_orders(count: int) -> list[tuple[int, ...]]:
    orders = list(itertools.permutations(range(5)))
    return random.Random(3).sample(orders, count)


@pytest.mark.parametrize("order", [pytest.param(o, marks=SLOW if i else []) for i, o in enumerate(some_orders(10))])
def test_the_spans_of_a_routed_request_are_one_row_in_any_order(tmp_path: Path, order: Sequence[int]) -> None:
    """The router's spans, which say that two requests are halves of one, may be the last, or come between them."""
    spans = routed("llm_d.pd_proxy.request", LLMD)
    with bench(tmp_path) as b:
        for place in order:
            feed(b, spans[place : place + 1], 30)
        b.run(130)
        (row,) = b.rows()
        says(row, {"queue_s": 0.25, "prefill_s": 0.25, "decode_s": 1.5, "e2e_s": 3.0, "entry_e2e_s": 4.0})
        assert (row["instance"], row["final"]) == ("d-0", True)
        assert b.counter("requests") == 1
        assert b.rows(HOURLY) == [{"n": 1}]
