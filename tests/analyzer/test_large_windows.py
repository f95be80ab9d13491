"""Verdicts of windows with more requests than are read: what stays exact, how far off the rest may be, and that it says so."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from builders import START_UNIX_NS, attributed, make_instance, record_table
from captures import bodies
from captures import scrapes as folder_scrapes
from large_windows import NOW_UNIX_NS, SECOND_NS, WINDOW, differences, exact, fill, rows
from sampled_traffic import head, kept, population, scrapes, tail
from shared_data import shared_path
from writing import bench

from phasewise.analyzer.draw import drawn_of
from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.statistics import floats
from phasewise.analyzer.window import Filter, Window, parse_slo
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import EngineSample, Instance, Request
from phasewise.collector.scan import scan_traces
from phasewise.collector.schemas import polars_schema
from phasewise.collector.sealing import Sealer, due_hours
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
LIMIT = "phasewise.analyzer.draw.MOST_ROWS"
MADE = rows(3000)
SLOS = ["", "ttft:1s", "itl:12ms", "tpot:30ms,ttft:20s", "e2e:4s", "client.ttft:600ms", "queue:300ms", "e2e:1000s"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("large") / "p.duckdb") as opened:
        fill(opened, MADE)
        yield opened


def verdict(store: Store, slo: str = "", window: Window = WINDOW, filters: tuple[Filter, ...] = ()) -> dict[str, Any]:
    chosen = parse_slo(slo) if slo else ()
    return window_verdict(store, RULES, window, slo=chosen, filters=filters, now_unix_ns=NOW_UNIX_NS)


def text(found: dict[str, Any]) -> str:
    return json.dumps(found, sort_keys=True)


def test_up_to_the_limit_every_request_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verdict(store)
    assert whole["provenance"]["drawn"] is None
    asked = rows_in(WINDOW, served=False)
    count = store.query(f"SELECT count(*) AS n FROM requests WHERE {asked.sql}", asked.parameters)["n"].item()
    monkeypatch.setattr(LIMIT, count)
    assert text(verdict(store)) == text(whole)
    monkeypatch.setattr(LIMIT, count - 100)
    assert verdict(store)["provenance"]["drawn"]["of"] == whole["requests"]


@pytest.mark.parametrize("slo", SLOS)
def test_counts_sums_and_the_slowest_are_those_of_all(store: Store, monkeypatch: pytest.MonkeyPatch, slo: str) -> None:
    whole = verdict(store, slo)
    monkeypatch.setattr(LIMIT, 500)
    drawn = verdict(store, slo)
    assert drawn["provenance"]["drawn"]["of"] == whole["requests"] > 1500
    assert list(differences(exact(drawn), exact(whole))) == []
    assert drawn["missing"] == whole["missing"] or slo == ""


def test_a_filter_draws_from_its_own_requests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (Filter("instance", "in", "gpu-1,gpu-3"),)
    whole = verdict(store, "ttft:1s", filters=chosen)
    monkeypatch.setattr(LIMIT, 400)
    drawn = verdict(store, "ttft:1s", filters=chosen)
    assert drawn["provenance"]["drawn"]["of"] == whole["requests"] < 1500
    assert list(differences(exact(drawn), exact(whole))) == []


def test_percentiles_are_those_of_an_even_draw(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lies within four standard deviations of the rank that it stands for."""
    asked = rows_in(WINDOW)
    values = store.query(f"SELECT * FROM requests WHERE {asked.sql}", asked.parameters)
    monkeypatch.setattr(LIMIT, 500)
    found = verdict(store)["statistics"]["engine"]
    for name in ("ttft", "queue", "prefill", "decode", "e2e", "tpot"):
        known = floats(values, f"{name}_s")
        n = found[name]["n"]
        assert 400 < n < 600
        for p in (0.5, 0.95, 0.99):
            spread = 4 * math.sqrt(p * (1 - p) / n)
            low, high = np.nanquantile(known, [max(p - spread, 0.0), min(p + spread, 1.0)])
            assert low - 1e-6 <= found[name][f"p{round(p * 100)}_s"] <= high + 1e-6, (name, p)


def test_the_figures_of_a_drawn_verdict_say_that_they_are(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verdict(store)
    monkeypatch.setattr(LIMIT, 500)
    found = verdict(store)
    told = found["provenance"]["drawn"]
    assert told["by"] == "request_key" and told["of"] == whole["requests"]
    assert told["read"] == found["statistics"]["engine"]["queue"]["n"]
    assert f"{told['read']:,} of {told['of']:,} requests" in " ".join(found["notes"])
    assert whole["baseline"]["requests"] == found["baseline"]["requests"] == told["baseline"]["of"]
    assert 350 < told["baseline"]["read"] < told["baseline"]["of"]
    assert found["confidence"] == whole["confidence"]


def test_the_same_requests_are_drawn_in_whatever_order_and_tier(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, 500)
    judged = text(verdict(store, "ttft:1s"))
    mixed = list(MADE)
    random.Random(1).shuffle(mixed)
    with Store(tmp_path / "p.duckdb") as other:
        fill(other, mixed)
        assert text(verdict(other, "ttft:1s")) == judged
        late = NOW_UNIX_NS + 30 * 3600 * SECOND_NS  # some requests never become final
        (due,) = due_hours(other, late)
        assert Sealer(other, lambda: late).seal(due)
        assert not other.query("SELECT * FROM cold_files WHERE kind = 'requests'").is_empty()
        assert text(verdict(other, "ttft:1s")) == judged


@pytest.mark.parametrize("chosen_ratio", [0.0, 0.4, 0.5, 1.0])
def test_keys_that_somebody_chose_are_drawn_as_evenly_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen_ratio: float
) -> None:
    """What imports bring may be named by others, also beside our own in one window."""
    monkeypatch.setattr(LIMIT, 600)
    mixed = [
        row | ({"request_key": f"req-{number:06d}"} if number % 100 < 100 * chosen_ratio else {})
        for number, row in enumerate(MADE)
    ]
    with Store(tmp_path / "p.duckdb") as store:
        fill(store, mixed)
        drawn = drawn_of(rows_in(Window(0, 2**62)), len(mixed))
        keys = store.query(f"SELECT request_key FROM requests WHERE {drawn.sql}", drawn.parameters)["request_key"]
    chosen = int(keys.str.starts_with("req-").sum())
    for count, expected in ((chosen, 600 * chosen_ratio), (len(keys) - chosen, 600 * (1 - chosen_ratio))):
        assert count == pytest.approx(expected, abs=4 * math.sqrt(expected))


