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
from phasewise.rules.errors import InputError

log = logging.getLogger(__name__)
INTERVAL_S = 1.0
TIMEOUT_S = 2.0
BODY_BYTES = 16 << 20
_LOG_EVERY_NS = 600 * 10**9  # between two lines in the log while nothing changes


@dataclass(slots=True)
class Target:
    """One URL and how scraping it goes."""

    url: str
    instance: str
    scrapes: int = 0
    failures: int = 0
    up: bool | None = None  # None: not tried yet
    last_error: str = ""
    last_unix_ns: int = 0  # of the last scrape that worked
    not_stored: str = ""
    logged_unix_ns: int = 0


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
        """One object a URL: whether the last scrape worked (null before the first), scrapes, failures, last error, the time of
        the last sample and its age."""
        now = self._clock()
        return [
            {
                "url": t.url,
                "up": t.up,
                "last_success_age_s": (now - t.last_unix_ns) / 1e9 if t.last_unix_ns else None,
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
        except (httpx.HTTPError, ValueError) as error:
            self._failed(target, f"{type(error).__name__}: {error}"[:200], at)
            return
        if target.up is False:
            log.info("scraping %s works again", target.url)
            target.logged_unix_ns = 0
        target.up, target.last_error = True, ""
        target.scrapes += 1
        target.last_unix_ns = at
        self._hand_over(target, found)

    def _hand_over(self, target: Target, found: Exposition) -> None:
        """The sample is lost where it cannot be stored; the thread goes on, and the writer's health says why."""
        try:
            self._on_samples([found])
        except Exception as error:
            if not target.not_stored:
                log.warning("a sample of %s is lost: %s: %s", target.url, type(error).__name__, error)
            target.not_stored = str(error)
        else:
            target.not_stored = ""

    @staticmethod
    def _failed(target: Target, reason: str, at_unix_ns: int) -> None:
        if target.up is not False or at_unix_ns - target.logged_unix_ns >= _LOG_EVERY_NS:
            log.warning("scraping %s fails: %s", target.url, reason)
            target.logged_unix_ns = at_unix_ns
        target.failures += 1
        target.up, target.last_error = False, reason


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
