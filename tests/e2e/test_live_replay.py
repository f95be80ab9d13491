"""Recordings played at their own speed on a simulated clock: what a verdict every 5 s would have said while it happened.

Spans come only when a request ends, so for the first seconds of an incident nothing but the engine's samples tells of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from captures import bodies, scrapes
from shared_data import shared_path

from phasewise.analyzer.attribution import attributor
from phasewise.analyzer.report import window_verdict
from phasewise.analyzer.window import Window
from phasewise.collector.exposition import Exposition, read_exposition
from phasewise.collector.journal import JournalWriter
from phasewise.collector.profiles import Profiles
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store
from phasewise.collector.writer import Writer
from phasewise.rules.load import load_rulebook

RULES = load_rulebook()
PROFILES = Profiles(RULES.engines)
SECOND_NS = 10**9
CLASSES = {
    "vllm-light": {"bandwidth", "host", "compute"},
    "vllm-long-prompt": {"compute"},
    "vllm-overload": {"queueing"},
    "vllm-kv-starvation": {"kv"},
    "vllm-shared-prefix": {"bandwidth", "host", "compute"},
    "vllm-mixed": {"compute", "queueing"},
    "sglang-overload": {"queueing"},
}


@dataclass(slots=True)
class Playback:
    """A writer on a clock that the recording drives."""

    folder: Path
    data: Path
    thin: int = 1
    phase: int = 0
    now: int = 0
    store: Store = field(init=False)
    writer: Writer = field(init=False)
    journal: JournalWriter = field(init=False)

    def __post_init__(self) -> None:
        self.data.mkdir(exist_ok=True)
        self.store = Store(self.data / "phasewise.duckdb")
        self.journal = JournalWriter(self.data / "journal")
        self.writer = Writer(self.store, self.data, RULES, attributor(RULES), clock=lambda: self.now)

    def events(self) -> list[tuple[int, bytes | Exposition]]:
        """Request bodies and scrapes in the order in which they came."""
        found: list[tuple[int, bytes | Exposition]] = [
            (int(record["recv_unix_ns"]), body) for record, body in bodies(self.folder)
        ]
        for at, text in list(scrapes(self.folder))[self.phase :: self.thin]:
            sample = read_exposition(text, at, PROFILES, source="scrape")
            if sample is not None:
                found.append((at, sample))
        return sorted(found, key=lambda event: event[0])

    def play(self, window_s: float | None = None, every_s: float = 5) -> Iterator[tuple[int, dict[str, Any]]]:
        """The verdict every `every_s` from the first event on and at the end, over the last `window_s` seconds or all."""
        every_ns = round(every_s * SECOND_NS)
        due = None
        for at, event in self.events():
            due = due or at + every_ns
            while at > due:
                yield due, self.verdict(due, window_s)
                due += every_ns
            self.now = at
            if isinstance(event, bytes):
                self.journal.append("spans", scan_traces(event, at).rows)
                self.journal.sync()
                self.writer.step()
            else:
                self.writer.add_samples([event])
        yield self.now, self.verdict(self.now, window_s)
        self.journal.close()
        self.store.close()

    def verdict(self, at: int, window_s: float | None) -> dict[str, Any]:
        self.now = at
        self.writer.step()
        start = 0 if window_s is None else at - round(window_s * SECOND_NS)
        return window_verdict(self.store, RULES, Window(start, at), now_unix_ns=at)


def onset(folder: Path) -> int:
    """When the load began: the first arrival any span tells of."""
    starts: list[int] = []
    for _, body in bodies(folder):
        starts += scan_traces(body, 0).rows["start_unix_ns"].to_pylist()
    return min(starts)


@pytest.mark.slow
@pytest.mark.parametrize("window_s", [60, None])
@pytest.mark.parametrize("name", ["vllm-overload", "vllm-kv-starvation"])
def test_never_called_healthy_from_15_s_after_the_onset(name: str, window_s: float | None, tmp_path: Path) -> None:
    folder = shared_path("captures", name)
    begun = onset(folder)
    said = [
        (at, verdict)
        for at, verdict in Playback(folder, tmp_path / "data").play(window_s)
        if at >= begun + 15 * SECOND_NS
    ]
    assert len(said) >= 8
    for at, verdict in said:
        after_s = (at - begun) / SECOND_NS
        assert verdict["status"] == "slow", f"{after_s:.0f} s after the onset: {verdict['headline']}"
        assert verdict["primary"] in {*CLASSES[name], "inconclusive"}, f"{after_s:.0f} s after the onset"
    assert any(verdict["open"] > 0 for _, verdict in said)


@pytest.mark.parametrize(
    "phases_s", [pytest.param(15, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("thin", [15, 30])
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_sparse_scrapes_never_change_the_class(name: str, thin: int, phases_s: int, tmp_path: Path) -> None:
    """The scrapes that are left begin at the first second of the recording, and again `phases_s` later while that gives others."""
    folder = shared_path("captures", name)
    for phase in range(0, thin, phases_s):
        playback = Playback(folder, tmp_path / f"data{phase}", thin, phase)
        *_, (_, verdict) = playback.play(every_s=1e6)
        assert verdict["primary"] in {*CLASSES[name], "inconclusive"}, f"scrapes every {thin} s from second {phase}"
