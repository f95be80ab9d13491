"""Backfill from the real Prometheus gives the rows that scraping the same pages would have given."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from captures import scrapes
from device_pages import dcgm
from local_http import answering
from polars.testing import assert_frame_equal
from prometheus_server import prometheus, require_prometheus
from shared_data import shared_path, shared_root
from writing import bench, rulebook

from phasewise.collector.backfill import Page, Remote, pages
from phasewise.collector.backfill.prometheus import Prometheus
from phasewise.collector.exposition import Exposition, metric_prefixes, read_exposition
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError

pytestmark = [pytest.mark.live, pytest.mark.slow]  # it scrapes five seconds after its start
PROFILES = Profiles(rulebook().engines)
PREFIXES = metric_prefixes(PROFILES)
INTERVAL = "300ms"
SCRAPES = 8


def own_pages() -> list[str]:
    """Pages with counters, a histogram, an info metric and a restart in between."""
    found = []
    for number in range(40):
        moved = number if number < 5 else number - 5  # counters begin again
        found.append(
            f"process_start_time_seconds {1796000000 + (number >= 5) * 100}\n"
            f'vllm:num_requests_running{{engine="0",model_name="m"}} {number % 3}\n'
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {number / 64}\n'
            f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {moved * 100}\n'
            f'vllm:prompt_tokens_created{{engine="0",model_name="m"}} 1796000000\n'
            f'vllm:request_success_total{{engine="0",model_name="m",finished_reason="stop"}} {moved}\n'
            f'vllm:request_success_total{{engine="0",model_name="m",finished_reason="abort"}} 1\n'
            f'vllm:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} {moved}\n'
            f'vllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} {2 * moved}\n'
            f'vllm:time_to_first_token_seconds_count{{model_name="m"}} {2 * moved}\n'
            f'vllm:time_to_first_token_seconds_sum{{model_name="m"}} {moved * 0.3}\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="900"} 1\n'
        )
    return found


def recorded_pages(capture: str) -> list[str]:
    """Those from the middle of a recording on, where the counters move."""
    found = [text for _, text in scrapes(shared_path("captures", capture))]
    return found[len(found) // 3 :]


class Engine:
    """Shows its pages one after another, and the last one for ever."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.shown = 0
        self.target = ""

    def page(self, path: str, _: object) -> tuple[int, str, dict[str, str]]:
        assert path == "/metrics"
        self.shown += 1
        return 200, self.texts[min(self.shown, len(self.texts)) - 1], {"Content-Type": "text/plain; version=0.0.4"}

    @property
    def instance(self) -> str:
        return f"engines/{self.target}"


