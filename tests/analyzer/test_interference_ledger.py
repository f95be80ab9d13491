"""The interference ledger: whose prompts took how much of whose time, by steps and by overlap, and that it adds up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from analyzer_contexts import make_context
from builders import SECOND_NS, START_UNIX_NS, make_request, record_table, request_table
from captures import bodies, scrapes
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import shared_path
from step_contexts import RULES, Steps, booked, recorded_context, stepped_context, stepped_request, warm
from writing import bench

from phasewise.analyzer.attribution import attribute_instance, attributor
from phasewise.analyzer.blame import Axis, closed, divided_ns
from phasewise.analyzer.evidence import OTHERS
from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.interference_evidence import takers
from phasewise.analyzer.interference_ledger import ledger_of, window_ledger
from phasewise.analyzer.interference_sights import COLUMN, Sight, sight_of
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.request_interference import request_ledgers
from phasewise.analyzer.window import Window, parse_filter
from phasewise.collector.context import Context
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import EngineStep, Request
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall
from phasewise.instrumented_engine.simulation import Setup, simulate

ALL = Window(0, START_UNIX_NS + 86_400 * SECOND_NS)


def with_answer(context: Context) -> Context:
    """The context's requests with what attribution books to interference, as they are stored."""
    told = attribute_instance(context, RULES).select("request_key", COLUMN)
    rows = context.requests.drop(COLUMN).join(told, on="request_key", how="left", maintain_order="left")
    return replace(context, requests=rows)


def sight(context: Context) -> Sight:
    found = sight_of(with_answer(context), RULES)
    assert found is not None
    return found


def divided(found: Sight, by: Sequence[Request]) -> dict[str, list[int]]:
    """Nanoseconds of each target by culprit (steps and overlap together), the last is unnamed."""
    keys = found.rows.series("request_key").to_list()
    column = np.array([[one.request_key for one in by].index(key) for key in keys], dtype=np.int64)
    ns = divided_ns(found.booked_ns, found.seconds(column, len(by)))
    target = np.arange(len(keys)) if found.rows.target is None else found.rows.target
    return {
        keys[row]: [*(ns[k, 0:-1:2] + ns[k, 1:-1:2]).tolist(), int(ns[k, -1])] for k, row in enumerate(target.tolist())
    }


# --- steps -----------------------------------------------------------------------------------------------------------


def linear_steps() -> Steps:
    """Steps of 10 ms and 50 us a prompt token, enough of them to be told."""
    steps = Steps()
    for tokens in (100, 200, 400, 600, 800, 1000, 1200) * 4:
        steps.ran(0.010 + tokens * 50e-6, prefill=tokens)
        steps.ran(0.010, sequences=1, context=500)
    return steps


def test_prompts_in_one_step_share_what_a_decode_lost_by_what_each_adds() -> None:
    """600 + 200 tokens make the step 40 ms longer for the sequence that decodes in it: 30 ms and 10 ms."""
    steps = linear_steps()
    begun = steps.ran(0.015, prefill=100)
    warm(steps, 30)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800, sequences=1, context=500)
    last = warm(steps, 20, sequences=3, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100, tenant="chat")
    long = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=600, tenant="rag")
    short = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=200, tenant="chat")
    context = stepped_context([held, long, short], steps.rows)
    lost = divided(sight(context), [held, long, short])[held.request_key]
    whole = round(booked(context, held)["interference"] * 1e9)
    assert whole == pytest.approx(40e6, rel=0.02)
    assert sum(lost) == whole and lost[0] == 0 and lost[3] == 0
    assert lost[1] / lost[2] == pytest.approx(3.0, rel=0.02)
    # In the step of its own prompt each waits for the other's tokens, and for no other's.
    shared = divided(sight(context), [held, long, short])
    assert shared[long.request_key] == [0, 0, sum(shared[long.request_key]), 0]
    assert sum(shared[long.request_key]) == pytest.approx(10e6, rel=0.05)
    assert shared[short.request_key] == [0, sum(shared[short.request_key]), 0, 0]
    assert sum(shared[short.request_key]) == pytest.approx(30e6, rel=0.05)
    ledger = ledger_of([sight(context)])
    assert ledger.inferred_ns == 0 and ledger.measured_ns == ledger.lost_ns
    assert ledger.pairs[("rag", None), ("chat", None)][2] == 2
    assert ledger.culprits[0]["request_key"] == long.request_key and ledger.culprits[0]["victims"] == 2
    assert ledger.culprits[0]["input_tokens"] == 600 and ledger.culprits[0]["provenance"] == "measured"


