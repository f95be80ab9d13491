"""The interference ledger of a window and of a request: whose prompts took how much of whose time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from analyzer_contexts import make_context
from builders import SECOND_NS, START_UNIX_NS, make_request, record_table, request_table
from captures import bodies, scrapes
from interference import linear_steps, overlapping, with_answer
from shared_data import shared_path
from step_contexts import RULES, stepped_context, stepped_request, warm
from writing import bench

from phasewise.analyzer.attribution import attributor
from phasewise.analyzer.evidence import OTHERS
from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.interference_evidence import takers
from phasewise.analyzer.interference_ledger import window_ledger
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.request_interference import request_ledgers
from phasewise.analyzer.window import Window, parse_filter
from phasewise.collector.context import Context
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import EngineStep
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store

ALL = Window(0, START_UNIX_NS + 86_400 * SECOND_NS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "p.duckdb") as opened:
        yield opened


def fill(store: Store, context: Context, seed: int = 0) -> None:
    """The context's requests as stored, in an order of their own."""
    rows = [dict(row) for row in with_answer(context).requests.iter_rows(named=True)]
    random.Random(seed).shuffle(rows)
    made = [row | {"revision": 1, "final": True, "primary_class": "compute", "cause": "interference"} for row in rows]
    with store.write() as transaction:
        transaction.insert("requests", request_table(made))


def test_the_ledger_of_a_window_names_tenants_and_prompts(store: Store) -> None:
    rows, context = overlapping()
    fill(store, context)
    told: dict[str, Any] = window_ledger(store, RULES, ALL)
    lost = sum(one["took_s"] for one in told["pairs"]) + told["pairs_left_out"]["took_s"] + told["unnamed_s"]
    assert lost == pytest.approx(told["interference_s"], abs=1e-12) and told["read"] is None
    assert (told["requests"], told["victims"], told["provenance"]) == (8, 3, "inferred")
    first = told["pairs"][0]
    assert first["culprit"] == {"tenant": "rag", "route": None} and first["victim"] == {"tenant": "chat", "route": None}
    # 0.6 s * 6/7 of the decode, and 0.4 s * 3/4 of the smaller prompt's prefill.
    assert first["took_s"] == pytest.approx(0.6 * 6 / 7 + 0.3, abs=1e-8) and first["victims"] == 2
    assert told["culprits"][0]["request_key"] == rows[2].request_key
    assert told["culprits"][0]["took_s"] == pytest.approx(0.6 * 3 / 7 + 0.3, abs=1e-8)
    own: dict[str, Any] = window_ledger(store, RULES, ALL, [parse_filter("tenant:eq:rag")])
    assert (own["victims"], own["pairs"][0]["culprit"]["tenant"]) == (1, "chat")


def test_the_ledger_of_a_request_says_both_sides(store: Store) -> None:
    rows, context = overlapping()
    fill(store, context)
    ((lost),) = request_ledgers(store, RULES, rows[0].request_key)
    assert lost["interference_s"] == 0.6 and lost["unnamed_s"] == 0.0 and lost["provenance"] == "inferred"
    culprits: Any = lost["culprits"]
    assert {one["request_key"] for one in culprits} == {one.request_key for one in rows[1:4]}
    assert sum(one["took_s"] for one in culprits) == pytest.approx(0.6, abs=1e-12)
    assert lost["took"] == {"took_s": 0.0, "provenance": None, "victims_count": 0, "victims": [], "victims_left_out": {"requests": 0, "took_s": 0.0}}  # fmt: skip
    ((large),) = request_ledgers(store, RULES, rows[2].request_key)
    took: Any = large["took"]
    assert {one["request_key"] for one in took["victims"]} == {rows[0].request_key, rows[3].request_key}
    assert took["took_s"] == pytest.approx(0.6 * 3 / 7 + 0.3, abs=1e-8)
    assert request_ledgers(store, RULES, "nobody") == []


def test_an_empty_window_has_an_empty_ledger(store: Store) -> None:
    told: dict[str, Any] = window_ledger(store, RULES, ALL)
    assert (told["requests"], told["victims"], told["interference_s"], told["pairs"]) == (0, 0, 0.0, [])


def crowd(count: int = 400) -> Context:
    """Requests of two tenants on one replica, about ten at once, with figures that no two orders of a sum agree on."""
    chance = random.Random(3)
    rows = [
        make_request(
            at_s=chance.uniform(0, 60),
            queue_s=chance.uniform(0, 0.2),
            prefill_s=chance.expovariate(4.0),
            decode_s=chance.expovariate(0.7),
            input_tokens=chance.choice([None, 60, 700, 5000]),
            output_tokens=chance.choice([2, 20, 90]),
            tenant=chance.choice(["a", "b", None]),
            route=chance.choice(["/chat", "/rag"]),
        )
        for _ in range(count)
    ]
    return make_context(rows)


