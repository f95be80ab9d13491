"""The store process: the one owner of the DuckDB file. Journal reader, writer, scraper, API and pages live here.

    python -m phasewise.dashboard.commands.store_process '{"data": DIR, "host": "127.0.0.1", "port": 8080, "scrape": [...]}'

prints one JSON line when it answers that the store is being opened, one when it is ready; SIGTERM drains it, SIGHUP makes it read
keys and certificates again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise.collector.process_memory import keep_memory
from phasewise.collector.tls import SETTINGS, Tls
from phasewise.dashboard.commands.configuration import NAME, require_known
from phasewise.dashboard.commands.connection import make_directory
from phasewise.dashboard.commands.ports import listener
from phasewise.rules.errors import InputError, MachineError, PhasewiseError
from phasewise.rules.secret_text import hidden, log_to_stderr

if TYPE_CHECKING:
    from phasewise.collector.access import Door
    from phasewise.collector.writer import Writer

LOG = logging.getLogger("phasewise.store")
RELOAD_LOOK_S = 0.5
IDLE_PAUSE_S = 0.2  # a settled row is promised 2 s after its last span
# From the beginning of one pass to that of the next, while it keeps up: half of what a small pass costs does not depend on how many spans
# it takes.
PASS_EVERY_S = 0.4
LONGEST_PAUSE_S = 2.0  # as long as a broken store waits before it opens its file once more
LOG_AGAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What the store process is told; built once, from the supervisor's JSON."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 8080
    scrape: tuple[str, ...] = ()
    serve_info: Mapping[str, object] = field(default_factory=dict)
    hardware: Mapping[str, object] = field(default_factory=dict)
    slo: str = ""
    scrape_jobs: Sequence[Mapping[str, object]] = ()  # tables of [[scrape]]
    content: bool = False
    local_key_sha256: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    retention: Mapping[str, float] = field(default_factory=dict)
    on_corruption: str = "quarantine"

    @classmethod
    def from_json(cls, text: str) -> StoreSettings:
        told: dict[str, Any] = json.loads(text)
        told |= {"data": Path(told["data"]), "scrape": tuple(told.get("scrape", ()))}
        return cls(**told)


def pause_after(changes: int, behind: bool, spent_s: float) -> float:
    """Seconds until the next pass, after one that took `spent_s`."""
    if behind:  # also after a pass that only brought what makes no rows
        return 0.0
    return max(0.0, PASS_EVERY_S - spent_s) if changes else IDLE_PAUSE_S


def keep_writing(writer: Writer, stop: threading.Event) -> None:
    """Steps the writer until told to stop, then once more until the journal is read to its end.

    Nothing that came from outside may end the process: a fault is logged and the step tried again, more slowly each time. A
    fault that stays (a full disk) is logged once, then every 10 minutes; health says it all the time.
    """
    pause_s = IDLE_PAUSE_S
    told, told_at = "", 0.0
    while not stop.is_set():
        try:
            started = time.monotonic()
            changes = writer.step()
            writer.shorten_log()
            pause_s = pause_after(changes, writer.behind, time.monotonic() - started)
            if told:
                LOG.info("the writer works again")
                told = ""
        except Exception as error:
            pause_s = min(LONGEST_PAUSE_S, max(IDLE_PAUSE_S, pause_s * 2))
            if type(error).__name__ != told or time.monotonic() - told_at > LOG_AGAIN_S:
                LOG.exception("the writer failed and tries again until it works")
                told, told_at = type(error).__name__, time.monotonic()
        stop.wait(pause_s)
    try:
        while writer.step() or writer.behind:
            pass
    except Exception:
        LOG.exception("the last step of the writer failed; the journal keeps what it had not stored")


@dataclass(slots=True)
class StoreService:
    """Opened store with everything that runs beside it; `start` returns the port, `stop` drains. tell: is told the port once
    something answers there."""

    settings: StoreSettings
    clock: Callable[[], int] = time.time_ns
    tell: Callable[[int], object] = lambda port: None
    _stops: list[Callable[[], None]] = field(default_factory=list)
    _end_http: Callable[[], None] | None = None
    _door: Door | None = None
    _tls: tuple[Tls, ssl.SSLContext] | None = None

    def start(self) -> int:
        """Opens the store and serves; MachineError where port, directory or lock refuses, with nothing left running."""
        settings = self.settings
        make_directory(settings.data)
        opened = listener(settings.host, settings.port, "--port")
        self._stops.append(opened.close)
        try:
            return self._start(opened.getsockname()[1], opened)
        except BaseException:
            self.stop()
            raise

    def _start(self, port: int, opened: Any) -> int:
        from phasewise.analyzer.attribution import attributor
        from phasewise.collector.access import Door
        from phasewise.collector.access_keys import local_keys
        from phasewise.collector.exposition import Exposition
        from phasewise.collector.fact_reader import FactReader
        from phasewise.collector.recovery import open_store
        from phasewise.collector.retention import Keep
        from phasewise.collector.scrape import Scraper
        from phasewise.collector.scraping.jobs import read_jobs
        from phasewise.collector.upkeep import Upkeep
        from phasewise.collector.writer import Writer
        from phasewise.dashboard.access import Posture
        from phasewise.dashboard.api import create_app
        from phasewise.dashboard.app import attach_dash
        from phasewise.dashboard.housekeeping import UnfinishedPurge
        from phasewise.dashboard.opening import Opening
        from phasewise.dashboard.own_starts import OwnStart
        from phasewise.rules.load import load_rulebook

        settings = self.settings
        tls = Tls.of({name: getattr(settings, name) for name in SETTINGS})
        rulebook = load_rulebook()
        require_known(settings.hardware, rulebook)
        opening = Opening()
        self._serve(opening, opened, tls)
        self.tell(port)
        store, damage = open_store(settings.data, self.clock, settings.on_corruption)
        self._stops.append(store.close)
        writer = Writer(store, settings.data, rulebook, attributor(rulebook), self.clock, settings.hardware)
        writer.report_loss(damage)
        left = UnfinishedPurge(store, writer, settings.data)
        writer.tell("purge", left.status)

        start = OwnStart(store, settings.data)

        def write(stop: threading.Event) -> None:
            start.mark(writer, self.clock())
            left.go_on(self.clock())
            keep_writing(writer, stop)
            start.unmark()

        self._run("writer", write)
        upkeep = Upkeep(store, settings.data, Keep(**settings.retention), self.clock, tell=writer.report_loss)
        writer.tell("upkeep", upkeep.status)
        self._run("upkeep", upkeep.keep_up)
        jobs = read_jobs(NAME, list(settings.scrape_jobs))
        if settings.scrape or jobs:
            facts = FactReader(lambda: scraper.reached(), rulebook.engines, writer.add_answers, self.clock)

            def take(samples: list[Exposition]) -> None:
                writer.add_scrapes(samples)
                facts.saw(samples)

            scraper = Scraper(settings.scrape, rulebook.engines, take, self.clock, jobs=jobs)
            writer.watch(scraper.status, scraper.sources, facts.status)
            facts.start()
            self._stops.append(facts.stop)
            scraper.start()
            self._stops.append(scraper.stop)
        self._read_devices(writer)
        door = self._door = Door(settings.data, "store", extra=local_keys(settings.local_key_sha256), clock=self.clock)
        self._stops.append(door.close)
        posture = Posture(door, settings.host, settings.content, tls is not None)
        app = create_app(
            store,
            writer,
            rulebook,
            data_dir=settings.data,
            clock=self.clock,
            serve_info=dict(settings.serve_info),
            site_slo=settings.slo,
            posture=posture,
        )
        attach_dash(app, store, rulebook=rulebook, data_dir=settings.data, clock=self.clock)
        opening.show(app)
        return port

    def _serve(self, app: Any, opened: Any, tls: Tls | None) -> None:
        """Returns when it answers."""
        import uvicorn

        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            lifespan="on",
            server_header=False,
            ssl_context_factory=self._certificate(tls) if tls else None,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, name="http", daemon=True)
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(4)

        self._end_http = end
        while not server.started:
            if not thread.is_alive():
                raise MachineError("the HTTP server did not start; its reason stands above")
            time.sleep(0.02)

    def _read_devices(self, writer: Writer) -> None:
        """This machine's devices, where it has any: doctor says why not."""
        from phasewise.collector.nvml import NvmlSampler, open_nvml

        nvml, said = open_nvml()
        if nvml is not None:
            LOG.info("reading %s of this machine once a second", said)
            sampler = NvmlSampler(nvml, writer.add_scrapes, self.clock)
            writer.watch_also(sampler.status)
            self._run("nvml", sampler.run)

    def _certificate(self, tls: Tls) -> Callable[..., ssl.SSLContext]:
        context = tls.context()
        self._tls = tls, context
        return lambda *_: context

    def reload(self) -> None:
        """On SIGHUP: keys and certificate as their files are now. What cannot be used is said, and the old one goes on."""
        if self._door:
            self._door.reload()
        if self._tls:
            tls, context = self._tls
            try:
                tls.renew(context)
            except InputError as error:
                LOG.error("the certificate stays as it was: %s", error)
                return
        LOG.info("keys and certificates were read again")

    def _run(self, name: str, work: Callable[[threading.Event], None]) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=work, args=(stop,), name=name, daemon=True)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(4)

        self._stops.append(end)

    def stop(self) -> None:
        """Ends what was started: the pages, then the last first. No page without a store, no scrape without a writer."""
        if self._end_http:
            self._end_http()
            self._end_http = None
        while self._stops:
            self._stops.pop()()


def main(argument: str) -> int:
    """The process; returns its exit code."""
    keep_memory()
    log_to_stderr("%(asctime)s %(levelname)s %(name)s %(message)s")
    for chatty in ("httpx", "httpcore"):  # a line for every scrape otherwise
        logging.getLogger(chatty).setLevel(logging.WARNING)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    os.umask(0o077)
    service = StoreService(
        StoreSettings.from_json(argument),
        tell=lambda port: print(json.dumps({"opening": True, "port": port}), flush=True),
    )
    hang_up = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: hang_up.set())
    try:
        port = service.start()
    except PhasewiseError as error:
        print(f"phasewise: {hidden(str(error))}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"ready": True, "port": port}), flush=True)
    while not done.wait(RELOAD_LOOK_S):
        if hang_up.is_set():
            hang_up.clear()
            service.reload()
    service.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