def test_prompt_tokens_of_nobody_in_sight_are_unnamed() -> None:
    """Of 800 tokens in the step the steps' requests have 200: three quarters of the loss are of a request that is still open."""
    steps = linear_steps()
    begun = steps.ran(0.015, prefill=100)
    warm(steps, 30)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800, sequences=1, context=500)
    last = warm(steps, 20, sequences=3, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100)
    short = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=200)
    lost = divided(sight(stepped_context([held, short], steps.rows)), [held, short])[held.request_key]
    assert lost[0] == 0 and lost[2] / sum(lost) == pytest.approx(0.75, rel=0.02)


def test_a_request_whose_steps_nobody_tells_is_found_by_its_prefill() -> None:
    steps = linear_steps()
    begun = steps.ran(0.015, prefill=100)
    warm(steps, 30)
    both = steps.ran(0.010 + 800 * 50e-6, prefill=800, sequences=1, context=500)
    last = warm(steps, 20, sequences=3, context=1500)
    held = stepped_request(steps, [(1, begun, begun), (2, begun + 1, last)], input_tokens=100)
    short = stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=200)
    mute = replace(stepped_request(steps, [(1, both, both), (2, both + 1, last)], input_tokens=600), segments=None)
    found = sight(stepped_context([held, short, mute], steps.rows))
    lost = divided(found, [held, short, mute])[held.request_key]
    assert lost[0] == 0 and lost[3] == 0
    assert lost[2] / lost[1] == pytest.approx(3.0, rel=0.02)
    told = {str(one["request_key"]): one["provenance"] for one in ledger_of([found]).culprits}
    # Of what the mute one itself lost in that step only the overlap tells.
    assert told[mute.request_key] == "inferred" and told[short.request_key] == "mixed"


def test_a_prompt_that_waits_for_its_turn_loses_it_to_the_prompts_that_ran_meanwhile() -> None:
    """Between its two chunks of 300 tokens lie two steps of 40 ms and 20 ms with others' prompts, and one without any prompt."""
    steps = linear_steps()
    first = steps.ran(0.025, prefill=300)
    one = steps.ran(0.040, prefill=600)
    bare = steps.ran(0.010, sequences=1, context=500)
    other = steps.ran(0.020, prefill=200)
    second = steps.ran(0.025, prefill=300)
    last = warm(steps, 20, sequences=3, context=1500)
    waits = stepped_request(steps, [(1, first, first), (1, second, second), (2, second + 1, last)], input_tokens=600)
    large = stepped_request(steps, [(1, one, one), (2, bare, bare), (2, second + 1, last)], input_tokens=600)
    small = stepped_request(steps, [(1, other, other), (2, second + 1, last)], input_tokens=200)
    rows = [waits, large, small]
    context = stepped_context(rows, steps.rows)
    lost = divided(sight(context), rows)[waits.request_key]
    assert lost == pytest.approx([0, 40e6, 20e6, 0], abs=2)
    assert sum(lost) == round(booked(context, waits)["interference"] * 1e9)


def arrivals(count: int, rate_per_s: float) -> list[RequestSpec]:
    """Prompts and answers of all lengths; each third request calls a tool."""
    chance = random.Random(7)
    at_s, found = 0.0, []
    for number in range(count):
        at_s += chance.expovariate(rate_per_s)
        output = chance.randrange(2, 120)
        tools = (ToolCall(chance.randrange(output), chance.randrange(1, 400) * 10**6),) if number % 3 == 0 else ()
        found.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_ns=round(at_s * 1e9),
                prompt_tokens=chance.randrange(1, 3000),
                max_output_tokens=output,
                tools=tools,
            )
        )
    return found


