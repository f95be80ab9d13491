"""One target: its rhythm, its last reading, and how it goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.profiles import Profiles
from phasewise.collector.scraping.http import Refused, client_of, read_body, unreached
from phasewise.collector.scraping.jobs import Endpoint, Job
from phasewise.rules.errors import InputError

LOG = logging.getLogger("phasewise.collector.scrape")
_LOG_EVERY_NS = 600 * 10**9  # between two lines in the log while nothing changes
_REASON = 200  # characters
_LONG = ("k8s.pod.label.", "k8s.pod.annotation.")  # of no use in a status, and many


@dataclass(slots=True, eq=False)
class Target:
    """An address and how scraping it goes. The thread that scrapes it writes, and who hands its readings over `not_stored`."""

    job: Job
    endpoint: Endpoint
    stopping: threading.Event = field(default_factory=threading.Event)
    scrapes: int = 0
    failures: int = 0
    up: bool | None = None  # None: not tried yet
    last_error: str = ""
    last_unix_ns: int = 0  # of the last scrape that worked
    engine: str | None = None  # that its metrics are of; "devices" where it tells of devices alone
    duration_s: float | None = None  # of the last try
    late_s: float = 0.0  # how far the last try began behind its rhythm
    not_stored: str = ""  # why the last reading is lost
    logged_unix_ns: int = 0

    def status(self, now_unix_ns: int) -> dict[str, object]:
        """What data health shows; the address without a password."""
        return {
            "job": self.job.name,
            "url": self.endpoint.shown_url,
            "instance": self.endpoint.instance,
            "labels": {key: value for key, value in self.endpoint.labels.items() if not key.startswith(_LONG)},
            "engine": self.engine,
            "up": self.up,
            "last_success_age_s": (now_unix_ns - self.last_unix_ns) / 1e9 if self.last_unix_ns else None,
            "scrapes": self.scrapes,
            "failures": self.failures,
            "last_error": self.last_error,
            "last_unix_ns": self.last_unix_ns,
            "interval_s": self.job.interval_s,
            "duration_s": self.duration_s,
            "late_s": self.late_s,
            "not_stored": self.not_stored,
        }


Put = Callable[[Target, Exposition], object]


class Reading:
    """Scrapes one target until it is told to stop. A scrape that fails or comes late is no sample: nothing is repeated."""

    def __init__(self, target: Target, profiles: Profiles, put: Put, clock: Callable[[], int]) -> None:
        self._target = target
        self._profiles = profiles
        self._put = put
        self._clock = clock

    def run(self) -> None:
        job, stopping = self._target.job, self._target.stopping
        client: httpx.Client | None = None
        due = time.monotonic()
        try:
            while not stopping.is_set():
                self._target.late_s = max(0.0, time.monotonic() - due)
                client = client or self._opened()
                if client is not None:
                    self.scrape(client)
                due += job.interval_s
                late = time.monotonic() - due
                if late > 0:
                    due += late  # no burst after a pause
                stopping.wait(max(0.0, due - time.monotonic()))
        finally:
            if client is not None:
                client.close()

    def _opened(self) -> httpx.Client | None:
        """A client; None, and said so, while the authority's certificate cannot be read."""
        job = self._target.job
        try:
            return client_of(job.access, job.timeout_s, f"job {job.name}")
        except InputError as error:
            self._failed(str(error), self._clock())
            return None

    def scrape(self, client: httpx.Client) -> None:
        target, at = self._target, self._clock()
        began = time.monotonic()
        try:
            text = read_body(client, target.endpoint.url, target.job.access, target.job.timeout_s)
            found = read_exposition(
                text, at, self._profiles, instance=target.endpoint.instance, labels=target.endpoint.labels
            )
            if found is None:
                raise Refused(f"the answer holds metrics of no known engine or device{_first_name(text)}")
        except Exception as error:  # whatever a page or an address holds, the next scrape may be right
            self._failed(_reason(error)[:_REASON], at)
            return
        finally:
            target.duration_s = time.monotonic() - began
        if target.up is False:
            LOG.info("scraping %s works again", target.endpoint.shown_url)
            target.logged_unix_ns = 0
        target.up, target.last_error = True, ""
        target.engine = found.engine
        target.scrapes += 1
        target.last_unix_ns = at
        self._put(target, found)

    def _failed(self, reason: str, at_unix_ns: int) -> None:
        target = self._target
        if target.up is not False or at_unix_ns - target.logged_unix_ns >= _LOG_EVERY_NS:
            LOG.warning("scraping %s fails: %s", target.endpoint.shown_url, reason)
            target.logged_unix_ns = at_unix_ns
        target.failures += 1
        target.up, target.last_error = False, reason


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPError):
        return unreached(error)
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"


def _first_name(text: str) -> str:
    """The first metric of a page, for who must see what was scraped instead of an engine."""
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name and not name.startswith("#"):
            return f"; its first one is {name[:60]!r}"
    return ""
