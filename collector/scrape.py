"""Scraping engines in the background: one thread a URL, a fixed rhythm, gaps are gaps.

A scrape that fails or comes late is no sample: nothing is repeated or interpolated. Who wants to know why asks `status`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.profiles import Profiles
from phasewise.rules.engine_profile import EngineProfile
from phasewise.rules.errors import InputError, MachineError

log = logging.getLogger(__name__)
INTERVAL_S = 1.0
TIMEOUT_S = 2.0
BODY_BYTES = 16 << 20
_LOG_EVERY = 60  # failures in a row between two lines in the log


@dataclass(slots=True)
class Target:
    """One URL and how scraping it goes."""

    url: str
    instance: str
    scrapes: int = 0
    failures: int = 0
    in_a_row: int = 0
    last_error: str = ""
    last_unix_ns: int = 0


class Scraper:
    """Reads /metrics of every URL each second and hands what it finds to `on_samples`.

    Raises InputError for a URL that cannot be scraped. on_samples gets a list of expositions; clock: Unix nanoseconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        engines: Mapping[str, EngineProfile],
        on_samples: Callable[[list[Exposition]], object],
        clock: Callable[[], int] = time.time_ns,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._targets = [_target(url) for url in dict.fromkeys(urls)]
        self._profiles = Profiles(engines)
        self._on_samples = on_samples
        self._clock = clock
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for target in self._targets:
            thread = threading.Thread(target=self._run, args=(target,), name=f"scrape {target.instance}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Return when no scrape is under way any more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(self._timeout_s + 1)

    def status(self) -> list[dict[str, object]]:
        """One object a URL: scrapes, failures, last error, time of the last sample."""
        return [
            {
                "url": t.url,
                "instance": t.instance,
                "scrapes": t.scrapes,
                "failures": t.failures,
                "last_error": t.last_error,
                "last_unix_ns": t.last_unix_ns,
            }
            for t in self._targets
        ]

    def _run(self, target: Target) -> None:
        with httpx.Client(timeout=self._timeout_s, follow_redirects=False) as client:
            due = time.monotonic()
            while not self._stopping.is_set():
                self._scrape(client, target)
                due += self._interval_s
                late = time.monotonic() - due
                if late > 0:
                    due += late  # no burst after a pause
                self._stopping.wait(max(0.0, due - time.monotonic()))

    def _scrape(self, client: httpx.Client, target: Target) -> None:
        at = self._clock()
        try:
            text = _body(client, target.url)
            found = read_exposition(text, at, self._profiles, instance=target.instance)
            if found is None:
                raise ValueError("the answer holds metrics of no known engine")
            self._on_samples([found])
        except (httpx.HTTPError, ValueError, MachineError) as error:
            self._failed(target, f"{type(error).__name__}: {error}"[:200])
            return
        if target.in_a_row:
            log.info("scraping %s works again", target.url)
        target.in_a_row, target.last_error = 0, ""
        target.scrapes += 1
        target.last_unix_ns = at

    @staticmethod
    def _failed(target: Target, reason: str) -> None:
        if target.in_a_row % _LOG_EVERY == 0:
            log.warning("scraping %s failed: %s", target.url, reason)
        target.failures += 1
        target.in_a_row += 1
        target.last_error = reason


def _body(client: httpx.Client, url: str) -> str:
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        parts, size = [], 0
        for chunk in answer.iter_bytes():
            size += len(chunk)
            if size > BODY_BYTES:
                raise ValueError(f"the answer is longer than {BODY_BYTES >> 20} MiB")
            parts.append(chunk)
    return b"".join(parts).decode("utf-8", "replace")


def _target(url: str) -> Target:
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("--scrape", url, "is no address to scrape", "write http://HOST:PORT/metrics")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    query = f"?{parts.query}" if parts.query else ""
    return Target(f"{parts.scheme}://{parts.netloc}{path}{query}", parts.netloc.rpartition("@")[2])