@dataclass
class Past:
    """What two real Prometheus servers stored; one of them may read very little at once."""

    engines: dict[str, Engine]
    url: str
    narrow_url: str
    from_ms: int
    to_ms: int

    def read(self, url: str = "", **options: Any) -> list[Page]:
        remote = Remote(url or self.url, "Prometheus", {})
        try:
            return list(pages(Prometheus(remote, PREFIXES, **options), self.from_ms, self.to_ms))
        finally:
            remote.close()

    def _found(self, **options: Any) -> list[Exposition]:
        return [
            one for page in self.read(**options) if page.body for one in import_bytes(page.body, "p", PROFILES).samples
        ]

    def samples(self, engine: Engine | None = None, **options: Any) -> list[Exposition]:
        found = [one for one in self._found(**options) if not one.samples.is_empty()]
        return [one for one in found if engine is None or one.samples["instance"].item() == engine.instance]

    def readings(self) -> list[dict[str, Any]]:
        return [row for one in self._found() if one.devices is not None for row in one.devices.to_dicts()]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    require_prometheus()
    engines = {"own": Engine(own_pages()), "devices": Engine([dcgm(util=10 + number) for number in range(40)])}
    if (shared_root() / "captures").exists():
        engines |= {name: Engine(recorded_pages(name)) for name in ("vllm-kv-starvation", "sglang-overload")}
    folder = tmp_path_factory.mktemp("prometheus")
    from_ms = time.time_ns() // 10**6
    with ExitStack() as stack:
        for engine in engines.values():
            engine.target = stack.enter_context(answering(engine.page)).url.removeprefix("http://")
        other = stack.enter_context(answering(Engine(own_pages()).page)).url.removeprefix("http://")
        targets = [engine.target for engine in engines.values()]
        url = stack.enter_context(prometheus(folder / "wide", targets, "engines", INTERVAL))
        options = "--query.max-samples=20"
        narrow_url = stack.enter_context(prometheus(folder / "narrow", [other], "engines", INTERVAL, options))
        until = time.monotonic() + 30
        while min(engine.shown for engine in engines.values()) <= SCRAPES and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)  # the last scrape is stored after it is answered
        yield Past(engines, url, narrow_url, from_ms, time.time_ns() // 10**6)


@pytest.mark.parametrize("origin", ["own", "vllm-kv-starvation", "sglang-overload"])
def test_backfilled_samples_are_those_of_direct_scrapes(past: Past, origin: str) -> None:
    if origin not in past.engines:
        shared_path("captures", origin)
    engine = past.engines[origin]
    samples = past.samples(engine)
    assert SCRAPES <= len(samples) <= engine.shown
    for text, one in zip(engine.texts, samples, strict=False):
        unix_ns = one.samples["unix_ns"].item()
        direct = read_exposition(text, unix_ns, PROFILES, instance=engine.instance, source="import")
        assert direct is not None
        assert_frame_equal(one.samples, direct.samples)
        assert one.settings == direct.settings
    times = pl.Series([one.samples["unix_ns"].item() for one in samples])
    assert times.diff().drop_nulls().min() > 100 * 10**6  # type: ignore[operator]


def test_readings_of_devices_come_along(past: Past) -> None:
    found = [row for row in past.readings() if row["device"] == "GPU-1"]
    assert len(found) >= SCRAPES
    assert {row["instance"] for row in found} == {past.engines["devices"].instance}
    assert [row["utilization_ratio"] for row in found] == pytest.approx([(10 + n) / 100 for n in range(len(found))])
    assert {(row["tensor_active_ratio"], row["power_w"], row["host"]) for row in found} == {(0.125, 512.25, "node-1")}


def test_stored_twice_is_stored_once(past: Past, tmp_path: Path) -> None:
    samples = past.samples()
    with bench(tmp_path) as b:
        b.clock.now = time.time_ns()
        found = [page.body for page in past.read() if page.body]
        counts = [b.writer.add_import(import_bytes(body, "p", PROFILES)) for body in found * 2]
        assert sum(count["samples"] for count in counts) == len(samples) + len(past.readings())
        rows = b.rows("SELECT * FROM engine_samples")
        assert sorted(row["unix_ns"] for row in rows) == sorted(one.samples["unix_ns"].item() for one in samples)
        assert {row["instance"] for row in rows} == {
            engine.instance for name, engine in past.engines.items() if name != "devices"
        }
        assert all(row["running"] is not None for row in rows)


def test_label_matchers_narrow_it(past: Past) -> None:
    own = past.engines["own"]
    assert past.samples(match='{job="another"}') == []
    assert {one.samples["instance"].item() for one in past.samples(match=f'instance="{own.target}"')} == {own.instance}


def test_a_step_asks_query_range_and_carries_no_value_beyond_it(past: Past) -> None:
    own = past.engines["own"]
    values = {one.samples["unix_ns"].item(): one.samples["prompt_tokens"].item() for one in past.samples(own)}
    stepped = past.samples(own, step_s=0.5)
    times = [one.samples["unix_ns"].item() for one in stepped]
    assert times and times == sorted(set(times))
    for unix_ns, one in zip(times, stepped, strict=True):
        assert unix_ns % (500 * 10**6) == 0
        at_hand = [value for at, value in values.items() if unix_ns - 500 * 10**6 <= at <= unix_ns]
        assert at_hand and one.samples["prompt_tokens"].item() == at_hand[-1]


def test_a_prometheus_that_may_not_read_so_much_is_told_so(past: Past) -> None:
    with pytest.raises(InputError, match=r"too many samples into memory.*--match"):
        past.read(past.narrow_url)
