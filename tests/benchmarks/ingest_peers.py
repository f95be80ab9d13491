"""What others make of the same load: `rotel`, which stores nothing here, and `arize-phoenix`, counted by what it has stored.

Each is installed once, by --peers, into an environment of its own under the cache folder (PHASEWISE_BENCH_CACHE, else
~/.cache/phasewise-bench), and measured from then on. A figure is null, and a line says why, where the peer is not there, cannot be
installed or does not start.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ingest_load import Generator, Load
from benchmarks.ingest_server import cpu_s

_INSTALL_S = 1800.0
_START_S = 180.0
_STEADY_S = 5.0  # without a new row: it has stored what it will
_STORE_S = 120.0
ROTEL, PHOENIX = "rotel==0.0.1a15", "arize-phoenix==20.26.1"


class Absent(Exception):
    """The peer cannot be measured here; the text says why."""


def peers(folder: Path, seconds: float, install: bool) -> tuple[dict[str, float], list[str]]:
    """rotel_spans_per_cpu_s and phoenix_stored_spans_per_cpu_s, without what is absent; and a sentence for each of those."""
    found: dict[str, float] = {}
    absent: list[str] = []
    for name, measure in (("rotel_spans_per_cpu_s", rotel), ("phoenix_stored_spans_per_cpu_s", phoenix)):
        try:
            found[name] = measure(folder / measure.__name__, seconds, install)
        except Absent as why:
            absent.append(f"{name}: not measured: {why}")
    return found, absent


def rotel(folder: Path, seconds: float, install: bool) -> float:
    """Spans a CPU-second that it accepts and throws away. Raises Absent."""
    python = _environment("rotel", ROTEL, install)
    agents = list(python.parents[1].glob("lib/python*/site-packages/rotel/rotel-agent"))
    if not agents:
        raise Absent(f"{ROTEL} holds no program for this machine")
    grpc_port, http_port = _free_port(), _free_port()
    endpoints = ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}", "--otlp-http-endpoint", f"127.0.0.1:{http_port}"]
    command = [str(agents[0]), "start", "--exporter", "blackhole", *endpoints]
    with _running(command, {}, folder, grpc_port) as pid:
        used = cpu_s(pid)
        told = _loaded(Load(grpc_port, seconds))
        return float(told["spans"] / (cpu_s(pid) - used))


def phoenix(folder: Path, seconds: float, install: bool) -> float:
    """Spans a CPU-second that stand in its database, until nothing more comes. Raises Absent."""
    python = _environment("arize-phoenix", PHOENIX, install)
    port, grpc_port = _free_port(), _free_port()
    settings = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with _running([str(python), "-m", "phoenix.server.main", "serve"], settings, folder, port) as pid:
        used = cpu_s(pid)
        # It acknowledges before it stores, from a queue in memory: one sender, and no more than it can store soon.
        _loaded(Load(port, seconds, transport="http", connections=1, limit_spans=10_240))
        stored = _until_steady(lambda: _rows(folder))
        if not stored:
            raise Absent("it stored nothing")
        return stored / (cpu_s(pid) - used)


def _loaded(load: Load) -> Mapping[str, Any]:
    told = Generator(load).result()
    if not told["spans"]:
        raise Absent(f"it took nothing: {told['errors']}")
    return told


def _rows(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.db"):
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
        ):
            found += int(connection.execute("SELECT count(*) FROM spans").fetchone()[0])
    return found


def _until_steady(count: Callable[[], int]) -> int:
    started = changed = time.monotonic()
    last = 0
    while time.monotonic() - changed < _STEADY_S and time.monotonic() - started < _STORE_S:
        now = count()
        if now != last:
            last, changed = now, time.monotonic()
        time.sleep(0.5)
    return last


def _environment(name: str, requirement: str, install: bool) -> Path:
    """The interpreter of the environment that holds it, made and filled where `install` says so. Raises Absent."""
    root = Path(os.environ.get("PHASEWISE_BENCH_CACHE") or Path.home() / ".cache" / "phasewise-bench") / name
    python = root / "bin" / "python"
    installed = root / "installed"
    if installed.exists() and installed.read_text(encoding="utf-8") == requirement:
        return python
    if not install:
        raise Absent(
            f"{requirement} is not installed: --peers (make bench-ingest ARGS=--peers) puts it into {root} with pip, once"
        )
    print(f"installing {requirement} into {root}", flush=True)
    try:
        venv.create(root, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Absent(f"{requirement} cannot be installed: {error}") from None
    if done.returncode:
        raise Absent(f"{requirement} cannot be installed: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    installed.write_text(requirement, encoding="utf-8")
    return python


@contextlib.contextmanager
def _running(command: Sequence[str], settings: Mapping[str, str], folder: Path, port: int) -> Iterator[int]:
    """The process id, once the port answers. Raises Absent."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **settings}, cwd=folder)
    try:
        until = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise Absent(f"it does not start: {log.read_text(encoding='utf-8', errors='replace').strip()[-300:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
