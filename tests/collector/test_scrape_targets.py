"""Targets that come and go, limits of one scrape, and what is told of each."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes_server import kubernetes, pod
from local_http import serving_aside
from waiting import until
from writing import rulebook

from phasewise.collector.exposition import Exposition
from phasewise.collector.scrape import Scraper
from phasewise.collector.scraping import http
from phasewise.collector.scraping.file_discovery import FileDiscovery
from phasewise.collector.scraping.jobs import read_jobs

pytestmark = pytest.mark.live
PAGE = "vllm:num_requests_running 3\n"


@dataclass
class Engine:
    """A server whose paths behave as named; tokens: what it was asked with."""

    port: int = 0
    tokens: list[str] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)


@contextmanager
def engine() -> Iterator[Engine]:
    own = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own.tokens.append(self.headers.get("Authorization", ""))
            if self.path == "/hang":
                own.release.wait(30)
            if self.path == "/elsewhere":
                self.send_response(302)
                self.send_header("Location", "/metrics")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            try:
                if self.path == "/drip":
                    while not own.release.wait(0.05):
                        self.wfile.write(b"#\n")
                        self.wfile.flush()
                elif self.path == "/endless":
                    while not own.release.is_set():
                        self.wfile.write(b"#" * 65536)
                else:
                    self.wfile.write(PAGE.encode())
            except OSError:
                pass  # the scraper has heard enough

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    own.port = server.server_port
    with serving_aside(server):
        try:
            yield own
        finally:
            own.release.set()


@contextmanager
def scraping(*tables: dict[str, Any], **options: Any) -> Iterator[tuple[Scraper, list[Exposition]]]:
    found: list[Exposition] = []
    quick = [{"interval_s": 0.1, "timeout_s": 0.5, **table} for table in tables]
    scraper = Scraper([], rulebook().engines, found.extend, jobs=read_jobs("test", quick), **options)
    scraper.start()
    try:
        yield scraper, found
    finally:
        scraper.stop()


def by_url(scraper: Scraper) -> dict[str, dict[str, Any]]:
    return {str(one["url"]).rpartition("/")[2]: one for one in scraper.status()}


def test_a_target_that_hangs_delays_no_other_and_says_so() -> None:
    with engine() as own:
        paths = ["metrics", "hang", "drip", "elsewhere"]
        table = {"job": "vllm", "targets": [f"http://127.0.0.1:{own.port}/{path}" for path in paths]}
        with scraping(table) as (scraper, found):
            until(lambda: len(found) >= 10)
            until(lambda: all(one["up"] is not None for one in scraper.status()))
            told = by_url(scraper)
        assert (told["metrics"]["up"], told["metrics"]["engine"]) == (True, "vllm_v1")
        assert told["metrics"]["failures"] == 0
        assert told["hang"]["last_error"] == "no answer in time"
        assert "takes longer than 0.5 s" in told["drip"]["last_error"]
        assert "leads elsewhere" in told["elsewhere"]["last_error"]
        assert {one.samples["instance"].item() for one in found} == {f"127.0.0.1:{own.port}"}


def test_an_address_that_no_client_takes_is_a_failed_scrape() -> None:
    with scraping({"job": "odd", "targets": [f"http://{'a' * 70}..b:1/metrics"]}) as (scraper, _):
        until(lambda: int(str(scraper.status()[0]["failures"])) >= 2)
        assert scraper.status()[0]["last_error"]


def test_a_discovery_that_breaks_says_so_and_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a shape nobody foresaw")

    monkeypatch.setattr(FileDiscovery, "look", broken)
    with engine() as own:
        tables = [{"job": "f", "files": [str(tmp_path / "*.json")]}, {"job": "s", "targets": [f"h:{own.port}"]}]
        with scraping(*tables) as (scraper, _):
            until(lambda: "nobody foresaw" in str(scraper.sources()[0]["problem"]))
            until(lambda: scraper.status()[0]["up"] is not None)


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_BYTES", 1 << 20)
    table = {"job": "vllm", "timeout_s": 30}
    with engine() as own, scraping({**table, "targets": [f"http://127.0.0.1:{own.port}/endless"]}) as (scraper, _):
        until(lambda: "longer than 1 MiB" in str(scraper.status()[0]["last_error"]))


def test_the_token_is_read_for_each_scrape_and_shown_nowhere(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with engine() as own:
        table = {"job": "vllm", "targets": [f"127.0.0.1:{own.port}"], "bearer_token_file": str(token)}
        with scraping(table) as (scraper, found):
            until(lambda: "cannot be read" in str(scraper.status()[0]["last_error"]))
            token.write_text("one-secret\n")
            until(lambda: "Bearer one-secret" in own.tokens)
            token.write_text("two words")
            until(lambda: "one word is expected" in str(scraper.status()[0]["last_error"]))
            assert "secret" not in json.dumps(scraper.status()) + json.dumps(scraper.sources())
            until(lambda: found)


def test_files_are_followed_while_they_change(tmp_path: Path) -> None:
    (job,) = read_jobs("test", [{"job": "f", "files": [str(tmp_path / "*.json")], "labels": {"team": "chat"}}])
    discovery = FileDiscovery(job)
    assert discovery.look() == ([], f"no file matches {tmp_path / '*.json'}")
    (tmp_path / "a.json").write_text(
        json.dumps([{"targets": ["h1:8000", "h2:8000"], "labels": {"host.name": "n1", "__metrics_path__": "/m"}}])
    )
    found, problem = discovery.look()
    assert ([one.url for one in found], problem) == (["http://h1:8000/m", "http://h2:8000/m"], "")
    assert found[0].labels == {"team": "chat", "host.name": "n1"}
    (tmp_path / "a.json").write_text('[{"targets": ["h1:80')  # half written
    again, problem = discovery.look()
    assert again == found
    assert "a.json: is not JSON" in problem
    (tmp_path / "a.json").write_text(json.dumps([{"targets": ["h3"]}]))
    assert [one.instance for one in discovery.look()[0]] == ["h3"]
    (tmp_path / "a.json").unlink()
    assert discovery.look()[0] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is no list of groups"),
        ('[{"targets": "a"}]', r"\[0\]\.targets: is no list of addresses"),
        ('[{"targets": ["a"], "labels": {"b": 1}}]', r"\[0\]\.labels: is no object of texts"),
        ('[{"targets": ["h:99999"]}]', "is no address to scrape"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, said: str) -> None:
    import re

    (tmp_path / "a.json").write_text(text)
    (job,) = read_jobs("test", [{"job": "f", "files": [str(tmp_path / "a.json")]}])
    assert re.search(said, FileDiscovery(job).look()[1])


def test_pods_of_a_cluster_are_scraped_under_their_names_and_forgotten_when_they_go() -> None:
    with engine() as own, kubernetes() as api:
        port = [{"name": "http", "containerPort": own.port}]
        api.objects = [pod("vllm-0", "127.0.0.1", ports=port)]
        table = {"job": "cluster", "kubernetes": {"api_url": api.url, "namespaces": ["inference"]}}
        with scraping(table) as (scraper, found):
            until(lambda: len(found) >= 2)
            assert found[0].samples["instance"].item() == "inference/vllm-0"
            assert found[0].labels["k8s.pod.uid"] == "uid-vllm-0"
            (told,) = scraper.sources()
            assert (told["kind"], told["targets"], told["problem"]) == ("kubernetes", 1, "")
            api.change("DELETED", pod("vllm-0", "127.0.0.1", version="101"))
            until(lambda: not scraper.status())
            time.sleep(0.3)  # a scrape under way may still end
            before = len(found)
            time.sleep(0.4)
            assert len(found) == before
        api.ended = True


def test_targets_are_bounded_named_once_and_scraped_once() -> None:
    tables = [
        {"job": "a", "targets": ["h:1", "h:2"]},
        {"job": "b", "targets": ["http://h:1/metrics", "http://h:1/other", "h:3", "h:4"]},
    ]
    scraper = Scraper([], rulebook().engines, print, jobs=read_jobs("test", tables), targets=4)
    assert [(one["job"], one["instance"]) for one in scraper.status()] == [
        ("a", "h:1"),
        ("a", "h:2"),
        ("b", "http://h:1/other"),
        ("b", "h:3"),
    ]
    assert [one["left_out"] for one in scraper.sources()] == [0, 1]
