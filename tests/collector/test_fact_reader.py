"""Asking scraped engines about themselves: what is asked, when it is asked again, and what a server that does not tell costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from local_http import Answer, Query, answering
from writing import SECOND, Clock, rulebook

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.fact_reader import FactReader
from phasewise.collector.profiles import Profiles
from phasewise.collector.scraping.jobs import Access

pytestmark = pytest.mark.live
PROFILES = Profiles(rulebook().engines)
MODELS = {"data": [{"id": "m", "root": "/m", "max_model_len": 4096}]}


def scraped(started_s: float | None = None, metric: str = "vllm:num_requests_running") -> list[Exposition]:
    started = "" if started_s is None else f"\nprocess_start_time_seconds {started_s!r}"
    found = read_exposition(f"{metric} 1{started}", 10**18, PROFILES, instance="e")
    assert found is not None
    return [found]


class Told:
    """A reader with what it told and a clock moved by hand."""

    def __init__(self, url: str, access: Access | None = None) -> None:
        self.clock = Clock()
        access = access or Access()
        self.found: list[tuple[str, Mapping[str, object]]] = []
        self.reader = FactReader(
            lambda: {"e": (f"{url}/metrics", access)}, rulebook().engines, lambda *told: self.take(*told), self.clock
        )

    def take(self, name: str, _unix_ns: int, settings: Mapping[str, object]) -> None:
        self.found.append((name, settings))

    def ask(self) -> None:
        self.reader.ask_due()

    @property
    def status(self) -> dict[str, Any]:
        return self.reader.status()[0]


def vllm(path: str, _query: Query) -> Answer:
    told: dict[str, object] = {"/version": {"version": "0.33.0"}, "/v1/models": MODELS}
    return (200, told[path]) if path in told else (404, "nothing")


def test_an_engine_is_asked_once_and_again_when_its_process_is_another() -> None:
    with answering(vllm) as server:
        told = Told(server.url)
        told.reader.saw(scraped(100.0))
        for _ in range(3):
            told.ask()
        settings = {"engine_version": "0.33.0", "model": "/m", "served_model": "m", "max_model_len": 4096}
        assert told.found == [("e", settings)]
        assert len(server.asked) == 3
        assert (told.status["answered"], told.status["last_error"]) == (["/version", "/v1/models"], "")
        told.reader.saw(scraped(100.0))
        told.ask()
        assert len(told.found) == 1
        told.reader.saw(scraped(200.0))
        told.ask()
        assert len(told.found) == 2
        told.clock.now += 3600 * SECOND
        told.ask()
        assert len(told.found) == 3


@pytest.mark.parametrize(
    "answer",
    [
        (500, "broken"),
        (302, "", {"Location": "http://169.254.169.254/latest"}),
        (200, "no json"),
        (200, "3"),
        (200, "[" * 100_000),
    ],
)
def test_a_server_that_fails_is_asked_again_a_minute_later_and_tells_nothing(answer: Answer) -> None:
    with answering(lambda _path, _query: answer) as server:
        told = Told(server.url)
        told.reader.saw(scraped())
        told.ask()
        told.ask()
        assert told.found == []
        assert len(server.asked) == 3
        assert told.status["last_error"]
        told.clock.now += 61 * SECOND
        told.ask()
        assert len(server.asked) == 6


def test_a_server_that_does_not_tell_is_no_fault() -> None:
    with answering(lambda _path, _query: (401, "who are you")) as server:
        told = Told(server.url)
        told.reader.saw(scraped())
        told.ask()
        told.clock.now += 61 * SECOND
        told.ask()
        assert (len(server.asked), told.found, told.status["last_error"]) == (3, [], "")


def test_what_cannot_be_stored_is_told_again() -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with answering(vllm) as server:
        told = Told(server.url)
        told.take = full  # type: ignore[assignment,method-assign]
        told.reader.saw(scraped())
        told.ask()
        assert "No space left" in told.status["last_error"]
        del told.take
        told.clock.now += 61 * SECOND
        told.ask()
        assert len(told.found) == 1


def test_metrics_of_an_engine_that_tells_nothing_ask_nobody() -> None:
    told = Told("http://127.0.0.1:1")
    told.reader.saw(scraped(metric="nv_inference_request_success"))
    assert told.reader.status() == []


def test_a_server_is_asked_with_the_token_and_the_password_of_its_scrape(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with answering(vllm) as server:
        told = Told(server.url, Access(token_file=tmp_path / "token"))
        told.reader.saw(scraped())
        told.ask()
        assert {one.headers["Authorization"] for one in server.asked} == {"Bearer t"}
        assert len(told.found) == 1
        named = Told(server.url.replace("://", "://user:secret@"))
        named.reader.saw(scraped())
        named.ask()
        assert server.asked[-1].headers["Authorization"].startswith("Basic ")
        unreadable = Told(server.url, Access(ca_file=tmp_path / "none.pem"))
        unreadable.reader.saw(scraped())
        unreadable.ask()
        assert "none.pem" in unreadable.status["last_error"] and unreadable.found == []
