"""Scraping engines in the background: one thread a target, a fixed rhythm, gaps are gaps.

Targets are stated, or found by discovery and then come and go while this runs. One that is slow delays no other. A scrape that
fails or comes late is no sample: nothing is repeated or interpolated. Who wants to know why asks `status`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from phasewise.collector.exposition import Exposition
from phasewise.collector.profiles import Profiles
from phasewise.collector.scraping.file_discovery import FileDiscovery, Found
from phasewise.collector.scraping.jobs import INTERVAL_S, TIMEOUT_S, Access, Endpoint, Job, url_job
from phasewise.collector.scraping.kubernetes_discovery import KubernetesDiscovery
from phasewise.collector.scraping.outbox import Outbox
from phasewise.collector.scraping.target import Reading, Target
from phasewise.rules.engine_profile import EngineProfile

TARGETS = 256  # a thread and a parse each; more belong into Prometheus, which `ingest --prometheus` reads

LOG = logging.getLogger(__name__)
_AGAIN_S = 30.0  # until a discovery that broke is begun again
_LAST_S = 2.0  # for storing what waits when this stops


class Discovery(Protocol):
    """Runs until told to stop and tells what there is whenever that changes."""

    kind: str

    def run(self, stopping: threading.Event, on_found: Found) -> None: ...


@dataclass(slots=True)
class Source:
    """Where a job's targets come from, what it found, and what is wrong with it."""

    job: Job
    kind: str
    endpoints: Sequence[Endpoint] = ()
    problem: str = ""
    told_unix_ns: int = 0  # of the last change
    left_out: int = 0  # beyond TARGETS


class Scraper:
    """Reads /metrics of every target in its rhythm and hands what it finds to `on_samples`.

    Raises InputError for a URL that cannot be scraped. on_samples gets a list of expositions; clock: Unix nanoseconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        engines: Mapping[str, EngineProfile],
        on_samples: Callable[[list[Exposition]], object],
        clock: Callable[[], int] = time.time_ns,
        *,
        jobs: Sequence[Job] = (),
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        targets: int = TARGETS,
    ) -> None:
        self._profiles = Profiles(engines)
        self._outbox = Outbox(on_samples)
        self._clock = clock
        self._most = targets
        self._stopping = threading.Event()
        self._handed = threading.Event()  # set when no reading comes any more
        self._handing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._running: dict[Target, threading.Thread] | None = None  # None: not started
        self._targets: dict[str, Target] = {}  # by URL: an address is scraped once, for the first job that names it
        self._sources: list[tuple[Source, Discovery | None]] = []
        stated = [url_job(urls, interval_s, timeout_s)] if urls else []
        for job in (*stated, *jobs):
            if job.endpoints:
                self._sources.append((Source(job, "static", job.endpoints), None))
            if job.files:
                self._sources.append((Source(job, FileDiscovery.kind), FileDiscovery(job)))
            if job.kubernetes:
                self._sources.append((Source(job, KubernetesDiscovery.kind), KubernetesDiscovery(job)))
        self._settle()

    def start(self) -> None:
        self._handing = threading.Thread(target=self._outbox.run, args=(self._handed,), name="hand over", daemon=True)
        self._handing.start()
        with self._lock:
            self._running = {}
            self._settle()
        for source, discovery in self._sources:
            if discovery is not None:
                name = f"discover {source.job.name} {source.kind}"
                threading.Thread(target=self._discover, args=(source, discovery), name=name, daemon=True).start()

    def stop(self) -> None:
        """Return when no scrape is under way any more."""
        self._stopping.set()
        with self._lock:
            running = dict(self._running or {})
            for target in running:
                target.stopping.set()
        until = time.monotonic() + max((target.job.timeout_s for target in running), default=0.0) + 1
        for thread in running.values():
            thread.join(max(0.0, until - time.monotonic()))
        self._handed.set()
        if self._handing is not None:
            self._handing.join(_LAST_S)

    def status(self) -> list[dict[str, object]]:
        """One object a target: job, address, labels, engine, whether the last scrape worked (null before the first), scrapes,
        failures, last error, the time of the last sample and its age, and how late it runs."""
        now = self._clock()
        with self._lock:
            return [target.status(now) for target in self._targets.values()]

    def reached(self) -> dict[str, tuple[str, Access]]:
        """Where each target is asked, and how, by its name."""
        with self._lock:
            return {one.endpoint.instance: (one.endpoint.url, one.job.access) for one in self._targets.values()}

    def sources(self) -> list[dict[str, object]]:
        """One object a place where targets come from: job, kind (static, file, kubernetes), targets, what is wrong."""
        with self._lock:
            return [
                {
                    "job": source.job.name,
                    "kind": source.kind,
                    "targets": len(source.endpoints),
                    "left_out": source.left_out,
                    "problem": source.problem,
                    "changed_unix_ns": source.told_unix_ns,
                }
                for source, _ in self._sources
            ]

    def _discover(self, source: Source, discovery: Discovery) -> None:
        """Whatever it meets outside, a discovery goes on; what it knew stays."""
        while not self._stopping.is_set():
            try:
                discovery.run(self._stopping, partial(self._found, source))
            except Exception as error:
                LOG.exception("discovery of %s fails", source.job.name)
                with self._lock:
                    source.problem = f"{type(error).__name__}: {error}"[:200]
                self._stopping.wait(_AGAIN_S)

    def _found(self, source: Source, endpoints: Sequence[Endpoint], problem: str) -> None:
        """What a discovery tells; nothing any more once this stops."""
        with self._lock:
            if not self._stopping.is_set():
                source.endpoints, source.problem = endpoints, problem
                source.told_unix_ns = self._clock()
                self._settle()

    def _settle(self) -> None:
        """Make the targets those of the sources: begin what is new, end what is gone, leave alone what stays."""
        wanted: dict[str, tuple[Job, Endpoint]] = {}
        names: set[str] = set()
        for source, _ in self._sources:
            source.left_out = 0
            for endpoint in source.endpoints:
                if endpoint.url in wanted:
                    continue
                if len(wanted) >= self._most:
                    source.left_out += 1
                    continue
                own = _named(endpoint, names)
                names.add(own.instance)
                wanted[endpoint.url] = (source.job, own)
        for url, target in list(self._targets.items()):
            if wanted.get(url) != (target.job, target.endpoint):
                target.stopping.set()
                del self._targets[url]
                if self._running is not None:
                    self._running.pop(target, None)
        for url, (job, endpoint) in wanted.items():
            if url not in self._targets:
                self._targets[url] = Target(job, endpoint)
            target = self._targets[url]
            if self._running is not None and target not in self._running and not self._stopping.is_set():
                reading = Reading(target, self._profiles, self._outbox.put, self._clock)
                thread = threading.Thread(target=reading.run, name=f"scrape {endpoint.instance}", daemon=True)
                self._running[target] = thread
                thread.start()


def _named(endpoint: Endpoint, taken: set[str]) -> Endpoint:
    """Two ports of one pod are two instances: the second one carries its port, else its whole address."""
    if endpoint.instance not in taken:
        return endpoint
    port = f":{urlsplit(endpoint.url).port or ''}"
    by_port = endpoint.shown_url if endpoint.instance.endswith(port) else f"{endpoint.instance}{port}"
    return replace(endpoint, instance=by_port if by_port not in taken else endpoint.shown_url)
