"""`phasewise demo`: two recordings of a real vLLM go over the real sockets into a server of their own, and are judged; then the
instrumented engine runs live (`live_run.py`).

Nothing is computed here: the cards come from the server's API, the expected answer from the recording's facts.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phasewise.dashboard.commands.connection import Server, make_directory
from phasewise.dashboard.commands.live_run import run_live
from phasewise.dashboard.commands.otlp import reachable, trace_sender
from phasewise.dashboard.commands.ports import is_free
from phasewise.dashboard.commands.progress import progress
from phasewise.dashboard.commands.ready_process import ready_process
from phasewise.dashboard.commands.recording import (
    DATASET,
    DATASET_FACTS,
    NAMES,
    Recording,
    Scrape,
    Traces,
    load,
    moved_page,
    replayed,
    scrape_line,
)
from phasewise.dashboard.commands.settled_verdict import Shown, settled

SETTLE_TIMEOUT_S = 60.0
GAP_NS = 10 * 10**9  # between the recordings, so that no window holds both


@dataclass(frozen=True, slots=True)
class Ports:
    """What the ready line says."""

    url: str
    host: str
    otlp_grpc_port: int
    otlp_http_port: int

    @property
    def otlp(self) -> tuple[str, int, int]:
        return self.host, self.otlp_grpc_port, self.otlp_http_port

    @property
    def otlp_url(self) -> str:
        """Endpoint of an exporter on this machine."""
        return f"http://{reachable(self.host)}:{self.otlp_grpc_port}"


@dataclass(frozen=True, slots=True)
class Replay:
    """A recording, where it is put in time, and under which names."""

    recording: Recording
    shift_ns: int
    salt: bytes

    @property
    def from_unix_ns(self) -> int:
        return self.recording.from_unix_ns + self.shift_ns

    @property
    def to_unix_ns(self) -> int:
        return self.recording.to_unix_ns + self.shift_ns

    @property
    def instance(self) -> str:
        """One engine process a run: counters of two runs must not be read as one that jumps back."""
        return f"{self.recording.facts.name}-{self.salt.hex()[:6]}"

    def body(self, event: Traces) -> bytes:
        facts = self.recording.facts
        attributes = {"service.instance.id": self.instance, DATASET: facts.name, DATASET_FACTS: facts.text}
        return replayed(event.body, self.shift_ns, self.salt, attributes)

    def line(self, event: Scrape) -> bytes:
        return scrape_line(event.unix_ns + self.shift_ns, moved_page(event.text, self.shift_ns), self.instance)

    @property
    def shown(self) -> Shown:
        return Shown(self.instance, self.from_unix_ns, self.to_unix_ns)


def run(options: Namespace) -> int:
    """Exit code 0; with --once 1 where a verdict differs from what the recording's facts say."""
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as stack:
        data = options.data
        if data is None:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phasewise-demo-")))
        make_directory(data)
        ports = stack.enter_context(served(data, options))
        server = Server(ports.url)
        stays = not options.once
        right = [judge(server, replay, stays=stays) for replay in replays(ports, server, fast=options.fast)]
        if options.engine != "none":
            run_live(stack, data, server, ports.otlp_url, options.engine, stays=stays)
        if not stays:
            return 0 if all(right) else 1
        print(
            f"\nOpen {ports.url}/triage\nOr in another terminal: {_command()} analyze --server {ports.url}\n"
            f"Engines can send to OTLP gRPC {ports.otlp_grpc_port} or HTTP {ports.otlp_http_port}. Ctrl-C ends.",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        return 0


def _interrupt(*_: object) -> None:
    """SIGTERM ends the demo as Ctrl-C does, so that the server drains and the temporary folder goes."""
    raise KeyboardInterrupt


def _command() -> str:
    """How this command is called where no virtual environment is active."""
    beside = Path(sys.executable).with_name("phasewise")
    if not beside.exists():
        return "phasewise"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


@contextlib.contextmanager
def served(data: Path, options: Namespace) -> Iterator[Ports]:
    """A server of its own; what it says goes to `serve.log` in the data directory."""
    command = ["serve", "--data", str(data), "--host", options.host]
    for option, port, usual in (
        ("--port", options.port, 8080),
        ("--otlp-grpc-port", options.otlp_grpc_port, 4317),
        ("--otlp-http-port", options.otlp_http_port, 4318),
    ):
        # The usual port is a wish; one that was asked for is not replaced, serve then says who holds it.
        chosen = 0 if port == usual and not is_free(options.host, port) else port
        if chosen != port:
            print(f"port {port} is in use; taking a free one ({option} chooses)", file=sys.stderr)
        command += [option, str(chosen)]
    with ready_process(command, data / "serve.log") as told:
        yield Ports(told["url"], options.host, told["otlp_grpc_port"], told["otlp_http_port"])


def replays(ports: Ports, server: Server, *, fast: bool) -> Iterator[Replay]:
    """Sends one recording after the other and gives each when all of it is sent.

    fast: all at once, the last one ending now and the others before it; else in real time, each beginning now.
    """
    recordings = [load(name) for name in NAMES]
    ends_ns: list[int] = []
    end_ns = time.time_ns()
    for recording in reversed(recordings):
        ends_ns.insert(0, end_ns)
        end_ns -= recording.to_unix_ns - recording.from_unix_ns + GAP_NS
    for recording, end in zip(recordings, ends_ns, strict=True):
        shift_ns = end - recording.to_unix_ns if fast else time.time_ns() - recording.from_unix_ns
        replay = Replay(recording, shift_ns, secrets.token_bytes(16))
        play(replay, ports, server, None if fast else _until)
        yield replay


def _until(unix_ns: int) -> None:
    """Waits for a moment."""
    time.sleep(max(0.0, (unix_ns - time.time_ns()) / 1e9))


def play(replay: Replay, ports: Ports, server: Server, wait: Callable[[int], None] | None) -> None:
    """Sends every event, waiting for its time first where `wait` is given; without it scrapes travel in one request."""
    events = replay.recording.events
    seconds = (events[-1].unix_ns - events[0].unix_ns) / 1e9
    title = f"replaying {replay.recording.facts.name}"
    pending = bytearray()
    with progress(title, seconds) as advance, trace_sender(*ports.otlp) as send:
        last_ns = events[0].unix_ns
        for event in events:
            if wait:
                wait(event.unix_ns + replay.shift_ns)
            if isinstance(event, Traces):
                send(event.transport, replay.body(event))
            else:
                pending += replay.line(event)
            if pending and (wait or len(pending) > 2**20):
                server.send("/api/v1/ingest", bytes(pending), [("kind", "scrapes")])
                pending.clear()
            advance((event.unix_ns - last_ns) / 1e9)
            last_ns = event.unix_ns
        if pending:
            server.send("/api/v1/ingest", bytes(pending), [("kind", "scrapes")])


def judge(server: Server, replay: Replay, *, stays: bool) -> bool:
    """Waits until every request is counted and judged, prints the card, and says whether it is the right one.

    stays: the pages will still be there afterwards, so that their address is worth telling.
    """
    from phasewise.dashboard.cards import card_of
    from phasewise.dashboard.terminal import show

    facts = replay.recording.facts
    shown = replay.shown
    verdict = settled(server, shown.query(), facts.requests, f"judging {facts.name}", SETTLE_TIMEOUT_S)
    show(card_of(verdict, badge=facts.badge))
    print(f"{shown.page(server)}\n" if stays else "", flush=True)
    wrong = [
        f"{key} is {verdict.get(key)}, known to be {' or '.join(allowed)}"
        for key, allowed in facts.expect.items()
        if verdict.get(key) not in allowed
    ]
    if verdict.get("requests") != facts.requests:
        wrong.append(f"{verdict.get('requests')} requests, {facts.requests} were sent")
    for problem in wrong:
        print(f"phasewise: {facts.name}: {problem}", file=sys.stderr)
    return not wrong
