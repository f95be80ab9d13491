"""The server under load: a real `phasewise serve`, its two processes, and what they used, counted and still have to do."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.ingest_spans import Batch, Template
from serving import Served, serving

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COMPILED_S = 180.0
_PROBE_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1
_LATER = (429, 502, 503, 504)  # told to try again later: no failure


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:15]) / _TICKS_PER_S


def memory_mb(pid: int, name: str = "VmHWM") -> float:
    """The peak (VmHWM) or present (VmRSS) resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise ValueError(name)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(part) for part in text.split()]


@dataclass(slots=True)
class Measured:
    """A running server: its processes, and its own counts."""

    served: Served
    receive_pid: int
    store_pid: int

    def cpu_s(self) -> float:
        """Of both processes."""
        return cpu_s(self.receive_pid) + cpu_s(self.store_pid)

    def receiver(self) -> dict[str, Any]:
        """receive.json, written about once a second."""
        found: dict[str, Any] = json.loads((self.served.data / "receive.json").read_text(encoding="utf-8"))
        return found

    def store(self) -> dict[str, Any]:
        """What the store says of itself: counters, journal position and lag, rows that wait. Where it is too busy to look, what it
        knew before, which may be nothing."""
        found: dict[str, Any] = self.served.get("/api/v1/pulse").get("writer", {})
        return found

    def counted(self, name: str = "spans") -> int:
        """A counter of the store."""
        return int(self.store().get("counters", {}).get(name, 0))

    def until_settled(self, spans: int, within_s: float) -> float | None:
        """Seconds until so many spans were counted, and none of them waited to be settled or attributed; None where that took longer."""
        started = time.monotonic()
        while time.monotonic() - started < within_s:
            with contextlib.suppress(OSError):  # too busy to answer is not done
                told = self.store()
                waits = [
                    told.get("journal", {}).get("lag_bytes"),
                    told.get("open_spans"),
                    told.get("waiting_for_attribution"),
                ]
                if waits == [0, 0, 0] and told["counters"].get("spans", 0) >= spans:
                    return time.monotonic() - started
            time.sleep(0.2)
        return None


@contextlib.contextmanager
def measured(data: Path) -> Iterator[Measured]:
    """A server on free ports and an empty directory, with its scanner compiled."""
    with serving(data) as served:
        receive = int(json.loads((data / "receive.json").read_text(encoding="utf-8"))["pid"])
        (store,) = (pid for pid in children(served.process.pid) if pid != receive)
        found = Measured(served, receive, store)
        until = time.monotonic() + _COMPILED_S
        while found.receiver()["trace_scanner"]["kind"] != "compiled":
            if time.monotonic() > until:
                raise SystemExit(f"the scanner was not compiled: {found.receiver()['trace_scanner']}")
            time.sleep(0.2)
        yield found


@dataclass(slots=True)
class Probe:
    """Sends a request of its own now and then, and looks how long after its acknowledgement it can be read.

    One is looked for at a time, in the order they were sent: the store keeps it. `seen_s` are those seen, `waiting` those not, `failed` answers that neither say yes nor
    "later"."""

    server: Measured
    template: Template
    seen_s: list[float] = field(default_factory=list)
    waiting: list[tuple[str, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _acknowledged: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._look)]
        for thread in self._threads:
            thread.start()

    def send_no_more(self) -> None:
        """What was sent is looked for all the same."""
        self._stop.set()
        if self._threads:
            self._threads[0].join()

    def stop(self, within_s: float) -> None:
        """Look for what is left that long."""
        self.send_no_more()
        until = time.monotonic() + within_s
        while self.waiting and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    @property
    def visible_p99_s(self) -> float | None:
        """None where a row was never seen, since the figure would be too good."""
        if not self.seen_s or self.waiting:
            return None
        return float(np.percentile(self.seen_s, 99))

    @property
    def spans(self) -> int:
        """All that was acknowledged, once it sends no more."""
        return self._acknowledged * self.template.spans

    @property
    def requests(self) -> int:
        return self._acknowledged * self.template.requests

    def _send(self) -> None:
        batch = Batch(self.template, 999, 999)
        while not self._stop.wait(_PROBE_EVERY_S):
            body = batch.unique()
            at = self.template.names[0][0]
            identifier = bytes(body[i] for i in at).decode()
            try:
                self.server.served.send_traces(body)
            except urllib.error.HTTPError as error:  # not acknowledged
                if error.code not in _LATER:
                    self._tell("a probe was sent", error)
            except OSError:
                continue  # nor then
            else:
                self._acknowledged += 1
                self.waiting.append((identifier, time.monotonic()))

    def _look(self) -> None:
        while not self._ended.is_set():
            if not self.waiting:
                time.sleep(_LOOK_EVERY_S)
                continue
            identifier, acknowledged = self.waiting[0]
            if self._is_visible(identifier):
                self.seen_s.append(time.monotonic() - acknowledged)
                self.waiting.pop(0)
            else:
                time.sleep(_LOOK_EVERY_S)

    def _is_visible(self, identifier: str) -> bool:
        try:
            self.server.served.get(f"/api/v1/requests/{identifier}")
        except urllib.error.HTTPError as error:
            if error.code not in (404, *_LATER):
                self._tell("a probe was looked for", error)
            return False
        except OSError:
            return False
        return True

    def _tell(self, what: str, error: urllib.error.HTTPError) -> None:
        """Each sentence once: the same fault comes every time."""
        body = error.read().decode("utf-8", "replace").strip() or "(no body)"
        told = f"{what}: HTTP {error.code} {body.splitlines()[0][:300]}"
        if told not in self.failed:
            self.failed.append(told)
