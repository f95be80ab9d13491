"""What is open at the end of a window: a step tells who runs during it, not after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import SECOND_NS, START_UNIX_NS, make_instance, make_request, make_sample, record_table, request_table

from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.records import EngineSample, EngineStep, Instance, Request
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "p.duckdb", threads=1) as opened:
        yield opened


def steps(name: str, from_s: float, count: int, **fields: Any) -> list[EngineStep]:
    """Steps of 0.5 s with two running and one waiting, unless told otherwise."""
    told = {"running": 2, "decode_sequences": 2, "waiting_slot": 1, "prefill_tokens": 0} | fields
    zero = {f"waiting_{reason}": 0 for reason in ("kv", "budget", "window", "policy")}
    return [
        EngineStep(
            instance=name, step=k, start_unix_ns=at(from_s + 0.5 * k), duration_s=0.5, kv_blocks_used=30,
            kv_blocks_total=100, preemptions=0, **(zero | told),
        )
        for k in range(count)
    ]  # fmt: skip


def at(seconds: float) -> int:
    return START_UNIX_NS + round(seconds * SECOND_NS)


def served(name: str, from_s: float, to_s: float, **fields: object) -> Request:
    """A request scheduled as it arrives."""
    return make_request(
        at_s=from_s, queue_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=to_s - from_s, instance=name, engine="phasewise",
        **fields,
    )  # fmt: skip


def judged(
    store: Store,
    rows: Sequence[Request],
    ran: Sequence[EngineStep],
    samples: Sequence[EngineSample] = (),
    instances: Sequence[Instance] = (),
    *,
    to_s: float,
    now_s: float | None = None,
    filters: Sequence[Filter] = (),
) -> dict[str, Any]:
    with store.write() as transaction:
        for table, kind, told in (
            ("engine_steps", EngineStep, ran),
            ("engine_samples", EngineSample, samples),
            ("instances", Instance, instances),
        ):
            if told:
                transaction.insert(table, record_table(kind, told))
        if rows:
            transaction.insert("requests", request_table(rows))
    window = Window(START_UNIX_NS, at(to_s))
    return window_verdict(store, RULES, window, filters=filters, now_unix_ns=at(to_s if now_s is None else now_s))


def test_requests_that_end_with_the_last_step_are_not_open(store: Store) -> None:
    """Ten steps to 5 s; two requests run in the last one and end with it, as does the one that waits."""
    rows = [served("e-0", 1, 5), served("e-0", 2, 5.001), make_request(at_s=3, queue_s=2.0, instance="e-0", decode_s=0)]
    verdict = judged(store, rows, steps("e-0", 0, 10), to_s=6)
    assert verdict["open"] == 0
    assert (verdict["in_flight"]["running"], verdict["in_flight"]["waiting"]) == (0.0, 0.0)
    assert not any("still open" in note for note in verdict["notes"])


def test_those_that_go_on_are(store: Store) -> None:
    verdict = judged(store, [served("e-0", 1, 5)], steps("e-0", 0, 10), to_s=6)
    assert (verdict["open"], verdict["in_flight"]["running"], verdict["in_flight"]["waiting"]) == (2, 1.0, 1.0)
    assert "2 requests still open: their spans come when they end" in verdict["notes"]


def test_one_is_told_in_the_singular(store: Store) -> None:
    verdict = judged(store, [served("e-0", 1, 5)], steps("e-0", 0, 10, waiting_slot=0), to_s=6)
    assert verdict["open"] == 1
    assert "1 request still open: its spans come when it ends" in verdict["notes"]


def test_they_were_open_at_the_end_of_an_earlier_window(store: Store) -> None:
    """The same run, looked at up to 4.2 s: both end later."""
    rows = [served("e-0", 0, 0.9), served("e-0", 1, 5), served("e-0", 2, 5)]
    assert judged(store, rows, steps("e-0", 0, 10, waiting_slot=0), to_s=4.2, now_s=60)["open"] == 2


def test_a_filter_on_requests_hides_no_end_from_the_engine(store: Store) -> None:
    rows = [served("e-0", 1, 5, tenant="a"), served("e-0", 2, 5, tenant="b"), served("e-0", 2, 4, tenant="a")]
    ran = steps("e-0", 0, 10, waiting_slot=0)
    assert judged(store, rows, ran, to_s=6, filters=[Filter("tenant", "eq", "a")])["open"] == 0


def test_aborted_requests_ended_too(store: Store) -> None:
    rows = [served("e-0", 1, 5), served("e-0", 1, 2), served("e-0", 2, 4.8, outcome="aborted")]
    verdict = judged(store, rows, steps("e-0", 0, 10, waiting_slot=0), to_s=6)
    assert (verdict["open"], verdict["aborted"]) == (0, 1)


def test_engines_that_made_no_step_for_long_run_nobody(store: Store) -> None:
    """Three of them that were cut off at 5 s, and one that still works at 40 s."""
    ran = [step for k in range(3) for step in steps(f"old-{k}", 0, 10)] + steps("e-0", 0, 80, waiting_slot=0)
    rows = [served(name, 1, 2) for name in ("old-0", "old-1", "old-2", "e-0")]
    verdict = judged(store, rows, ran, to_s=40)
    assert (verdict["open"], verdict["in_flight"]["running"], verdict["in_flight"]["waiting"]) == (2, 2.0, 0.0)


def test_an_engine_whose_requests_are_all_open_is_seen_by_its_steps(store: Store) -> None:
    verdict = judged(store, [], steps("e-0", 0, 20, waiting_slot=6), to_s=10)
    assert (verdict["requests"], verdict["open"]) == (0, 8)
    assert (verdict["status"], verdict["primary"]) == ("slow", "queueing")


def test_a_scrape_after_the_last_step_knows_better(store: Store) -> None:
    """The engine is scraped too: at 8 s three run, for whom the first step still has to come."""
    scraped = [make_sample(at_s=s, running=3.0 if s >= 8 else 2.0, waiting=0.0, engine="vllm_v1") for s in (2, 4, 8)]
    joined = [make_instance(joined_to="e-0"), make_instance(instance="e-0", kind="spans", joined_to=None)]
    verdict = judged(store, [served("e-0", 1, 5)], steps("e-0", 0, 10), scraped, joined, to_s=9)
    assert (verdict["open"], verdict["in_flight"]["running"]) == (3, 3.0)


def test_a_scrape_counts_nobody_who_ended_after_it(store: Store) -> None:
    """Not only steps grow old: the scrape at 4 s saw two that ended at 5 s."""
    scraped = [make_sample(at_s=s, running=2.0, waiting=0.0) for s in (2, 3, 4)]
    joined = [make_instance(joined_to="gpu-0"), make_instance(instance="gpu-0", kind="spans", joined_to=None)]
    rows = [served("gpu-0", 1, 5), served("gpu-0", 2, 5)]
    assert judged(store, rows, [], scraped, joined, to_s=6)["open"] == 0
