"""What the API and the metrics say when something does not work: writing, scraping, a sender's clock."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builders import START_UNIX_NS, make_request, request_table
from stocked import NOW_UNIX_NS, Served

from phasewise.collector.store import Store
from phasewise.collector.transaction import Transaction
from phasewise.dashboard.commands import doctor
from phasewise.rules.errors import MachineError

FAILING: list[dict[str, object]] = [
    {"url": "http://gpu-9:8000/metrics", "up": False, "last_success_age_s": 90.0, "last_error": "ConnectError: refused", "scrapes": 3},
    {"url": "http://gpu-8:8000/metrics", "up": True, "last_success_age_s": 0.5, "last_error": "", "scrapes": 3},
]  # fmt: skip


def test_a_full_disk_is_no_good_health(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Store.write

    @contextmanager
    def full(store: Store) -> Iterator[Transaction]:
        with write(store) as transaction:
            yield transaction
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(OSError, match="No space left"):
        served.writer.annotate([])
    health = served.client.get("/api/v1/health").json()
    assert health["status"] == "degraded"
    assert "No space left on device" in health["error"] and "free space" in health["remedy"]
    ready = served.client.get("/readyz")
    assert ready.status_code == 503
    assert "phasewise_up 0.0" in served.client.get("/metrics").text

    class Asked:
        url = "http://127.0.0.1:8080"

        def ask(self, _path: str) -> Any:
            raise MachineError(f"answers {ready.status_code}: {ready.json()['error']}")

    monkeypatch.setattr(doctor, "find_server", lambda _data: Asked())
    assert doctor.run(Namespace(quick=True, json=False, data=tmp_path)) == 1
    assert "FAIL  server: answers 503: nothing can be stored: OSError" in capsys.readouterr().out


def test_a_failing_scrape_is_seen_everywhere(served: Served) -> None:
    served.writer.watch(lambda: FAILING)
    told = served.client.get("/api/v1/data-health", params={"from": "0", "to": "now"}).json()
    assert [(one["url"], one["up"]) for one in told["scrapes"]] == [(one["url"], one["up"]) for one in FAILING]
    figures = served.client.get("/metrics").text
    assert 'phasewise_scrape_up{target="http://gpu-9:8000/metrics"} 0.0' in figures
    assert 'phasewise_scrape_up{target="http://gpu-8:8000/metrics"} 1.0' in figures
    assert 'phasewise_scrape_last_success_age_seconds{target="http://gpu-9:8000/metrics"} 90.0' in figures


def test_flags_are_counted_and_shown_with_their_request(served: Served) -> None:
    odd = make_request(at_s=100.0, quality='["ttft_beyond_end","multi_clock"]', request_id="odd-1")
    with served.store.write() as transaction:
        transaction.insert("requests", request_table([odd]))
    told = served.client.get("/api/v1/data-health", params={"from": "0", "to": "now"}).json()
    assert told["quality"]["ttft_beyond_end"] == 1
    report = served.client.get("/api/v1/requests/odd-1").json()
    assert "ttft_beyond_end" in str(report)


def test_the_year_2099_is_not_now(serve: Callable[..., Served]) -> None:
    served = serve()
    far = pl.DataFrame({"request_key": ["f"], "arrival_unix_ns": [4 * 10**18], "finished_unix_ns": [4 * 10**18]})
    with served.store.write() as transaction:
        transaction.insert("requests", far)
    health = served.client.get("/api/v1/health").json()
    assert START_UNIX_NS < health["newest_unix_ns"] <= NOW_UNIX_NS
    assert health["age_s"] >= 0
