"""F02 and F43: the store ended by SIGKILL at each sync point of what it does, and the same work done again."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aged_days
import overlapping
import pytest
from crash_counts import STORE_POINTS
from fork_server import ForkServer, fork_server
from otlp_messages import span_message, trace_request
from span_ledger import request_body
from system_faults import require_injection
from writing import NOW

from phasewise.collector.journal import JournalWriter
from phasewise.collector.retention import usage_of
from phasewise.collector.scan import scan_traces
from phasewise.collector.store import Store

pytestmark = pytest.mark.live
EXPIRED_DAYS = 17
SYNCS = ("fdatasync", "fsync", "rename", "sync_file_range", "msync")
# Calls of our own threads, so that each has its number, and those of the library of the cold tier, which makes them in whichever of its
# threads is free: of those only the first can be told from others.
NUMBERED = {
    "index": SYNCS,
    "import": SYNCS,
    "seal": ("fdatasync", "fsync"),
    "expire": ("fdatasync", "fsync", "unlink", "rmdir"),
}
FIRST = {"seal": ("rename", "linkat", "unlink"), "expire": ("rename", "linkat")}


@dataclass
class Works:
    """Folders as they are before each piece of work, and what an undisturbed run makes of them."""

    folder: Path
    server: ForkServer
    _undisturbed: dict[str, tuple[Any, list[tuple[str, int]]]] = field(default_factory=dict)

    def fresh(self, work: str, name: str) -> Path:
        data = self.folder / f"{work}-{name}" / "data"
        shutil.copytree(self.before(work), data.parent)
        return data

    def before(self, work: str) -> Path:
        """The folder that work begins with; made once."""
        folder = self.folder / work
        if folder.exists():
            return folder
        if work == "index":
            filled_journal(folder / "data")
        elif work == "seal":
            aged_days.fill(folder / "data")
        elif work == "expire":
            aged_days.fill(folder / "data", aged_days.MONTH)
            self.server.done("seal", folder / "data")
            used, _ = usage_of(folder / "data")
            (folder / "volume_bytes").write_text(str(round(used / 0.9)))
        else:
            folder.mkdir()
            (folder / "traces.jsonl").write_text("\n".join(overlapping.lines()) + "\n")
        return folder

    def undisturbed(self, work: str) -> tuple[Any, list[tuple[str, int]]]:
        """What comes out, and every sync point on the way."""
        if work not in self._undisturbed:
            data = self.fresh(work, "undisturbed")
            before_bytes = cold_bytes(data)
            numbered, first = NUMBERED[work], FIRST.get(work, ())
            calls = self.server.calls(work, data, (*numbered, *first))
            points = [(call, n) for call in numbered for n in range(1, calls[call] + 1)]
            points += [(call, 1) for call in first if calls[call]]
            self._undisturbed[work] = outcome(work, data), points
            if work == "expire":  # the disk has it back
                assert cold_bytes(data) < 0.7 * before_bytes
        return self._undisturbed[work]

    def points(self, work: str, count: int) -> list[tuple[str, int]]:
        """So many of all sync points, evenly; all where there are fewer."""
        _, every = self.undisturbed(work)
        if count >= len(every):
            return every
        return [every[number * len(every) // count] for number in range(count)]

    def crash(self, work: str, call: str, when: int) -> bool:
        """Killed at that call, looked at, done again: it must be as if nothing had been. False where the call never came."""
        expected, _ = self.undisturbed(work)
        data = self.fresh(work, f"{call}-{when}")
        code = self.server.killed(work, data, call, when)
        assert code in (0, -signal.SIGKILL), (work, call, when, code, Path(f"{data}.log").read_text())
        if work in ("seal", "expire"):
            between(work, data, expected)
        self.server.done(work, data)
        assert outcome(work, data) == expected, (work, call, when)
        shutil.rmtree(data.parent)
        return code != 0

    def crashes(self, work: str, count: int) -> int:
        """At so many points; how many there were.

        How often a thread syncs depends a little on time: where a run ends before its point, one half as far in is taken.
        """
        points = self.points(work, count)
        for call, when in points:
            while not self.crash(work, call, when):
                assert when > 1, f"{work} makes no {call}"
                when //= 2
        return len(points)


def cold_bytes(data: Path) -> int:
    return sum(path.stat().st_size for path in data.glob("cold/**/*.parquet"))


def outcome(work: str, data: Path) -> Any:
    if work == "index":
        return everything(data)
    if work == "import":
        return overlapping.contents(data)
    found = aged_days.contents(data)
    return found if work == "expire" else found | {"strays": 0}  # retention deletes what a run that broke off left


def between(work: str, data: Path, expected: dict[str, Any]) -> None:
    """After the crash: each row visible once, and of what expires whole hours only."""
    found = aged_days.contents(data)
    days = {row[0] for row in found["states"]}
    if work == "seal":
        assert (found["requests"], found["samples"]) == (expected["requests"], expected["samples"])
        return
    assert len(days) == aged_days.MONTH
    kept = len(expected["requests"])
    assert kept == (aged_days.MONTH - EXPIRED_DAYS) * aged_days.EACH
    assert len(found["requests"]) in (kept, aged_days.MONTH * aged_days.EACH)
    assert found["requests"][-kept:] == expected["requests"]
    assert found["samples"][-len(expected["samples"]) :] == expected["samples"]
    assert found["findings"] == 1


def filled_journal(data: Path) -> None:
    """Segments of requests, trees and resends, as a receiver leaves them."""
    with JournalWriter(data / "journal", segment_bytes=12_000) as journal:
        earlier = b""
        for number in range(12):
            now = NOW + number * 10**8
            body, _ = request_body(8, now, f"engine-{number % 2}")
            if number % 5 == 4:
                body = earlier  # a resend
            earlier = body
            journal.append("spans", scan_traces(body, now).rows)
            root = span_message(
                trace_id=number.to_bytes(16, "big"), span_id=(9000 + number).to_bytes(8, "big"), name="chat"
            )
            tool = span_message(
                {"gen_ai.operation.name": "execute_tool"}, trace_id=root.trace_id, parent_span_id=root.span_id
            )
            journal.append("spans", scan_traces(trace_request(tool).SerializeToString(), now).rows)
            journal.append("spans", scan_traces(trace_request(root).SerializeToString(), now).rows)
            journal.sync()


def everything(data: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What the store holds, without the marks of when it was written and where from (a restart has nothing in memory)."""
    with Store(data / "phasewise.duckdb") as store:
        rows = store.query("SELECT * EXCLUDE (revision) FROM requests ORDER BY request_key")
        return {
            "requests": rows.rows(),
            "turns": store.query("SELECT * FROM turns ORDER BY ALL").rows(),
            "counters": store.query("SELECT * FROM counters WHERE name <> 'reopened_traces' ORDER BY ALL").rows(),
            "archive": sorted((path.name, path.stat().st_size) for path in (data / "spans").glob("*/*/*.parquet")),
        }


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Works]:
    require_injection()
    with fork_server() as server:
        yield Works(tmp_path_factory.mktemp("works"), server)


@pytest.mark.slow
@pytest.mark.parametrize("work", STORE_POINTS["slow"])
def test_a_crash_of_the_store_at_a_sync_point(works: Works, work: str) -> None:
    count = STORE_POINTS["slow"][work]
    assert works.crashes(work, count) == count


@pytest.mark.nightly
@pytest.mark.parametrize("work", STORE_POINTS["nightly"])
def test_a_crash_of_the_store_at_each_sync_point(works: Works, work: str) -> None:
    points = works.crashes(work, STORE_POINTS["nightly"][work])
    print(f"{points} crash points of {work}, each ends as the undisturbed run did")
    assert points >= 15
