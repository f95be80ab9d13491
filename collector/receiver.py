"""The process `receive`: sockets to journal, and nothing else. `python -m phasewise.collector.receiver '{"data": DIR, ...}'`.

When both ports answer, one JSON line on stdout says so and names them. Counters go to `DIR/receive.json` about once a second and
at the end. Compiled code lies in `DIR/compiled`, or where NUMBA_CACHE_DIR says. SIGTERM and SIGINT stop accepting, write what is
queued, and exit 0 within 10 s; a second one exits at once. SIGHUP reads keys and certificates again. A busy port, a locked
journal or a directory without permission is one line on stderr and exit code 4, and nothing was started. The process ends when
its parent does.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise.collector.limits import INTAKE_LIMITS
from phasewise.collector.process_memory import keep_memory
from phasewise.rules.errors import InputError, MachineError, PhasewiseError
from phasewise.rules.secret_text import hidden, log_to_stderr

if TYPE_CHECKING:
    from phasewise.collector.access import Door
    from phasewise.collector.committer import Committer
    from phasewise.collector.idle_connections import IdleConnections
    from phasewise.collector.intake import Intake
    from phasewise.collector.journal import JournalWriter
    from phasewise.collector.receipts import Receipts
    from phasewise.collector.receiver_grpc import GrpcServer
    from phasewise.collector.receiver_http import HttpServer
    from phasewise.collector.scanners import TraceScanner
    from phasewise.collector.tls import Tls

_REPORT_S = 1.0
_STOP_S = 1.0  # for each front to hand out its last replies
_LOOPBACK = ("127.", "::1")
_LARGEST_WINDOW = Path("/proc/sys/net/core/rmem_max")
log = logging.getLogger("phasewise.receive")


_KINDS: dict[str, type] = {
    "host": str,
    "grpc_port": int,
    "http_port": int,
    "journal_limit_bytes": int,
    "content": bool,
    "follow_parent": bool,
    "local_key_sha256": str,
    "tls_cert": str,
    "tls_key": str,
    "tls_client_ca": str,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set.

    data: directory of the journal and of receive.json; ports: 0 takes a free one; journal_limit_bytes: None takes the smaller of
    8 GiB and 10 % of the volume; content: keep prompt and answer text (credentials are removed all the same); follow_parent: end
    when the parent process ends; local_key_sha256: of the secret by which the command line of the same user comes in;
    tls_*: PEM files, see `collector.tls`.
    """

    data: Path
    host: str = "127.0.0.1"
    grpc_port: int = 4317
    http_port: int = 4318
    journal_limit_bytes: int | None = None
    content: bool = False
    follow_parent: bool = True
    local_key_sha256: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""

    @classmethod
    def parse(cls, text: str) -> Settings:
        """From the JSON object of the command line."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InputError("receive settings", "", f"are not JSON: {error}") from None
        if not isinstance(found, dict) or not isinstance(found.get("data"), str):
            raise InputError("receive settings", "data", "is missing", 'give {"data": DIRECTORY, ...}')
        known = {f.name for f in fields(cls)}
        for name in found:
            if name not in known:
                raise InputError("receive settings", name, "is unknown", f"known: {', '.join(sorted(known))}")
        for name, kind in _KINDS.items():
            if name in found and (not isinstance(found[name], kind) or isinstance(found[name], bool) != (kind is bool)):
                raise InputError("receive settings", name, f"{found[name]!r} is no {kind.__name__}")
        for name in ("grpc_port", "http_port"):
            if not 0 <= found.get(name, 0) <= 65535:
                raise InputError("receive settings", name, f"{found[name]} is not a port", "give 0 to 65535")
        return cls(**{**found, "data": Path(found["data"])})


class _NoPandas(importlib.abc.MetaPathFinder):
    """pyarrow imports pandas when it is installed, to ask whether a list is one of its arrays: two seconds and 70 MB."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used in this process", name=name)


