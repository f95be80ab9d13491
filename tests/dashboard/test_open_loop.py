"""The client of the demo's live run, against a small HTTP server on loopback whose slowness is known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from local_http import serving_aside

from phasewise.dashboard.commands.open_loop import Request, drawn, send

pytestmark = pytest.mark.live


@dataclass(slots=True)
class Seen:
    """What the server got: when, and what."""

    url: str = ""
    at_s: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def answering(*, after: int = 1, status: int = 200, ends: bool = True) -> Iterator[Seen]:
    """after: nobody gets an answer before so many requests are there; those who waited 30 s for that get 503."""
    seen = Seen()
    enough = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.at_s.append(time.monotonic())
            seen.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if len(seen.bodies) >= after:
                enough.set()
            answer = status if enough.wait(30) else 503
            self.send_response(answer)
            self.end_headers()
            if answer != 200:
                self.wfile.write(b'{"error": {"message": "no such model"}}')
            else:
                self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
                if ends:
                    self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen.url = f"http://127.0.0.1:{server.server_address[1]}"
    with serving_aside(server):
        yield seen


def test_requests_leave_on_time_although_none_has_been_answered() -> None:
    load = [Request(0.1 * number, f"prompt {number}", 5) for number in range(6)]
    done: list[float] = []
    with answering(after=6) as server:
        outcome = send(server.url, "m", load, done.append)
    assert (outcome.sent, outcome.completed, outcome.refused, outcome.failed) == (6, 6, 0, 0), "none waited for another"
    assert sum(done) == 6
    assert server.at_s[-1] - server.at_s[0] > 0.4 - outcome.late_s, "and not all at once"
    assert {body["prompt"] for body in server.bodies} == {one.prompt for one in load}
    assert all(body["stream"] and body["model"] == "m" and body["max_tokens"] == 5 for body in server.bodies)


@pytest.mark.parametrize(
    ("answer", "refused", "failed", "problem"),
    [
        ({"status": 429}, 1, 0, ""),
        ({"status": 404}, 0, 1, "status 404: "),
        ({"ends": False}, 0, 1, "the stream broke off"),
    ],
)
def test_what_was_not_served_is_counted_and_told(
    answer: dict[str, Any], refused: int, failed: int, problem: str
) -> None:
    with answering(**answer) as server:
        outcome = send(server.url, "m", [Request(0.0, "x", 1)], lambda _: None)
    assert (outcome.completed, outcome.refused, outcome.failed) == (0, refused, failed)
    assert outcome.problem.startswith(problem) and bool(outcome.problem) == bool(problem)


def test_a_server_that_is_not_there_is_a_failure_not_a_crash() -> None:
    outcome = send("http://127.0.0.1:9", "m", [Request(0.0, "x", 1)], lambda _: None)
    assert (outcome.completed, outcome.failed) == (0, 1)
    assert outcome.problem


def test_a_drawn_load_is_the_same_for_a_seed_and_within_its_bounds() -> None:
    load = drawn(500, per_s=50, prompt_words=(3, 9), max_tokens=(2, 4), seed=7)
    assert load == drawn(500, per_s=50, prompt_words=(3, 9), max_tokens=(2, 4), seed=7)
    assert load != drawn(500, per_s=50, prompt_words=(3, 9), max_tokens=(2, 4), seed=8)
    assert {len(one.prompt.split()) for one in load} == set(range(3, 10))
    assert {one.max_tokens for one in load} == {2, 3, 4}
    assert load[0].due_s == 0 and [one.due_s for one in load] == sorted(one.due_s for one in load)
    assert 8 < load[-1].due_s < 12.5, "500 arrivals at 50 a second: 10 s, with a standard deviation of 0.45"
