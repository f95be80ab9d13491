"""A real vLLM with the plugin sends to a real `phasewise serve`: what its own spans lack is there, and agrees with its metrics.

PHASEWISE_VLLM_PYTHON=/path/to/env/bin/python pytest -m nightly tests/e2e/test_vllm_plugin.py -s
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from serving import Served, phasewise, serving
from vllm_server import BLOCKS, MODEL, STEP_TOKENS, Vllm, vllm, vllm_python
from wheels import build_wheel, install_wheel

from phasewise.collector.store import Store

pytestmark = [pytest.mark.nightly, pytest.mark.live]
SHARED = "The quick brown fox jumps over the lazy dog. " * 22
DETAILS = ("--enable-logging-iteration-details", "--disable-log-stats")
COUNTERS = ("num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_hits", "iteration_tokens")
REQUESTS = 12
EVERYTHING = (("from", 0), ("to", 4_102_444_800))
FILLED = ("model", "finish_reason", "preemptions", "cached_tokens")


@dataclass(frozen=True)
class Seen:
    """What one run left behind. details: vLLM ran with them; counters: of its own /metrics, at the end."""

    details: bool
    data: Path
    counters: dict[str, float]
    log: str

    def query(self, sql: str) -> pl.DataFrame:
        with Store(self.data / "phasewise.duckdb") as store:
            return store.query(sql)

    def one(self, sql: str) -> tuple[Any, ...]:
        return self.query(sql).row(0)

    @property
    def instance(self) -> str:
        return str(self.one("SELECT min(instance) FROM requests")[0])


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    folder = tmp_path_factory.mktemp("plugin")
    install_wheel(build_wheel(folder / "built"), folder / "installed")
    return folder / "installed"


@pytest.fixture(scope="module", params=[DETAILS, ()], ids=["details", "outputs only"])
def seen(request: pytest.FixtureRequest, plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("live")
    data = folder / "data"
    with serving(data) as served:
        with vllm(folder, plugin, f"http://127.0.0.1:{served.ready['otlp_grpc_port']}", *request.param) as engine:
            load(engine)
            counters = {name: total(engine, name) for name in COUNTERS}
        # vLLM has ended, in order: what waited in it was sent.
        assert served.verdict(REQUESTS, timeout_s=60)["requests"] == REQUESTS
        assert waits_until(lambda: filled(served)), served.get("/api/v1/requests", EVERYTHING)
    told = Seen(request.param is DETAILS, data, counters, (folder / "vllm.log").read_text())
    show(told)
    yield told


def load(engine: Vllm) -> None:
    engine.complete("Hello, how are you", 8, "plain")
    engine.complete(SHARED + "one", 8, "prefix-0")
    engine.complete(SHARED + "two", 8, "prefix-1")
    engine.give_up("Tell me a story", "gone")
    engine.all_at_once({f"long-{i}": (f"{i} word " * 60, 140) for i in range(7)})
    engine.complete("Twice:", 6, "twice", n=2, temperature=0.8)
    assert waits_until(engine.idle)


def total(engine: Vllm, name: str) -> float:
    return engine.metric(f"vllm:{name}_{'total_count' if name == 'iteration_tokens' else 'total'}")


def filled(served: Served) -> bool:
    """Supplements settle a moment after the rows that they fill."""
    rows = served.get("/api/v1/requests", EVERYTHING)["requests"]
    return all(row["finish_reason"] for row in rows)


def waits_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def show(seen: Seen) -> None:
    """The output of one run, with -s."""
    with pl.Config(tbl_cols=20, tbl_rows=20, tbl_width_chars=200, tbl_hide_dataframe_shape=True):
        print(seen.counters)
        print(seen.query(f"SELECT request_id, {', '.join(FILLED)}, input_tokens, output_tokens, e2e_s FROM requests ORDER BY arrival_unix_ns"))  # fmt: skip
        print(seen.query("SELECT count(*) AS steps, sum(prefill_tokens) AS prefill_tokens, sum(decode_sequences) AS decoded, max(waiting) AS waiting_max, max(kv_blocks_used) AS kv_max, sum(preemptions) AS preemptions, sum(duration_s) AS duration_s FROM engine_steps"))  # fmt: skip


def test_vllms_own_rows_are_filled_and_the_plugin_has_none_of_its_own(seen: Seen) -> None:
    rows = seen.query("SELECT * FROM requests")
    assert rows["engine"].unique().to_list() == ["vllm_v1"]
    assert (
        len(rows) == 12
    )  # 10 calls, one of which had two sequences, and the one given up, which vLLM tells of in no way: 11 + ...
    assert seen.query("SELECT * FROM supplements").is_empty()
    assert rows["instance"].n_unique() == 1
    for name in FILLED:
        assert rows[name].null_count() == 0, name
    assert rows["model"].unique().to_list() == [MODEL]
    assert not rows["request_id"].str.contains("gone").any()


def test_what_is_told_of_requests_is_what_vllm_counted(seen: Seen) -> None:
    told = seen.one("SELECT sum(preemptions), sum(cached_tokens), sum(input_tokens) FROM requests")
    assert told[0] == seen.counters["num_preemptions"] > 0
    assert told[1] == seen.counters["prefix_cache_hits"] > 0
    assert told[2] <= seen.counters["prompt_tokens"]  # which counts the one given up too
    assert seen.one("SELECT sum(cached_tokens) FROM requests WHERE request_id LIKE '%prefix-1%'")[0] > 150


def test_steps_agree_with_the_counters(seen: Seen) -> None:
    steps = seen.query("SELECT * FROM engine_steps ORDER BY step")
    assert steps["step"].to_list() == list(range(len(steps)))
    assert seen.one("SELECT count(DISTINCT instance), min(instance) FROM engine_steps") == (1, seen.instance)
    assert len(steps) >= seen.counters["iteration_tokens"]  # vLLM counts those with an output
    decoded, preempted, used, blocks, waited = seen.one(
        "SELECT sum(decode_sequences), sum(preemptions), max(kv_blocks_used), max(kv_blocks_total), max(waiting)"
        " FROM engine_steps"
    )
    firsts = REQUESTS + 1  # the first token of each comes from its prompt, that of the one given up too
    assert 0 <= decoded - (seen.counters["generation_tokens"] - firsts) <= 8  # and it ran on for a moment
    assert preempted == seen.counters["num_preemptions"]
    assert blocks == BLOCKS - 1 and BLOCKS - 3 < used <= blocks
    assert waited >= 3
    for absent in ("context_tokens", "schedule_s", "waiting_slot", "waiting_kv", "slots_reserved"):
        assert steps[absent].null_count() == len(steps)


def test_prompt_tokens_and_times_of_steps_are_exact_or_unknown(seen: Seen) -> None:
    prompts, most, unknown, untimed, busy_s, span_s, steps = seen.one(
        "SELECT sum(prefill_tokens), max(prefill_tokens), count(*) - count(prefill_tokens), count(*) - count(duration_s),"
        " sum(duration_s), (max(start_unix_ns) - min(start_unix_ns)) / 1e9, count(*) FROM engine_steps"
    )
    computed = seen.counters["prompt_tokens"] - seen.counters["prefix_cache_hits"]
    assert 0.2 * span_s < busy_s < 1.2 * span_s
    if seen.details:
        assert (unknown, untimed, most) == (0, 0, STEP_TOKENS)
        assert prompts > computed  # the rest was computed again after preemptions
    else:
        assert 0 < unknown < steps / 4 and 0 < untimed < 12
        assert 0 < prompts < computed


def test_steps_say_why_requests_waited_though_nobody_scrapes(seen: Seen) -> None:
    waited, for_blocks, peak = seen.one(
        "SELECT sum(queue_s), sum(cause_kv_wait_s), max(kv_usage_peak_ratio) FROM requests"
    )
    # A prompt waits for blocks of this small pool from 78 % of use on, which is not yet taken for full: not all is told, but much.
    assert for_blocks > waited / 5 > 0
    assert peak > 0.9
    settings = json.loads(seen.one("SELECT settings FROM instances WHERE kind = 'spans'")[0])
    told = {name: settings[name]["value"] for name in ("max_num_seqs", "max_num_batched_tokens", "block_size_tokens")}
    assert told == {"max_num_seqs": 8, "max_num_batched_tokens": STEP_TOKENS, "block_size_tokens": 32}


def test_nothing_was_lost_and_a_verdict_is_reached(seen: Seen) -> None:
    assert "Phasewise sends to http://127.0.0.1:" in seen.log
    assert "WARNING" not in "\n".join(line for line in seen.log.splitlines() if "Phasewise" in line)
    told = json.loads(phasewise("analyze", "--data", seen.data, "--from", "0", "--json").stdout)
    assert told["requests"] == REQUESTS
    assert told["status"]
