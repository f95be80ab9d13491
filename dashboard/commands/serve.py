"""`phasewise serve`: two processes, one ready line, one orderly end.

receive takes OTLP into the journal, store owns the database and shows it. Each is started again alone when it ends by itself;
the other does not notice. SIGHUP makes both read keys and certificates again. Nothing runs half: where a port, the directory or a lock refuses, nothing stays behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from phasewise.collector.access_keys import LOCAL_KEY, LOCAL_SCOPES, new_key
from phasewise.collector.audit import audit
from phasewise.collector.tls import SETTINGS as TLS
from phasewise.collector.tls import Tls
from phasewise.dashboard.commands.configuration import NAME
from phasewise.dashboard.commands.connection import find_server, make_directory
from phasewise.dashboard.commands.keys import require_keys
from phasewise.dashboard.commands.ports import Wanted, is_loopback, require_free
from phasewise.dashboard.commands.store_process import StoreService, StoreSettings
from phasewise.dashboard.commands.supervisor import Child
from phasewise.rules.errors import InputError, MachineError

READY_TIMEOUT_S = 120.0
DRAIN_S = 9.0
RECEIVE_DRAIN_S = 3.0  # of these, for receive at least
LOOK_S = 0.1
CONTENT_VARIABLE = "PHASEWISE_KEEP_CONTENT"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything `serve` was told."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 8080
    otlp_grpc_port: int = 4317
    otlp_http_port: int = 4318
    scrape: tuple[str, ...] = ()
    all_in_one: bool = False
    hardware: Mapping[str, object] = field(default_factory=dict)
    slo: str = ""
    scrape_jobs: Sequence[Mapping[str, object]] = ()
    tls: Tls | None = None
    content: bool = False
    retention: Mapping[str, float] = field(default_factory=dict)
    on_corruption: str = "quarantine"


def keeps_content(configured: bool, environment: Mapping[str, str]) -> bool:
    """Whether prompts and answers are stored: only where file and environment both say so, for neither alone is said by mistake
    on every machine that the other reaches."""
    told = environment.get(CONTENT_VARIABLE, "")
    if told not in ("", "0", "1"):
        raise InputError(CONTENT_VARIABLE, repr(told), "is neither 0 nor 1")
    if configured != (told == "1"):
        said, missing = (
            (NAME, f"{CONTENT_VARIABLE}=1")
            if configured
            else (CONTENT_VARIABLE, f"content = true in [serve] of {NAME}")
        )
        raise InputError(
            said,
            "content",
            "says to keep prompts and answers, alone",
            f"to keep them say {missing} too; else say neither",
        )
    return configured


def run(options: Namespace) -> int:
    """Serves until SIGTERM or SIGINT."""
    os.umask(0o077)  # what is written here belongs to whoever runs it, and to nobody else
    tls = Tls.of({name: getattr(options, name) for name in TLS})
    has_keys = require_keys(options.data)
    if not is_loopback(options.host) and not has_keys and not options.insecure_no_auth:
        raise InputError(
            "--host",
            options.host,
            "can be reached from other machines, and there are no access keys",
            f"make one: phasewise keys create --data {options.data}; or say --insecure-no-auth",
        )
    settings = ServeSettings(
        options.data.resolve(),
        options.host,
        options.port,
        options.otlp_grpc_port,
        options.otlp_http_port,
        tuple(options.scrape),
        options.all_in_one,
        dict(getattr(options, "hardware", {})),
        getattr(options, "slo", ""),
        getattr(options, "scrape_jobs", ()),
        tls,
        keeps_content(bool(getattr(options, "content", False)), os.environ),
        dict(getattr(options, "retention", {})),
        options.on_corruption,
    )
    make_directory(settings.data)
    with owned(settings.data):
        require_free(
            settings.host,
            (
                Wanted(settings.port, "--port"),
                Wanted(settings.otlp_grpc_port, "--otlp-grpc-port"),
                Wanted(settings.otlp_http_port, "--otlp-http-port"),
            ),
        )
        return Supervisor(settings).run()


@contextlib.contextmanager
def owned(data: Path) -> Iterator[None]:
    """The directory is ours until the end; MachineError naming the process that has it."""
    handle: IO[str] = (data / "serve.lock").open("a+", encoding="utf-8")
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MachineError(_taken(data, handle)) from None
        # A file system without working locks lets both in; the running server itself then tells.
        if find_server(data):
            raise MachineError(_taken(data, handle))
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield
    finally:
        handle.close()


def _taken(data: Path, handle: IO[str]) -> str:
    handle.seek(0)
    pid = handle.read().strip() or "unknown"
    try:
        url = json.loads((data / "serve.json").read_text(encoding="utf-8"))["url"]
        where = f" at {url}"
    except (OSError, ValueError, KeyError):
        where = ""
    return f"{data} is served by process {pid}{where}; stop it, or choose another directory with --data"


class Supervisor:
    """Starts both, says so, watches, drains."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.stopping = threading.Event()
        self.hung_up = threading.Event()
        # Lets the command line of the same user in: whoever can read serve.json can read all the data beside it.
        local, self.local_token = new_key(LOCAL_SCOPES, now_unix_ns=time.time_ns(), key_id=LOCAL_KEY)
        shared: dict[str, object] = {"local_key_sha256": local.secret_sha256, "content": settings.content}
        self.shared = shared | (settings.tls.settings() if settings.tls else {})
        self.receive = Child(
            "receive",
            "phasewise.collector.receiver",
            {
                "data": str(settings.data),
                "host": settings.host,
                "grpc_port": settings.otlp_grpc_port,
                "http_port": settings.otlp_http_port,
                **self.shared,
            },
        )
        self.store = Child("store", "phasewise.dashboard.commands.store_process", {})
        self.service: StoreService | None = None
        self.info_path = settings.data / "serve.json"

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, lambda *_: self.hung_up.set())
        try:
            failed = self._start()
            if failed is None:
                self._watch()
        finally:
            self._drain()
        return failed or 0

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.stopping.is_set():
            # Asked twice: go now. The journal is durable, so nothing that was acknowledged is lost.
            for child in (self.receive, self.store):
                if child.process:
                    child.process.kill()
            self.info_path.unlink(missing_ok=True)
            os._exit(128 + number)
        self.stopping.set()

    def _start(self) -> int | None:
        """Both ready and said so; else the exit code of the one that refused (its line is on stderr already)."""
        self.receive.start()
        if not self._until_ready([self.receive]):
            return self._refusal(self.receive)
        assert self.receive.ready is not None
        ports = {name: int(self.receive.ready[name]) for name in ("otlp_grpc_port", "otlp_http_port")}
        # A restart must come back on the same ports, also where any free one was asked for.
        self.receive.settings = {
            **self.receive.settings,
            "grpc_port": ports["otlp_grpc_port"],
            "http_port": ports["otlp_http_port"],
        }
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        info: dict[str, object] = {"pid": os.getpid(), "host": self.settings.host, **ports}
        told: dict[str, object] = {
            "data": str(self.settings.data),
            "host": self.settings.host,
            "port": self.settings.port,
            "scrape": list(self.settings.scrape),
            "scrape_jobs": [dict(job) for job in self.settings.scrape_jobs],
            "hardware": dict(self.settings.hardware),
            "slo": self.settings.slo,
            "retention": dict(self.settings.retention),
            "on_corruption": self.settings.on_corruption,
            "serve_info": info,
            **self.shared,
        }
        if self.settings.all_in_one:
            self.service = StoreService(StoreSettings.from_json(json.dumps(told)))
            port = self.service.start()
        else:
            self.store.settings = told
            self.store.start()
            if not self._until_ready([self.receive, self.store]):
                return self._refusal(self.store)
            assert self.store.ready is not None
            port = int(self.store.ready["port"])
            self.store.settings = {**told, "port": port}
        scheme = "https" if self.settings.tls else "http"
        line = {"ready": True, "url": f"{scheme}://{host}:{port}", "port": port, **ports}
        tls = {"tls_cert": str(self.settings.tls.cert)} if self.settings.tls else {}
        self._write_info(line | info | tls | {"local_key": self.local_token})
        how = f"content {'kept' if self.settings.content else 'dropped'}, {'TLS' if tls else 'plain text'}"
        audit(self.settings.data, "started", time.time_ns(), detail=f"host {self.settings.host}, {how}")
        print(json.dumps(line), flush=True)
        return None

    def _until_ready(self, children: list[Child]) -> bool:
        """All said that they are ready; False where one ended, a signal came, or it took too long. Opening a store may take as long as it
        takes: one that is ended before it is brought up to date would begin anew each time."""
        until = time.monotonic() + READY_TIMEOUT_S
        told = False
        while not self.stopping.is_set():
            if all(child.poll_ready() for child in children):
                return True
            if any(child.exit_code is not None for child in children):
                return False
            if time.monotonic() > until:
                if not any(child.opening for child in children):
                    return False
                if not told:
                    _say(f"the store is still being opened after {READY_TIMEOUT_S:.0f} s; spans are taken in meanwhile")
                    told = True
            self.stopping.wait(LOOK_S / 2)
        return False

    def _refusal(self, child: Child) -> int:
        if self.stopping.is_set():
            return 0
        code = child.exit_code
        if code is None:
            _say(f"{child.name} was not ready after {READY_TIMEOUT_S:.0f} s; nothing was started")
            return 4
        if code not in (2, 4):
            _say(f"{child.name} ended with code {code} before it was ready; nothing was started")
        return code if code in (2, 4) else 4

    def _write_info(self, info: dict[str, object]) -> None:
        partial = self.info_path.with_suffix(".json.new")
        partial.write_text(json.dumps(info) + "\n", encoding="utf-8")
        partial.chmod(0o600)
        partial.replace(self.info_path)

    def _watch(self) -> None:
        """Starts a child again that ended by itself, later each time; the other one goes on."""
        children = [self.receive] if self.settings.all_in_one else [self.receive, self.store]
        while not self.stopping.wait(LOOK_S):
            if self.hung_up.is_set():
                self.hung_up.clear()
                self._reload(children)
            now = time.monotonic()
            for child in children:
                if child.exit_code is None:
                    if child.ready is None and child.poll_ready():
                        _say(f"{child.name} is ready again")
                elif not child.next_start_s:
                    pause_s = child.pause_s()
                    child.next_start_s = now + pause_s
                    _say(f"{child.name} ended with code {child.exit_code}; it is started again in {pause_s:g} s")
                elif now >= child.next_start_s:
                    child.next_start_s = 0.0
                    child.start()

    def _reload(self, children: list[Child]) -> None:
        """Keys and certificates, in every process."""
        for child in children:
            if child.process and child.exit_code is None and child.ready:
                child.process.send_signal(signal.SIGHUP)
        if self.service:
            self.service.reload()

    def _drain(self) -> None:
        """The store first: receive takes spans into the journal until the store is gone, and is away for the shortest time it can.

        What it acknowledges after the store's last step is durable, and read by the next start or by any verb on the directory.
        """
        until = time.monotonic() + DRAIN_S
        if self.service:
            self.service.stop()
        self.store.terminate()
        self.store.wait_at_most(until - RECEIVE_DRAIN_S)
        self.receive.terminate()
        self.receive.wait(until)
        self.store.wait(until)
        self.info_path.unlink(missing_ok=True)


def _say(text: str) -> None:
    print(f"phasewise: {text}", file=sys.stderr, flush=True)
