"""Replicas behind one address: spans and scrapes joined by what they counted, with known truth, or left apart."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from captures import scrapes
from shared_data import shared_path
from span_tables import at, span_table
from writing import bench, engine_span, rulebook

from phasewise.collector.exposition import read_exposition
from phasewise.collector.fingerprints import Counters, Ends, Fit, fit, together
from phasewise.collector.joins import joins_of
from phasewise.collector.lives import Life
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import Instance

SECOND = 10**9
Served = tuple[float, float]  # seconds at which it ended, seconds that it took
PROFILES = Profiles(rulebook().engines)


def balanced(replicas: int, each: int, seed: int, over_s: float = 400.0) -> list[list[Served]]:
    """Requests that a balancer hands out at random: as many to every replica, but for chance."""
    chance = random.Random(seed)
    found: list[list[Served]] = [[] for _ in range(replicas)]
    for _ in range(replicas * each):
        took = chance.lognormvariate(0.5, 0.6)
        chance.choice(found).append((chance.uniform(5, over_s), took))
    return [sorted(one) for one in found]


def counters(served: Sequence[Served], every_s: float, seed: int, over_s: float = 420.0) -> Counters:
    """What a scrape shows; up to 150 ms pass between the time noted and the time the counters are read."""
    chance = random.Random(seed)
    times = np.arange(0.0, over_s, every_s) + chance.uniform(0, every_s)
    ends = np.array([end for end, _ in served])
    took = np.concatenate(([0.0], np.cumsum([took for _, took in served])))
    read = np.searchsorted(ends, times + np.array([chance.uniform(0, 0.15) for _ in times]), side="right")
    return Counters((times * SECOND).astype(np.int64), read.astype(float), took[read])


def ends_of(served: Sequence[Served]) -> Ends:
    return Ends(
        (np.array([end for end, _ in served]) * SECOND).astype(np.int64), np.array([took for _, took in served])
    )


def joined(
    traffic: Sequence[Sequence[Served]],
    *,
    every_s: float = 5.0,
    scraped: Sequence[int] | None = None,
    spans: Callable[[int, Sequence[Served]], Sequence[Served]] = lambda _k, served: served,
) -> dict[int, int]:
    """Replica whose spans -> replica whose scrape they are joined to."""
    told = range(len(traffic)) if scraped is None else scraped
    seen = {f"s{k}": ends_of(spans(k, served)) for k, served in enumerate(traffic)}
    scrapes = {f"c{k}": counters(traffic[k], every_s, k) for k in told}
    instances = [
        Instance(instance=name, engine="vllm_v1", first_seen_unix_ns=0, last_seen_unix_ns=420 * SECOND) for name in seen
    ]
    lives = [Life(name, "vllm_v1", int(one.unix_ns[0]), int(one.unix_ns[-1])) for name, one in scrapes.items()]

    def deviation(names: tuple[str, ...], scrape: str, _from: int, _to: int) -> Fit | None:
        return fit(scrapes[scrape], together([seen[name] for name in names]))

    found = joins_of(instances, lives, lambda engine: engine, deviation)
    return {int(one.spans[1:]): int(one.scrape[1:]) for one in found}


@pytest.mark.parametrize("replicas", [2, 8])
@pytest.mark.parametrize("every_s", [1.0, 5.0, 15.0])
@pytest.mark.parametrize("each", [40, 400])
def test_replicas_under_balanced_load_are_told_apart(replicas: int, every_s: float, each: int) -> None:
    found = joined(balanced(replicas, each, seed=replicas), every_s=every_s)
    assert found == {k: k for k in range(replicas)}


@pytest.mark.parametrize("replicas", [2, 8])
def test_the_same_load_on_all_tells_nothing(replicas: int) -> None:
    assert joined(balanced(1, 200, seed=1) * replicas) == {}


@pytest.mark.parametrize("replicas", [2, 8])
def test_loads_that_differ_by_a_request_or_two_tell_nothing(replicas: int) -> None:
    (one,) = balanced(1, 100, seed=2)
    assert joined([one[: len(one) - k % 3] for k in range(replicas)]) == {}


def test_requests_in_lockstep_are_told_apart_by_the_seconds_they_took() -> None:
    chance = random.Random(5)
    traffic = [[(5.0 + 4 * k, chance.lognormvariate(0.5, 0.6)) for k in range(100)] for _ in range(8)]
    assert joined(traffic) == {k: k for k in range(8)}


@pytest.mark.parametrize("replicas", [2, 8])
def test_an_engine_that_nobody_scrapes_takes_no_other_s_scrape(replicas: int) -> None:
    found = joined(balanced(replicas, 60, seed=6), scraped=range(1, replicas))
    assert found == {k: k for k in range(1, replicas)}


def test_a_scrape_whose_spans_never_came_is_nobody_s() -> None:
    traffic = balanced(3, 60, seed=7)
    found = joined(traffic, spans=lambda k, served: served if k else [(end + 11.0, took) for end, took in served])
    assert found == {1: 1, 2: 2}


def test_a_handful_of_requests_is_no_evidence() -> None:
    assert joined(balanced(8, 4, seed=8)) == {}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kept_ratio", [0.1, 0.5, 0.9])
def test_whatever_part_of_the_spans_comes_no_join_is_wrong(seed: int, kept_ratio: float) -> None:
    def thinned(k: int, served: Sequence[Served]) -> list[Served]:
        chance = random.Random(seed * 100 + k)
        return [one for one in served if chance.random() < kept_ratio]

    traffic = balanced(8, 30 + 40 * (seed % 4), seed=seed)
    found = joined(traffic, spans=thinned, scraped=range(seed % 2, 8))
    assert all(spans == scrape for spans, scrape in found.items())
    assert kept_ratio < 0.9 or len(found) >= 6


# --- in the store ----------------------------------------------------------------------------------------------------


def scrape_text(served: Sequence[Served], now_s: float) -> str:
    took = [took for end, took in served if end <= now_s]
    return (
        f'vllm:request_success_total{{finished_reason="stop"}} {len(took)}\n'
        f"vllm:e2e_request_latency_seconds_count {len(took)}\nvllm:e2e_request_latency_seconds_sum {sum(took)!r}\n"
    )


@pytest.mark.parametrize(("replicas", "same"), [(2, False), (8, False), (2, True)], ids=["two", "eight", "equal load"])
def test_spans_of_one_service_and_scrapes_of_its_replicas(tmp_path: Path, replicas: int, same: bool) -> None:
    traffic = balanced(1, 40, seed=9, over_s=200) * replicas if same else balanced(replicas, 40, seed=9, over_s=200)
    spans: list[dict[str, Any]] = []
    for k, served in enumerate(traffic):
        resource = {"service.instance.id": f"uuid-{k}", "service.name": "llm"}
        spans += [
            engine_span(start_s=end - took, e2e_s=took, trace=f"{len(spans) + n + 1:032x}", resource=resource)
            for n, (end, took) in enumerate(served)
        ]
    samples = [
        read_exposition(scrape_text(served, now), at(now), PROFILES, instance=f"10.0.0.{k}:8000")
        for k, served in enumerate(traffic)
        for now in range(0, 220, 10)
    ]
    with bench(tmp_path) as b:
        b.writer.add_spans(span_table(spans))
        b.writer.add_samples([one for one in samples if one is not None])
        rows = b.rows("SELECT * FROM instances WHERE kind = 'spans' ORDER BY instance")
    found = {row["instance"]: (row["joined_to"], row["joined_by"]) for row in rows}
    if same:
        assert set(found.values()) == {(None, None)}
    else:
        assert found == {f"uuid-{k}": (f"10.0.0.{k}:8000", "counters") for k in range(replicas)}


@pytest.mark.parametrize("replicas", [2, 8])
def test_one_address_that_a_balancer_shares_out_is_as_many_engines(tmp_path: Path, replicas: int) -> None:
    """Every scrape is answered by whichever process comes next; each carries the start of its own."""
    traffic = balanced(replicas, 60, seed=10, over_s=400)
    spans: list[dict[str, Any]] = []
    for k, served in enumerate(traffic):
        resource = {"service.instance.id": f"uuid-{k}", "service.name": "llm"}
        spans += [
            engine_span(start_s=end - took, e2e_s=took, trace=f"{len(spans) + n + 1:032x}", resource=resource)
            for n, (end, took) in enumerate(served)
        ]
    base = at(0) / 1e9
    chance = random.Random(11)
    samples = []
    for second in range(0, 420, 2):
        k = chance.randrange(replicas)
        text = f'vllm:cache_config_info{{num_gpu_blocks="{100 + k}",block_size="16"}} 1\n'
        text += scrape_text(traffic[k], second) + f"process_start_time_seconds {base - 100 + k * 1.25!r}\n"
        samples.append(read_exposition(text, at(second), PROFILES, instance="vip:8000"))
    with bench(tmp_path) as b:
        b.writer.add_spans(span_table(spans))
        for low, high in ((0, 1), (1, 2), (2, 5), (5, 60), (60, len(samples))):  # as scrapes come
            b.writer.add_samples([one for one in samples[low:high] if one is not None])
        rows = b.rows("SELECT DISTINCT instance, joined_to FROM instances WHERE kind = 'scrape' ORDER BY ALL")
        falls = b.rows(
            "SELECT count(*) AS n FROM (SELECT finished < lag(finished) OVER (PARTITION BY instance ORDER BY unix_ns) AS f "
            "FROM engine_samples) WHERE f"
        )
        pools = b.rows("SELECT settings FROM instances WHERE kind = 'scrape'")
        b.reopen()
        late = read_exposition(
            scrape_text(traffic[0], 420) + f"process_start_time_seconds {base - 100!r}",
            at(421),
            PROFILES,
            instance="vip:8000",
        )
        b.writer.add_samples([late] if late is not None else [])
        assert {row["instance"].partition("#")[0] for row in b.rows("SELECT instance FROM engine_samples")} == {
            "vip:8000"
        }
        assert b.rows("SELECT count(*) AS n FROM engine_samples WHERE instance = 'vip:8000'") == [{"n": 0}]
    assert len({row["instance"] for row in rows}) == replicas
    assert all('"kv_blocks_total"' in (row["settings"] or "") for row in pools)
    assert falls == [{"n": 0}], "no counter falls: each is one engine's"
    truth = {f"{base - 100 + k * 1.25:.2f}".rstrip("0").rstrip("."): f"uuid-{k}" for k in range(replicas)}
    for row in rows:
        start = row["instance"].partition("#")[2].rstrip("0").rstrip(".")
        assert row["joined_to"] in (None, truth[start]), "left apart rather than wrong"
    if replicas == 2:
        assert None not in {row["joined_to"] for row in rows}


def test_a_restarted_engine_is_no_balancer(tmp_path: Path) -> None:
    base = at(0) / 1e9
    with bench(tmp_path) as b:
        for second in range(20):
            started = base - 50 if second < 10 else base + 9
            found = read_exposition(
                f"vllm:num_requests_running 1\nprocess_start_time_seconds {started!r}",
                at(second),
                PROFILES,
                instance="x",
            )
            assert found is not None
            b.writer.add_samples([found])
        assert {row["instance"] for row in b.rows("SELECT instance FROM engine_samples")} == {"x"}


@pytest.mark.parametrize("name", ["vllm-overload", "vllm-mixed", "vllm-kv-starvation", "vllm-light"])
def test_recorded_counters_follow_the_recorded_spans(name: str) -> None:
    """What a real engine counts between two scrapes is what its spans say, to a request or two, and to a second."""
    folder = shared_path("captures", name)
    lines = gzip.decompress((folder / "spans.jsonl.gz").read_bytes()).splitlines()
    spans = [span for line in lines if (span := json.loads(line))["name"] == "llm_request"]
    ended = sorted((int(one["end"]), float(one["attrs"]["gen_ai.latency.e2e"])) for one in spans)
    read = [one for at_ns, text in scrapes(folder) if (one := read_exposition(text, at_ns, PROFILES, instance="e"))]
    told = pl.concat([one.samples for one in read]).filter(pl.col("finished").is_not_null())
    counted = Counters(told["unix_ns"].to_numpy(), told["finished"].to_numpy(), told["e2e_sum_s"].to_numpy())
    found = fit(counted, Ends(np.array([end for end, _ in ended]), np.array([took for _, took in ended])))
    assert found is not None and found.seconds is not None
    assert found.requests.ratio < 0.04
    assert found.seconds.ratio < 0.04
