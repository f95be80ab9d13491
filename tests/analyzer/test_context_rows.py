"""The answer for some rows is that part of the answer for all, whoever asks and in whatever order the rows come."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from analyzer_contexts import make_context
from builders import make_request, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from step_contexts import Steps, stepped_context, stepped_request

from phasewise.analyzer.attribution import attribute_instance, attribute_instances
from phasewise.analyzer.context_rows import Stack
from phasewise.analyzer.intervals import Floats
from phasewise.analyzer.siblings import siblings_of
from phasewise.collector.context import Context
from phasewise.collector.records import Request
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
HOUR_S = 3600.0


def busy(count: int, seed: int) -> list[Request]:
    """Requests of three hours, some of one call, some with unknown phases, some stating why they waited, two with one end."""
    source = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        queue, prefill, decode = source.exponential((2.0, 0.5, 4.0)).tolist()
        row = make_request(
            at_s=float(number % 3) * HOUR_S + float(source.uniform(0, 20)),
            queue_s=queue, prefill_s=prefill, first_token_s=0.0, decode_s=decode, output_tokens=int(source.integers(1, 90)),
            input_tokens=int(source.integers(1, 4000)), call_key=f"call-{number // 4}" if number % 8 < 4 else f"{number}",
        )  # fmt: skip
        if number % 7 == 0:
            row = replace(row, combined_s=0.4, combined_covers="C,F", e2e_s=(row.e2e_s or 0.0) + 0.3)
        if number % 11 == 0:
            row = replace(row, prefill_s=None, scheduled_unix_ns=None)
        if number % 5 == 0:
            row = replace(row, queue_kv_s=queue / 2)
        rows.append(row)
    return [*rows[:-1], replace(rows[-1], finished_unix_ns=rows[0].finished_unix_ns)]


def waiting_samples() -> list[object]:
    return [
        make_sample(
            at_s=hour * HOUR_S + second, running=3.0 + second % 3, waiting=float(second % 4),
            kv_usage_ratio=(second % 10) / 10, preemptions=float(second // 9),
        )
        for hour in range(3) for second in range(0, 40, 2)
    ]  # fmt: skip


def stepped(count: int) -> Context:
    """Requests of an engine that sends steps: prompts in chunks beside decoding; every third one without its steps."""
    steps = Steps()
    for number in range(60 + count):
        steps.ran(0.01 + 0.001 * (number % 5), prefill=100 * (number % 3), sequences=2, context=1000, running=3)
    rows = []
    for number in range(count):
        begin = number % 40
        runs = [(1, begin, begin + number % 3), (2, begin + number % 3 + 1, begin + 12)]
        row = stepped_request(steps, runs, queued_s=max(0.0, steps.start_s(begin) - 0.02 * (number % 4)))
        row = replace(row, input_tokens=100 + number)
        rows.append(row if number % 3 else replace(row, segments=None))
    return stepped_context(rows, steps.rows)


def contexts() -> list[Context]:
    taken = waiting_samples()
    return [
        make_context(busy(40, 1)),
        make_context(busy(40, 2), taken),  # type: ignore[arg-type]
        make_context(busy(40, 3), taken, {"max_num_seqs": 4, "accelerator": "h100_sxm"}),  # type: ignore[arg-type]
        stepped(30),
    ]


@pytest.mark.parametrize("context", contexts(), ids=["spans", "scraped", "stated", "steps"])
def test_the_answer_for_some_is_part_of_the_answer_for_all(context: Context) -> None:
    whole = attribute_instance(context, RULES).sort("request_key")
    keys = whole["request_key"].to_list()
    for some in (keys[:1], keys[::3], keys[-5:], keys[:-1]):
        answer = attribute_instance(replace(context, targets=frozenset(some)), RULES).sort("request_key")
        assert answer.equals(whole.filter(pl.col("request_key").is_in(some)))


@pytest.mark.parametrize("context", contexts(), ids=["spans", "scraped", "stated", "steps"])
def test_the_order_of_the_rows_changes_no_bit(context: Context) -> None:
    whole = attribute_instance(context, RULES).sort("request_key")
    for seed in range(3):
        mixed = replace(context, requests=context.requests.sample(fraction=1.0, shuffle=True, seed=seed))
        assert attribute_instance(mixed, RULES).sort("request_key").equals(whole)


def test_what_is_said_of_a_context_is_the_same_beside_others() -> None:
    """Also of one that asks about few of its rows, and of two that see the same rows and ask about different ones."""
    first, *others = contexts()
    keys = first.requests["request_key"].to_list()
    halves = [replace(first, targets=frozenset(keys[::2])), replace(first, targets=frozenset(keys[1::2]))]
    nobody = replace(first, targets=frozenset(["nobody"]))
    empty = replace(first, requests=first.requests.clear(), targets=frozenset())
    asked = [*others, halves[0], nobody, empty, halves[1]]
    alone = [attribute_instance(context, RULES) for context in asked]
    together = attribute_instances(asked, RULES)
    assert together.equals(pl.concat([answer for answer in alone if not answer.is_empty()]))
    assert together["first_causes"].null_count() < len(together)  # steps are among them
    assert attribute_instances([nobody, empty], RULES).is_empty()


def test_targets_may_be_any_collection_of_keys() -> None:
    context = make_context(busy(12, 4))
    keys = context.requests["request_key"]
    whole = attribute_instance(context, RULES)
    assert attribute_instance(replace(context, targets=keys), RULES).equals(whole)
    assert attribute_instance(replace(context, targets=keys.reverse()), RULES).equals(whole)
    assert attribute_instance(replace(context, targets=keys.to_list()), RULES).equals(whole)


def test_a_target_that_is_no_row_is_not_answered() -> None:
    context = make_context(busy(3, 5))
    asked = frozenset([context.requests["request_key"][0], "nobody", "nowhere"])
    assert len(attribute_instance(replace(context, targets=asked), RULES)) == 1
    assert attribute_instance(replace(context, targets=frozenset(["nobody"])), RULES).is_empty()


def test_rows_are_in_order_of_their_ends_and_equal_ends_of_their_keys() -> None:
    frame = make_context(busy(30, 6)).requests
    (rows,) = Stack([frame.sort("request_key", descending=True)]).rows([frame["request_key"][::4]])
    ordered = frame.sort("finished_unix_ns", "request_key")
    assert rows.series("request_key").equals(ordered["request_key"])
    assert set(rows.series("request_key").gather(rows.places)) == set(frame["request_key"][::4])
    assert (np.diff(rows["finished_unix_ns"]) >= 0).all()
    for name in ("decode_s", "prefill_s", "scheduled_unix_ns"):
        assert np.array_equal(rows.own(name), rows.chosen(rows[name]), equal_nan=True)


spans = st.tuples(st.one_of(st.none(), st.integers(0, 20)), st.integers(0, 8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), spans, spans), min_size=1, max_size=12))
def test_siblings_cover_what_the_others_of_their_call_do(
    rows: list[tuple[int, tuple[int | None, int], tuple[int | None, int]]],
) -> None:
    def edges(told: list[tuple[int | None, int]]) -> tuple[Floats, Floats]:
        low = np.array([np.nan if begin is None else float(begin) for begin, _ in told])
        return low, low + np.array([float(length) for _, length in told])

    keys = [None if row[0] == 3 else f"call-{row[0]}" for row in rows]
    found = siblings_of(pl.Series(keys, dtype=pl.String))
    start, end = edges([prefill for _, prefill, _ in rows])
    low, high = edges([asked for _, _, asked in rows])
    covered = found.covered_s(start, end, low, high)
    middles = np.arange(0, 40) + 0.5  # all edges are whole
    for k, key in enumerate(keys):
        others = [j for j, other in enumerate(keys) if j != k and other == key and key is not None]
        inside = [t for t in middles if low[k] <= t < high[k] and any(start[j] <= t < end[j] for j in others)]
        assert covered[k] == pytest.approx(len(inside))
    counts = found.counts(len(rows))
    assert counts.tolist() == [1.0 if key is None else float(keys.count(key)) for key in keys]


def test_calls_of_every_size_are_found() -> None:
    sizes = (1, 2, 2, 5)
    keys = list(itertools.chain.from_iterable([f"call-{k}"] * size for k, size in enumerate(sizes)))
    assert sorted(group.shape for group in siblings_of(pl.Series(keys)).groups) == [(1, 5), (2, 2)]
