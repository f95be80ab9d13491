"""Asking engines about themselves: version, model and settings from the servers whose metrics are scraped.

One thread for all, a few small requests when an engine's process is seen first and once an hour after; never elsewhere than the
address that is scraped, with the token and the certificates of its job, no redirect followed. What an engine does not answer stays
unknown.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from phasewise.collector.exposition import Exposition
from phasewise.collector.fact_texts import of_answer
from phasewise.collector.profiles import Profiles
from phasewise.collector.scraping.http import Refused, client_of, read_body, unreached
from phasewise.collector.scraping.jobs import Access
from phasewise.rules.engine_profile import EngineProfile
from phasewise.rules.errors import InputError

log = logging.getLogger(__name__)
TIMEOUT_S = 2.0
BODY_BYTES = 4 << 20
AGAIN_NS = 3600 * 10**9  # what was answered is asked for again
RETRY_NS = 60 * 10**9  # after an answer that failed
MOST = 10_000  # addresses remembered
_GONE = frozenset({401, 403, 404, 405, 501})  # it does not tell: no fault, and no reason to ask again soon


@dataclass(slots=True)
class _Asked:
    """One address: which process answered last, and what came of asking it."""

    engine: str
    start_unix_s: float | None = None
    due_unix_ns: int = 0
    answered: list[str] = field(default_factory=list)
    settings: int = 0
    last_error: str = ""
    last_unix_ns: int = 0


class FactReader:
    """Hands what servers tell to `on_facts(scrape name, Unix nanoseconds, settings)`.

    reached: scrape name -> URL that is scraped, and how; asked each time, so that targets may come and go.
    """

    def __init__(
        self,
        reached: Callable[[], Mapping[str, tuple[str, Access]]],
        engines: Mapping[str, EngineProfile],
        on_facts: Callable[[str, int, Mapping[str, object]], object],
        clock: Callable[[], int] = time.time_ns,
        *,
        pause_s: float = 1.0,
    ) -> None:
        self._reached = reached
        self._profiles = Profiles(engines)
        self._on_facts = on_facts
        self._clock = clock
        self._pause_s = pause_s
        self._asked: dict[str, _Asked] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def saw(self, samples: Iterable[Exposition]) -> None:
        """Scrapes that worked: who answers there, and since when its process runs."""
        for one in samples:
            name, started = one.samples.select("instance", "process_start_unix_s").row(0)
            profile = self._profiles.by_id.get(one.engine)
            if profile is None or profile.facts is None or not profile.facts.endpoints:
                continue
            with self._lock:
                known = self._asked.get(name)
                if known is None and len(self._asked) >= MOST:
                    continue
                if known is None or known.engine != one.engine:
                    known = self._asked[name] = _Asked(one.engine, started)
                if known.start_unix_s != started:  # restarted: its settings may be others
                    known.start_unix_s, known.due_unix_ns = started, 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine facts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing is asked any more."""
        self._stopping.set()
        if self._thread:
            self._thread.join(TIMEOUT_S + 1)

    def status(self) -> list[dict[str, object]]:
        """One object an address: engine, which paths answered, how many settings they told, the last error and when it was asked."""
        with self._lock:
            return [
                {
                    "instance": name,
                    "engine": one.engine,
                    "answered": list(one.answered),
                    "settings": one.settings,
                    "last_error": one.last_error,
                    "last_unix_ns": one.last_unix_ns or None,
                }
                for name, one in sorted(self._asked.items())
            ]

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_s):
            self.ask_due()

    def ask_due(self) -> None:
        """Ask those whose time has come."""
        reached, now = self._reached(), self._clock()
        with self._lock:
            due = [(name, one) for name, one in self._asked.items() if one.due_unix_ns <= now and name in reached]
        for name, one in due:
            if self._stopping.is_set():
                return
            one.due_unix_ns, one.last_unix_ns = now + AGAIN_NS, now
            started = one.start_unix_s
            settings = self._ask(one, *reached[name])
            if not settings or one.start_unix_s != started:
                continue
            try:
                self._on_facts(name, self._clock(), settings)
            except Exception as error:
                one.last_error, one.due_unix_ns = f"{type(error).__name__}: {error}"[:200], now + RETRY_NS
                log.warning("what %s tells of itself is not stored: %s", name, one.last_error)

    def _ask(self, one: _Asked, url: str, access: Access) -> Mapping[str, object]:
        try:
            with client_of(access, TIMEOUT_S, url) as client:
                return self._ask_with(client, one, url, access)
        except InputError as error:  # the authority's certificate cannot be read
            one.last_error, one.due_unix_ns = str(error)[:200], self._clock() + RETRY_NS
            return {}

    def _ask_with(self, client: httpx.Client, one: _Asked, url: str, access: Access) -> Mapping[str, object]:
        profile = self._profiles.by_id[one.engine]
        assert profile.facts is not None
        parts = urlsplit(url)
        documents: list[object] = []
        answered, error = [], ""
        for path in profile.facts.endpoints:
            try:
                documents.append(_answer(client, f"{parts.scheme}://{parts.netloc}{path}", access))
                answered.append(path)
            except Refused as fault:
                if fault.status not in _GONE:
                    error = f"{path}: {fault}"
            except httpx.HTTPError as fault:
                error = f"{path}: {unreached(fault)}"[:200]
            except ValueError as fault:
                error = f"{path}: {fault}"[:200]
        if error:
            one.due_unix_ns = self._clock() + RETRY_NS
        settings = of_answer(profile, profile.facts, documents, None).settings
        one.answered, one.last_error, one.settings = answered, error, len(settings)
        return settings


def _answer(client: httpx.Client, url: str, access: Access) -> object:
    """One JSON answer; ValueError where it is none, otherwise as `read_body`."""
    try:
        document = json.loads(read_body(client, url, access, TIMEOUT_S, BODY_BYTES))
    except RecursionError:
        raise ValueError("the answer is nested too deep") from None
    if not isinstance(document, dict | list):
        raise ValueError("the answer is no JSON object")
    return document
