"""The background scraper against a small server: samples, gaps, and why there were gaps."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from local_http import serving_aside
from waiting import until
from writing import rulebook

from phasewise.collector.exposition import Exposition
from phasewise.collector.scrape import Scraper
from phasewise.collector.scraping.target import Reading
from phasewise.rules.errors import InputError

pytestmark = pytest.mark.live


class Engine(BaseHTTPRequestHandler):
    status = 200
    text = "vllm:num_requests_running 3\n"

    def do_GET(self) -> None:
        self.send_response(type(self).status if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(type(self).text.encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def port() -> Iterator[int]:
    Engine.status, Engine.text = 200, "vllm:num_requests_running 3\n"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    with serving_aside(server):
        yield server.server_port


def scraping(url: str, found: list[Exposition]) -> Scraper:
    return Scraper([url], rulebook().engines, found.extend, interval_s=0.05, timeout_s=1.0)


def test_samples_come_named_by_their_address(port: int) -> None:
    found: list[Exposition] = []
    scraper = scraping(f"127.0.0.1:{port}", found)
    scraper.start()
    until(lambda: len(found) >= 3)
    scraper.stop()
    assert {one.samples["instance"].item() for one in found} == {f"127.0.0.1:{port}"}
    assert found[0].samples["running"].item() == 3.0
    assert len({one.samples["unix_ns"].item() for one in found}) == len(found)


def test_failures_are_gaps_that_say_why(port: int) -> None:
    found: list[Exposition] = []
    Engine.status = 503
    scraper = scraping(f"http://127.0.0.1:{port}/metrics", found)
    scraper.start()
    until(lambda: scraper.status()[0]["failures"] != 0)
    assert found == []
    assert "503" in str(scraper.status()[0]["last_error"])
    Engine.status, Engine.text = 200, "node_load1 3\n"
    until(lambda: "no known engine" in str(scraper.status()[0]["last_error"]))
    Engine.text = "vllm:num_requests_running 3\n"
    until(lambda: bool(found))
    scraper.stop()
    assert scraper.status()[0]["last_error"] == ""


def test_status_and_log_tell_once_that_a_target_fails(caplog: pytest.LogCaptureFixture) -> None:
    clock = [10**18]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        scraper = Scraper([f"127.0.0.1:{closed.getsockname()[1]}"], rulebook().engines, print, lambda: clock[0])
        assert scraper.status()[0]["up"] is None
        (target,) = scraper._targets.values()
        reading = Reading(target, scraper._profiles, scraper._outbox.put, lambda: clock[0])
        with httpx.Client() as client, caplog.at_level(logging.WARNING):
            for _ in range(5):
                reading.scrape(client)
            assert len(caplog.records) == 1
            clock[0] += 601 * 10**9
            reading.scrape(client)
            assert len(caplog.records) == 2
    assert (scraper.status()[0]["up"], scraper.status()[0]["last_success_age_s"]) == (False, None)


def test_a_sample_that_cannot_be_stored_ends_no_scraping(port: int) -> None:
    def full(_samples: object) -> None:
        raise OSError(28, "No space left on device")

    scraper = Scraper([f"127.0.0.1:{port}"], rulebook().engines, full, interval_s=0.05, timeout_s=1.0)
    scraper.start()
    until(lambda: int(str(scraper.status()[0]["scrapes"])) >= 3)
    scraper.stop()
    assert scraper.status()[0]["up"] is True


@pytest.mark.parametrize("url", ["ftp://host/metrics", "http://", "http:///metrics"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        Scraper([url], rulebook().engines, print)
