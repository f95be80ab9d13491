"""Which of the two trace scanners a process uses: the plain one, or the compiled one as soon as it is there.

numba compiles for about ten seconds, once a machine and version; what came out lies in the data folder and is loaded in
a fraction of that afterwards. Where that fails for any reason, the plain scanner stays, and `facts` says why.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from phasewise.collector import scan
from phasewise.collector.records import Scanned

Scan = Callable[[bytes, int], Scanned]
_COMPILE_S = 300.0
_COMPLETE = "complete"  # a file in the cache: compiled, and checked against the plain scanner
_SOURCES = ("scan_numbers.py", "scan_fields.py", "scan_text.py", "scan_walk.py", "scan_kernel.py", "limits.py")
log = logging.getLogger("phasewise.receive")


class NotCompiled(Exception):
    """There is no compiled scanner here; the text says why."""


class TraceScanner:
    """Reads traces with the plain scanner until a better one is there; safe to use from any thread."""

    def __init__(self) -> None:
        self._scan: Scan = scan.scan_traces
        self._kind = "plain"
        self._reason = "not asked to compile"

    def __call__(self, body: bytes, received_unix_ns: int) -> Scanned:
        return self._scan(body, received_unix_ns)

    def is_compiled(self) -> bool:
        return self._kind == "compiled"

    def facts(self) -> dict[str, object]:
        """kind: plain or compiled; reason: why it is the plain one, null for the compiled one."""
        return {"kind": self._kind, "reason": self._reason or None}

    def start(self, folder: Path) -> threading.Thread | None:
        """Use the compiled scanner: at once where it lies in the folder, else as soon as the thread that is returned ends."""
        cache = cache_folder(folder)
        if _is_complete(cache):
            self._use(cache)
            return None
        self._reason = "it is being compiled"
        log.info("reading traces with the plain scanner while the compiled one is made")
        thread = threading.Thread(target=self._compile, args=(cache,), name="compile", daemon=True)
        thread.start()
        return thread

    def _compile(self, cache: Path) -> None:
        """In a process of its own: compiling takes memory that would never come back, and time of the interpreter lock."""
        started = time.monotonic()
        command = [sys.executable, "-m", "phasewise.collector.scanners", str(cache)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._stay_plain(f"it cannot be compiled: {error}")
            return
        if done.returncode:
            self._stay_plain((done.stderr.strip() or f"compiling ended with {done.returncode}").splitlines()[-1])
            return
        log.info("the compiled scanner was made in %.1f s", time.monotonic() - started)
        self._use(cache)

    def _use(self, cache: Path) -> None:
        try:
            self._scan = load(cache)
        except NotCompiled as error:
            self._stay_plain(str(error))
            return
        self._kind, self._reason = "compiled", ""
        log.info("reading traces with the compiled scanner")

    def _stay_plain(self, why: str) -> None:
        self._reason = why
        log.warning("reading traces with the plain scanner, several times slower: %s", why)


def cache_folder(folder: Path) -> Path:
    """Below the folder, one a version of the code, as numba knows it and beyond (it looks only at the file of a function), and kind of processor."""
    digest = hashlib.sha256(f"{sys.version} {__file__}".encode())
    for name in _SOURCES:
        source = Path(__file__).with_name(name)
        digest.update(source.read_bytes() + source.stat().st_mtime_ns.to_bytes(8, "big"))
    try:
        binding = importlib.import_module("llvmlite.binding")
        digest.update(f"{version('numba')} {version('llvmlite')} {version('numpy')}".encode())
        digest.update(f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}".encode())
    except (ImportError, OSError):
        digest.update(b"no numba")
    return folder / digest.hexdigest()[:16]


def load(cache: Path) -> Scan:
    """The compiled scanner, from the cache or compiled into it, and checked on a sample. Raises NotCompiled."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        complete = _is_complete(cache)
        if not complete:
            for path in cache.rglob("*.nb*"):
                path.unlink(missing_ok=True)
        numba = importlib.import_module("numba")
        numba.config.CACHE_DIR = str(cache)
        compiled: Scan = importlib.import_module("phasewise.collector.scan_compiled").scan_traces
        sample = _sample()
        if not compiled(sample, 1).rows.equals(scan.scan_traces(sample, 1).rows):
            raise NotCompiled("what the compiled scanner reads differs from what the plain one reads")
        if not complete and any(cache.rglob("*.nbc")):  # not where this process had loaded it from elsewhere
            (cache / _COMPLETE).write_text(_fingerprint(cache), encoding="ascii")
    except ImportError as error:
        raise NotCompiled(f"numba is not usable: {error}") from error
    except OSError as error:
        raise NotCompiled(f"the cache {cache} cannot be used: {error.strerror}") from error
    except NotCompiled:
        raise
    except Exception as error:  # numba has errors of its own, and raises others as well
        told = str(error).strip().splitlines() or [""]
        raise NotCompiled(f"numba does not compile it: {type(error).__name__}: {told[0]}") from error
    return compiled


def _is_complete(cache: Path) -> bool:
    """Whether the cache is as it was when it had been compiled and checked: machine code that was damaged must not run."""
    try:
        return (cache / _COMPLETE).read_text(encoding="ascii") == _fingerprint(cache)
    except (OSError, UnicodeDecodeError):
        return False


def _fingerprint(cache: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(cache.rglob("*.nb*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _sample() -> bytes:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    span = (
        request.resource_spans.add()
        .scope_spans.add()
        .spans.add(trace_id=b"\1" * 16, span_id=b"\2" * 8, name="sample", start_time_unix_nano=1, end_time_unix_nano=2)
    )
    span.attributes.add(key="share").value.double_value = 0.1
    span.attributes.add(key="list").value.array_value.values.add().int_value = -3
    span.events.add(name="first", time_unix_nano=1)
    return request.SerializeToString()


if __name__ == "__main__":
    os.nice(10)
    try:
        load(Path(sys.argv[1]))
    except NotCompiled as problem:
        sys.exit(str(problem))
