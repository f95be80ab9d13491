"""Whose prompts took the time that requests lost, by overlap; and that it adds up, by steps as well."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from analyzer_contexts import make_context
from builders import make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from interference import divided, overlapping, sight, with_answer
from step_contexts import RULES, Steps, stepped_context, stepped_request

from phasewise.analyzer.blame import divided_ns
from phasewise.analyzer.interference_ledger import ledger_of
from phasewise.analyzer.interference_sights import COLUMN, sight_of
from phasewise.collector.context import Context
from phasewise.collector.records import Request


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