def _bound_window(listener: socket.socket) -> None:
    """What each connection inherits, instead of a window that grows from little to all that the system allows: who was refused comes
    anew, and each step of a window costs this process, as what lies unread costs memory. Where the system allows no such window to
    be set, its own is larger."""
    try:
        allowed_bytes = int(_LARGEST_WINDOW.read_text())
    except (OSError, ValueError):  # no Linux
        return
    if allowed_bytes >= INTAKE_LIMITS.socket_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, INTAKE_LIMITS.socket_bytes)


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """A listening TCP socket. Raises MachineError naming port and setting when it is busy or the address is not ours."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bound_window(listener)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # who sends nothing takes no place, for the first second
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # which each connection inherits
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(INTAKE_LIMITS.unread_s * 1000))
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise _busy(host, port, setting, error.strerror or str(error)) from error


def _busy(host: str, port: int, setting: str, why: str) -> MachineError:
    option = "--" + setting.replace("grpc_port", "otlp-grpc-port").replace("http_port", "otlp-http-port")
    return MachineError(f"cannot listen on {host} port {port}: {why} (stop what uses it, or set {option})")


@dataclass(slots=True)
class _Process:
    """What runs, from the first port to the last reply."""

    settings: Settings
    receipts: Receipts
    journal: JournalWriter
    committer: Committer
    intake: Intake
    scanner: TraceScanner
    grpc_server: GrpcServer
    http_server: HttpServer
    door: Door
    tls: Tls | None
    grpc_port: int
    http_port: int
    started_unix_ns: int
    state: str = "ready"
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    renewals: set[asyncio.Task[None]] = field(default_factory=set)

    def reload(self) -> None:
        """On SIGHUP: keys and certificates as their files are now. What cannot be used is said, and the old ones go on."""
        self.door.reload()
        if self.tls is None:
            return
        try:
            self.tls.context()
        except InputError as error:
            log.error("the certificate stays as it was: %s", error)
            return
        self.grpc_server.renew(self.tls)
        task = asyncio.get_running_loop().create_task(self.http_server.renew())
        self.renewals.add(task)
        task.add_done_callback(self.renewals.discard)
        log.info("keys and certificates were read again")

    def report(self) -> None:
        """Write receive.json; a full disk costs the report, not the process."""
        from phasewise.collector.receipts import write_json

        try:
            facts = {
                "state": self.state,
                "pid": os.getpid(),
                "unix_ns": time.time_ns(),
                "started_unix_ns": self.started_unix_ns,
                "otlp_grpc_port": self.grpc_port,
                "otlp_http_port": self.http_port,
                "keys_required": self.door.required,
                "keys_trouble": self.door.trouble,
                **self.receipts.facts(),
                "trace_scanner": self.scanner.facts(),
                "journal": self.journal.facts(),
            }
            write_json(self.settings.data / "receive.json", facts)
        except OSError as error:
            log.warning("cannot write receive.json: %s", error)


async def _open(settings: Settings) -> _Process:
    """Everything that can be refused comes before anything answers."""
    from phasewise.collector.access import Door
    from phasewise.collector.access_keys import local_keys
    from phasewise.collector.committer import Committer
    from phasewise.collector.intake import Intake
    from phasewise.collector.journal import JournalWriter
    from phasewise.collector.receipts import Receipts
    from phasewise.collector.receiver_grpc import GrpcServer
    from phasewise.collector.receiver_http import HttpFront, HttpServer
    from phasewise.collector.redact import RedactionPolicy
    from phasewise.collector.scanners import TraceScanner
    from phasewise.collector.tls import SETTINGS, Tls

    _prefer_jemalloc()
    tls = Tls.of({name: getattr(settings, name) for name in SETTINGS})
    listener = bound_socket(settings.host, settings.http_port, "http_port")
    bound_socket(settings.host, settings.grpc_port, "grpc_port").close()  # gRPC itself would not say why
    host = listener.getsockname()[0]
    journal = JournalWriter(settings.data / "journal", settings.journal_limit_bytes)
    receipts = Receipts()
    scanner = TraceScanner()
    committer = Committer(journal, receipts, INTAKE_LIMITS.queue_rows, time.time_ns)
    policy = RedactionPolicy(content=settings.content)
    intake = Intake(committer, receipts, INTAKE_LIMITS, policy, scan=scanner, is_quick=scanner.is_compiled)
    door = Door(settings.data, "receive", extra=local_keys(settings.local_key_sha256))
    grpc_server = GrpcServer(intake, door)
    try:
        address = f"[{host}]" if ":" in host else host
        grpc_port = grpc_server.bind(f"{address}:{settings.grpc_port}", tls)
    except RuntimeError as error:
        raise _busy(settings.host, settings.grpc_port, "grpc_port", "it was taken meanwhile") from error
    http_server = HttpServer(listener, HttpFront(intake, door), INTAKE_LIMITS, tls)
    http_port = int(listener.getsockname()[1])
    # Only now that nothing can be refused any more: it may start a process.
    scanner.start(Path(os.environ.get("NUMBA_CACHE_DIR") or settings.data / "compiled"))
    return _Process(
        settings,
        receipts,
        journal,
        committer,
        intake,
        scanner,
        grpc_server,
        http_server,
        door,
        tls,
        grpc_port,
        http_port,
        time.time_ns(),
    )


def _prefer_jemalloc() -> None:
    """Where pyarrow has it: it gives pages back sooner and hands them out again more often than pyarrow's own choice, a third less memory."""
    import pyarrow as pa

    if "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())