def sampled(store: Store, spans: list[Request], slo: str = "") -> dict[str, Any]:
    """The verdict of an engine of which the counters tell of more requests than sent spans."""
    whole, end_ns = population(), START_UNIX_NS + 660 * SECOND_NS
    instance = make_instance(engine="vllm_v1", first_seen_unix_ns=START_UNIX_NS - 1, last_seen_unix_ns=end_ns)
    with store.write() as transaction:
        transaction.execute("DELETE FROM requests")
        transaction.execute("DELETE FROM engine_samples")
        transaction.execute("DELETE FROM instances")
        transaction.insert("requests", pl.DataFrame([attributed(one) for one in spans], schema=polars_schema(Request)))
        transaction.insert("engine_samples", record_table(EngineSample, scrapes(whole)))
        transaction.insert("instances", record_table(Instance, [instance]))
    return verdict(store, slo, Window(START_UNIX_NS, end_ns))


@pytest.mark.parametrize("kind", ["head", "tail"])
def test_spans_that_senders_left_out_are_another_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = population()
    spans = kept(whole, head(0.5) if kind == "head" else tail(whole, 0.3, 0.3))
    with Store(tmp_path / "p.duckdb") as store:
        read = sampled(store, spans, "ttft:1s")
        monkeypatch.setattr(LIMIT, 600)
        drawn = sampled(store, spans, "ttft:1s")
    assert drawn["provenance"]["drawn"]["of"] == len(spans) > 700
    assert drawn["provenance"]["sampling"] == read["provenance"]["sampling"]
    assert read["provenance"]["sampling"]["kind"] == kind
    assert (drawn["status"], drawn["primary"], drawn["cause"]) == (read["status"], read["primary"], read["cause"])
    assert drawn["affected"] == read["affected"]
    mine, theirs = drawn["signals"], read["signals"]
    assert mine["arrival_rate_per_s"] == pytest.approx(theirs["arrival_rate_per_s"], rel=1e-6)
    assert mine["concurrency_mean"] == pytest.approx(theirs["concurrency_mean"], rel=0.15)
    for cause, share in read["shares"].items():
        assert drawn["shares"].get(cause, 0.0) == pytest.approx(share, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["sglang-overload", "vllm-kv-starvation", "vllm-long-prompt", "vllm-mixed", "vllm-overload", "vllm-shared-prefix"],
)
def test_recordings_of_real_engines_are_judged_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = shared_path("captures", name)
    with bench(tmp_path) as b:
        b.writer.add_spans(pa.concat_tables([scan_traces(body, r["recv_unix_ns"]).rows for r, body in bodies(folder)]))
        lines = [json.dumps({"unix_ns": at, "text": page}) for at, page in folder_scrapes(folder)]
        b.writer.add_import(import_bytes("\n".join(lines).encode(), "scrapes", Profiles(RULES.engines)))
        window = Window(0, b.clock.now)
        for slo in ("", "ttft:500ms", "tpot:20ms"):
            chosen = parse_slo(slo) if slo else ()
            whole: dict[str, Any] = window_verdict(b.store, RULES, window, slo=chosen, now_unix_ns=b.clock.now)
            with monkeypatch.context() as patched:
                patched.setattr(LIMIT, whole["requests"] // 2)
                drawn: dict[str, Any] = window_verdict(b.store, RULES, window, slo=chosen, now_unix_ns=b.clock.now)
            assert drawn["provenance"]["drawn"] is not None
            assert list(differences(exact(drawn), exact(whole))) == []


_VERDICT = """
import sys
from pathlib import Path
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.store import Store
from phasewise.rules.load import load_rulebook
def most_mib():
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(told["VmHWM"].split()[0]) // 1024
with Store(Path(sys.argv[1]), memory_limit="256MB") as store:
    before = most_mib()
    found = window_verdict(store, load_rulebook(), Window(0, 2**61), now_unix_ns=int(sys.argv[2]))
    print(found["requests"], most_mib() - before)
"""


@pytest.mark.slow
def test_a_verdict_of_many_requests_takes_no_more_memory_than_one_of_few(tmp_path: Path) -> None:
    from benchmarks.ingest_analysis import Window as Filled
    from benchmarks.ingest_analysis import fill as fill_with

    took: dict[int, int] = {}
    for count in (130_000, 400_000):
        path = tmp_path / str(count)
        path.mkdir()
        fill_with(path, count, Filled.before(NOW_UNIX_NS))
        program = [sys.executable, "-c", _VERDICT, str(path / "phasewise.duckdb"), str(NOW_UNIX_NS)]
        told = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()
        assert int(told[0]) == count
        took[count] = int(told[1])
    print(f"MiB that a verdict takes: {took}")
    assert took[400_000] < took[130_000] + 150
    assert took[400_000] < 450