@pytest.mark.parametrize(
    ("config", "rate_per_s"),
    [
        (EngineConfig(max_num_seqs=16, step_token_budget=512, kv_blocks=700), 8.0),
        (EngineConfig(max_num_seqs=8, step_token_budget=2048, max_prefill_tokens=128), 20.0),
    ],
)
def test_of_a_run_every_lost_second_is_found_again_in_its_steps(
    config: EngineConfig, rate_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue, prefill and decode one by one: what steps took is what attribution books, or more where it had to cut a phase."""
    at = Deployment(gpu=RULES.gpus["h100-sxm"], model=RULES.models["llama-3.1-8b"])
    recording = simulate(Setup(config, at), arrivals(120, rate_per_s), seed=7)
    rows, _, context = recorded_context(recording, "llama-3.1-8b", {"accelerator": "h100-sxm", "model": "llama-3.1-8b"})
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def noted(axis: Axis, asked: np.ndarray, whole: np.ndarray) -> Axis:
        place = axis.losses.part * asked.shape[1] + axis.losses.victim
        seen.append((np.bincount(place, weights=axis.lost_s(), minlength=asked.size), asked.reshape(-1)))
        return closed(axis, asked, whole)

    monkeypatch.setattr("phasewise.analyzer.interference_sights.closed", noted)
    found = sight(context)
    ((raw, asked),) = seen
    assert (raw >= asked - 1e-7).all() and raw.sum() <= 1.02 * asked.sum()
    assert np.isclose(raw, asked, atol=1e-7).mean() > 0.95
    each = divided(found, rows)
    assert sum(lost[-1] for lost in each.values()) == 0  # all of its requests are in sight
    assert sum(map(sum, each.values())) > 10**9
    ledger = ledger_of([found])
    assert ledger.inferred_ns == 0 and ledger.measured_ns == ledger.lost_ns


# --- spans -----------------------------------------------------------------------------------------------------------


def overlapping() -> tuple[list[Request], Context]:
    """Four clean decodes of 10 ms a token; one is 0.6 s longer, while a prompt of 300 tokens (0.3 s) and two of 600 and 200 tokens
    at once (0.4 s) are prefilled beside it."""
    clean = [
        make_request(at_s=at_s, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.0, output_tokens=101)
        for at_s in (0.0, 2.0, 4.0, 6.0)
    ]
    held = make_request(
        at_s=10.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.6, output_tokens=101, tenant="chat"
    )
    shape: dict[str, Any] = {"queue_s": 0.0, "first_token_s": 0.0, "decode_s": 0.01, "output_tokens": 2}
    alone = make_request(at_s=10.2, prefill_s=0.3, input_tokens=300, tenant="rag", **shape)
    one = make_request(at_s=10.8, prefill_s=0.4, input_tokens=600, tenant="rag", **shape)
    other = make_request(at_s=10.8, prefill_s=0.4, input_tokens=200, tenant="chat", **shape)
    rows = [held, alone, one, other, *clean]
    return rows, make_context(rows)


def test_a_decode_is_divided_by_overlap_and_tokens_a_second() -> None:
    """0.6 s over an overlap of 0.7 s: of 0.3 s all are the first's, of 0.4 s three quarters and one quarter."""
    rows, context = overlapping()
    found = sight(context)
    lost = divided(found, rows)[rows[0].request_key]
    assert sum(lost) == 600_000_000
    assert lost[0] == 0 and lost[4:] == [0] * 5
    assert lost[1:4] == pytest.approx([0.6e9 * 0.3 / 0.7, 0.6e9 * 0.3 / 0.7, 0.6e9 * 0.1 / 0.7], abs=2)
    ledger = ledger_of([found])
    assert ledger.measured_ns == 0 and ledger.inferred_ns == ledger.lost_ns
    assert ledger.pairs[("rag", None), ("chat", None)][2] == 2  # the decode, and the prompt beside the larger one


def test_what_nothing_overlaps_is_unnamed() -> None:
    rows, context = overlapping()
    # Booked while a prompt was in sight that is not any more.
    stored = with_answer(context)
    left = replace(
        stored,
        requests=stored.requests.filter(~pl.col("request_key").is_in([one.request_key for one in rows[2:4]])),
        targets=frozenset({rows[0].request_key}),
    )
    found = sight_of(left, RULES)
    assert found is not None
    by = [rows[0], rows[1], *rows[4:]]
    lost = divided(found, by)[rows[0].request_key]
    assert lost[1] == 300_000_000 and lost[-1] == 300_000_000 and sum(lost) == 600_000_000


def test_sequences_of_one_call_take_nothing_of_each_other() -> None:
    rows, _ = overlapping()
    call = "c" * 32
    rows[0], rows[1] = replace(rows[0], call_key=call), replace(rows[1], call_key=call)
    lost = divided(sight(make_context(rows)), rows)[rows[0].request_key]
    assert lost[0] == 0 and lost[1] == 0
    assert lost[2] == pytest.approx(300e6, abs=2) and lost[3] == pytest.approx(100e6, abs=2)  # all that others cover


# --- sums ------------------------------------------------------------------------------------------------------------


@st.composite
def span_rows(draw: st.DrawFn) -> list[Request]:
    count = draw(st.integers(2, 12))
    calls = draw(st.lists(st.sampled_from([None, "a" * 32, "b" * 32]), min_size=count, max_size=count))
    rows = []
    for number in range(count):
        tokens = draw(st.integers(1, 4))
        rows.append(
            make_request(
                at_s=draw(st.integers(0, 30)) / 10,
                queue_s=draw(st.integers(0, 5)) / 10,
                prefill_s=draw(st.integers(0, 10)) / 10,
                first_token_s=draw(st.integers(0, 2)) / 10,
                decode_s=draw(st.integers(0, 30)) / 10,
                input_tokens=draw(st.sampled_from([None, 0, 100, 5000])),
                output_tokens=tokens,
                call_key=calls[number],
                tenant=draw(st.sampled_from([None, "a", "b"])),
            )
        )
    return rows


@settings(max_examples=25, deadline=None)
@given(span_rows(), st.integers(0, 2**31))
def test_culprits_and_unnamed_add_up_and_no_request_takes_its_own_time(rows: list[Request], seed: int) -> None:
    chance = random.Random(seed)
    context = with_answer(make_context(rows))
    # Also of figures that this sight would not book: rows beside it may be gone since.
    some = pl.Series(COLUMN, [chance.choice([None, 0.0, chance.random()]) for _ in rows])
    given_ = replace(context, requests=context.requests.with_columns(some)) if chance.random() < 0.5 else context
    check(given_, rows)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=30, max_size=60),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), st.integers(1, 20)), min_size=2, max_size=8),
    st.integers(0, 2**31),
)
def test_culprits_of_steps_add_up(made: list[tuple[int, int]], runs: list[tuple[int, int, int]], seed: int) -> None:
    chance = random.Random(seed)
    steps = Steps()
    for prefill, sequences in made:
        seconds = 0.005 + prefill * 20e-6 + sequences * 1e-4 + chance.random() * 1e-4
        steps.ran(seconds, prefill=prefill, sequences=sequences, context=sequences * 100)
    rows = []
    for at, chunks, decode in runs:
        begin = min(at, len(made) - 3)
        last = min(begin + chunks - 1, len(made) - 2)
        rows.append(
            stepped_request(
                steps,
                [(1, begin, last), (2, last + 1, min(last + decode, len(made) - 1))],
                input_tokens=chance.choice([50, 200, 900]),
                tenant=chance.choice([None, "a", "b"]),
            )
        )
    check(with_answer(stepped_context(rows, steps.rows)), rows)