async def _serve(settings: Settings) -> None:

    process = await _open(settings)
    _on_signals(process)
    await process.grpc_server.start()
    process.http_server.start()
    if not settings.host.startswith(_LOOPBACK) and settings.host != "localhost":
        if not process.door.required:
            log.warning("listening on %s without authentication: whoever reaches it can write", settings.host)
        elif process.tls is None:
            log.warning("listening on %s in plain text: keys can be read on the way; give --tls-cert", settings.host)
    process.report()
    idle = asyncio.create_task(_idle_connections(process).keep_closing())
    ready = {"ready": True, "otlp_grpc_port": process.grpc_port, "otlp_http_port": process.http_port}
    print(json.dumps(ready), flush=True)
    await _watch(process)
    idle.cancel()
    process.state = "draining"
    process.report()
    if not await process.intake.drain(INTAKE_LIMITS.drain_s):
        log.warning("some requests were still being read at the end; their senders will retry")
    await asyncio.gather(process.grpc_server.stop(_STOP_S), process.http_server.stop(_STOP_S))
    process.intake.close()
    process.door.close()
    written = process.committer.close(_STOP_S)
    process.state = "stopped"
    process.report()
    if written:
        process.journal.close()
    else:
        log.warning("the disk did not answer in time; what was not written was not acknowledged")


def _idle_connections(process: _Process) -> IdleConnections:
    from phasewise.collector.idle_connections import IdleConnections

    ports = {
        process.grpc_port: process.grpc_server.under_way,
        process.http_port: process.http_server.front.under_way,
    }
    return IdleConnections(ports, INTAKE_LIMITS.connections)


async def _watch(process: _Process) -> None:
    """Report until it is time to stop: a signal, the end of the parent, or the loss of a front."""
    parent = os.getppid()
    while not process.stop.is_set():
        try:
            await asyncio.wait_for(process.stop.wait(), _REPORT_S)
        except TimeoutError:
            process.report()
        if process.settings.follow_parent and os.getppid() != parent:
            log.warning("the parent process is gone: stopping")
            return
        if process.http_server.failed:
            raise MachineError("the HTTP server ended by itself")


def _on_signals(process: _Process) -> None:
    stop = process.stop

    def handle() -> None:
        if stop.is_set():
            os._exit(1)  # what was acknowledged is on the disk already
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)
    loop.add_signal_handler(signal.SIGHUP, process.reload)


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 stopped as asked, 2 wrong settings, 4 the machine refuses."""
    os.umask(0o077)
    keep_memory()
    log_to_stderr("%(asctime)s receive %(levelname)s %(message)s")
    sys.meta_path.insert(0, _NoPandas())
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a busy port is told by us, in one line
    try:
        if len(arguments) != 1:
            raise InputError("receive", "", "takes one argument, a JSON object of settings")
        asyncio.run(_serve(Settings.parse(arguments[0])))
    except PhasewiseError as error:
        print(f"phasewise receive: {hidden(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a front's own threads must not keep the process beyond its last reply
