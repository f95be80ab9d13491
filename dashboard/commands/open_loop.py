"""A small open-loop client: requests leave when their time has come, whether or not the engine keeps up.

Real HTTP to any OpenAI-compatible server, streamed. A closed loop would slow down with the engine and hide the very queue that
is to be seen.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

WORDS = (
    "time queue batch token cache block prompt model step memory weight layer head slot server client stream answer "
    "request context window budget first last long short early late small large"
).split()
ANSWER_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to ask for. due_s: seconds after the start of the load."""

    due_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a load. late_s: the most that a request left after its time, which is the client's fault, not the engine's."""

    sent: int
    completed: int
    refused: int
    failed: int
    late_s: float
    problem: str = ""  # of the first that failed


def drawn(
    count: int, per_s: float, prompt_words: tuple[int, int], max_tokens: tuple[int, int], seed: int
) -> list[Request]:
    """Poisson arrivals; lengths between the bounds, both included."""
    random_ = random.Random(seed)
    due_s = 0.0
    found = []
    for _ in range(count):
        prompt = " ".join(random_.choices(WORDS, k=random_.randint(*prompt_words)))
        found.append(Request(due_s, prompt, random_.randint(*max_tokens)))
        due_s += random_.expovariate(per_s)
    return found


def send(url: str, model: str, requests: Sequence[Request], done: Callable[[float], None]) -> Outcome:
    """Sends them to `url`/v1/completions and waits for all. done(1) is called as each ends."""
    return asyncio.run(_send(url, model, requests, done))


async def _send(url: str, model: str, requests: Sequence[Request], done: Callable[[float], None]) -> Outcome:
    began_s = time.monotonic()
    late_s = 0.0
    counts = {"completed": 0, "refused": 0, "failed": 0}
    problems: list[str] = []
    # One connection a request, however many wait: a pool that runs dry would be a queue of the client's own. No proxy between.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(ANSWER_TIMEOUT_S), trust_env=False) as client:

        async def one(request: Request) -> None:
            nonlocal late_s
            await asyncio.sleep(max(0.0, began_s + request.due_s - time.monotonic()))
            late_s = max(late_s, time.monotonic() - began_s - request.due_s)
            body = {
                "model": model,
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "stream": True,
            }
            try:
                counts[await _stream(client, f"{url}/v1/completions", body)] += 1
            except (httpx.HTTPError, ValueError) as error:
                counts["failed"] += 1
                problems.append(str(error) or type(error).__name__)
            done(1)

        await asyncio.gather(*(one(request) for request in requests))
    return Outcome(len(requests), **counts, late_s=late_s, problem=problems[0] if problems else "")


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> str:
    """completed or refused; ValueError with the server's words for anything else."""
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return "refused"
        if answer.status_code != httpx.codes.OK:
            words = (await answer.aread()).decode("utf-8", "replace")[:200]
            raise ValueError(f"status {answer.status_code}: {words}")
        ended = False
        async for line in answer.aiter_lines():
            ended = ended or line.strip() == "data: [DONE]"
        if not ended:
            raise ValueError("the stream broke off")
    return "completed"
