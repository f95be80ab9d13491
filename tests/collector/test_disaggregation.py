"""A request that one engine prefills and another decodes is one request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from span_tables import at, span_table
from writing import Bench, bench, engine_span

PREFILL = {"service.instance.id": "p-0", "service.name": "prefill", "host.name": "p"}
DECODE = {"service.instance.id": "d-0", "service.name": "decode", "host.name": "d"}


def sglang(role: str, number: int, room: str, start_s: float = 0.0, trace: int | None = None) -> list[dict[str, Any]]:
    """One half of a request: waits 1 s and is prefilled 0.5 s on one side, decodes 2 s on the other."""
    trace_id = f"{number * 10 + (role == 'decode') if trace is None else trace:032x}"
    resource = PREFILL if role == "prefill" else DECODE
    end_s = start_s + (1.75 if role == "prefill" else 4.0)
    root = f"{number:08x}{'aa' if role == 'prefill' else 'bb'}000000"
    attributes = {
        "module": "sglang::request",
        "bootstrap_room": room,
        "gen_ai.usage.prompt_tokens": 40,
        "gen_ai.latency.e2e": end_s - start_s,
    }
    if role == "decode":
        attributes |= {"gen_ai.usage.completion_tokens": 9, "gen_ai.latency.time_to_first_token": 2.0}
    slices = {
        "prefill": [("prefill_bootstrap", 0.0, 0.25), ("prefill_waiting", 0.25, 1.25), ("prefill_forward", 1.25, 1.75)],
        "decode": [("decode_bootstrap", 0.0, 1.5), ("decode_waiting", 1.75, 2.0), ("decode_forward", 2.0, 4.0)],
    }[role]
    common = {"scope": "sglang server", "kind": 1, "trace": trace_id, "resource": resource}
    return [
        {"name": f"{role} Req {number:08x}", "span_id": root, "start_s": start_s, "end_s": end_s, "attributes": attributes, **common},
        *(
            {"name": name, "parent": root, "start_s": start_s + low, "end_s": start_s + high, "span_id": f"{root[:12]}{k + 1:04x}", **common}
            for k, (name, low, high) in enumerate(slices)
        ),
    ]  # fmt: skip


ROW = {
    "queue_s": 1.0,
    "prefill_s": 0.5,
    "context_s": 0.25,
    "decode_s": 2.25,
    "e2e_s": 4.0,
    "output_tokens": 9,
    "instance": "d-0",
}


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


KNOWN = {
    "queue_s": 1.0,
    "prefill_s": 0.5,
    "context_s": 0.25,
    "instance": "p-0",
    "input_tokens": 40,
    "quality": '["decode_missing"]',
}
UNKNOWN = ("e2e_s", "ttft_s", "tpot_s", "decode_s", "output_tokens", "residual_s", "outcome")


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


def routed(front: str, markers: Sequence[tuple[str, dict[str, str]]], traces: int = 1) -> list[dict[str, Any]]:
    """A router that asks one vLLM to prefill, and when that is done another to decode."""
    spans = []
    for n in range(1, traces + 1):
        more = {"trace": f"{n:032x}", "kind": 1}
        top = f"{n:08x}00000001"
        spans.append(
            {
                "name": front,
                "span_id": top,
                "start_s": 0,
                "end_s": 4,
                "attributes": {"model": "m", "output_tokens": 5},
                **more,
            }
        )
        for k, (name, attributes) in enumerate(markers):
            start, length, resource = (0.0, 1.0, PREFILL) if k == 0 else (1.5, 2.0, DECODE)
            marker = f"{n:08x}1000000{k}"
            spans.append(
                {
                    "name": name,
                    "parent": top,
                    "span_id": marker,
                    "start_s": start,
                    "end_s": start + length,
                    "attributes": attributes,
                    **more,
                }
            )
            spans.append(
                {
                    **engine_span(
                        start_s=start,
                        e2e_s=length,
                        parent=marker,
                        resource=resource,
                        attributes={"gen_ai.usage.completion_tokens": 1 if k == 0 else 5},
                    ),
                    "span_id": f"{n:08x}2000000{k}",
                    **more,
                    "kind": 2,
                }
            )
    return spans  # fmt: skip


LLMD: list[tuple[str, dict[str, str]]] = [("llm_d.pd_proxy.prefill", {}), ("llm_d.pd_proxy.decode", {})]
DYNAMO = [
    ("engine.generate", {"disagg_role": "prefill", "model": "m"}),
    ("engine.generate", {"disagg_role": "decode", "model": "m"}),
]


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