def check(context: Context, rows: list[Request]) -> None:
    found = sight_of(context, RULES)
    stored = dict(context.requests.select("request_key", COLUMN).iter_rows())
    if found is None:
        assert not any(value and value > 5e-10 for value in stored.values())
        return
    each = divided(found, rows)
    for place, one in enumerate(rows):
        lost = each[one.request_key]
        assert sum(lost) == round((stored[one.request_key] or 0.0) * 1e9)
        assert min(lost) >= 0 and lost[place] == 0
    taken = dict(zip(found.rows.series("request_key"), found.taken_ns().tolist(), strict=True))
    for place, one in enumerate(rows):  # what the culprits' side adds up to is what the victims' side does
        assert taken[one.request_key] == pytest.approx(
            sum(lost[place] for lost in each.values()), abs=2 * len(rows) + 2
        )
    for target, row in enumerate(range(len(rows)) if found.rows.target is None else found.rows.target.tolist()):
        key = found.rows.series("request_key")[row]
        singly = sum(float(seconds.sum()) for _, seconds, _ in found.takers(target))
        assert round(singly * 1e9) == pytest.approx(sum(each[key][:-1]), abs=len(rows))
    ledger = ledger_of([found])
    assert sum(took for took, _, _ in ledger.pairs.values()) == ledger.measured_ns + ledger.inferred_ns
    assert ledger.lost_ns == sum(sum(lost) for lost in each.values())


def test_columns_that_hold_too_much_are_cut_and_rounding_loses_nothing() -> None:
    ns = divided_ns(np.array([10, 10, 3]), np.array([[1e-8, 1e-8], [2e-9, 0.0], [1e-9, 2e-9]]))
    assert ns.tolist() == [[5, 5, 0], [2, 0, 8], [1, 2, 0]]


# --- stores ----------------------------------------------------------------------------------------------------------


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