def test_the_order_of_rows_changes_no_bit_also_where_a_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, texts = crowd(), []
    for limit in (400, 160):
        monkeypatch.setattr("phasewise.analyzer.interference_reading.MOST_ROWS", limit)
        for seed in (0, 5):
            folder = tmp_path / f"{limit}-{seed}"
            folder.mkdir()
            with Store(folder / "p.duckdb", threads=1 + seed) as store:
                fill(store, context, seed)
                whole: dict[str, Any] = window_ledger(store, RULES, ALL)
                key = whole["culprits"][0]["request_key"]
                texts.append(json.dumps([whole, request_ledgers(store, RULES, key)]))
    assert texts[0] == texts[1] and texts[2] == texts[3]
    every, part = json.loads(texts[0])[0], json.loads(texts[2])[0]
    assert every["read"] is None and every["victims"] == part["victims"] > 300
    assert part["interference_s"] == every["interference_s"]
    assert 100 < part["read"]["victims"] <= 160 and part["read"]["interference_s"] < every["interference_s"]
    for told, lost in ((every, every["interference_s"]), (part, part["read"]["interference_s"])):
        assert told["measured_s"] == 0.0 and told["inferred_s"] + told["unnamed_s"] == pytest.approx(lost, abs=1e-8)
        assert told["unnamed_s"] < 0.05 * lost


def test_steps_of_a_store_name_the_culprits(store: Store) -> None:
    steps = linear_steps()
    begun = steps.ran(0.015, prefill=100)
    warm(steps, 30)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800, sequences=1, context=500)
    last = warm(steps, 20, sequences=2, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100, tenant="chat")
    long = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=800, tenant="rag")
    fill(store, stepped_context([held, long], steps.rows))
    with store.write() as transaction:
        transaction.insert("engine_steps", record_table(EngineStep, steps.rows))
    told: dict[str, Any] = window_ledger(store, RULES, ALL)
    assert told["provenance"] == "measured" and told["unnamed_s"] == 0.0 and told["victims"] == 1
    assert told["pairs"][0]["took_s"] == told["interference_s"] == pytest.approx(0.040, rel=0.02)
    ((lost),) = request_ledgers(store, RULES, held.request_key)
    assert [one["request_key"] for one in lost["culprits"]] == [long.request_key]  # type: ignore[attr-defined]


def test_the_mixed_recording_names_its_long_prompts(tmp_path: Path) -> None:
    """Short chats beside long prompts on one vLLM: its truth is interference."""
    folder = shared_path("captures", "vllm-mixed")
    with bench(tmp_path, attribute=attributor(RULES)) as b:
        b.writer.add_spans(pa.concat_tables([scan_traces(body, r["recv_unix_ns"]).rows for r, body in bodies(folder)]))
        lines = [json.dumps({"unix_ns": at, "text": page}) for at, page in scrapes(folder)]
        b.writer.add_import(import_bytes("\n".join(lines).encode(), "scrapes", Profiles(RULES.engines)))
        window = Window(0, b.clock.now)
        told: dict[str, Any] = window_ledger(b.store, RULES, window)
        verdict: dict[str, Any] = window_verdict(b.store, RULES, window, now_unix_ns=b.clock.now)
        rows = rows_in(window)
        median = b.store.query(f'SELECT median("input_tokens") AS m FROM requests WHERE {rows.sql}', rows.parameters)[
            "m"
        ][0]
    assert told["provenance"] == "inferred" and told["interference_s"] > 0
    assert told["unnamed_s"] <= 0.02 * told["interference_s"]
    lengths = [one["input_tokens"] for one in told["culprits"]]
    assert len(lengths) == 10 and all(tokens > 4 * median for tokens in lengths)
    assert verdict["cause"] == "interference"
    named = [one["name"] for one in verdict["evidence"] if one["name"].startswith(OTHERS)]
    assert named == [f"{OTHERS}; most by prompts of 1,830 tokens"]


def test_the_line_of_evidence_names_two_tenants_with_the_lengths_of_their_prompts() -> None:
    culprits = [
        {"tenant": "rag", "route": "/chat", "input_tokens": 6000},
        {"tenant": None, "route": None, "input_tokens": None},
        {"tenant": "rag", "route": "/chat", "input_tokens": 1200},
        {"tenant": "c", "route": None, "input_tokens": 50},
    ]
    assert takers({"culprits": culprits}) == "rag /chat (prompts of 1,200 to 6,000 tokens), prompts of unknown length"
    assert takers({"culprits": []}) == ""
