"""What the API and the pages ask: one place that reads the store for them, once for equal questions at the same time."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import polars as pl

from phasewise.analyzer.filters import Condition, rows_in
from phasewise.analyzer.interference_ledger import window_ledger
from phasewise.analyzer.listing import count_requests
from phasewise.analyzer.questions import NOTHING_MARKED
from phasewise.analyzer.report import request_report, window_verdict
from phasewise.analyzer.request_interference import request_ledgers
from phasewise.analyzer.slow_set import BROKEN_RATIO, OBJECTIVE_COLUMNS
from phasewise.analyzer.whole import slow_edge
from phasewise.analyzer.window import Filter, Objective, Window
from phasewise.collector.store import Store
from phasewise.collector.watermarks import FUTURE_NS
from phasewise.collector.writer import Writer
from phasewise.dashboard.access import Posture
from phasewise.dashboard.caps import MOST_DAYS, require_range
from phasewise.dashboard.work import Works, at_hand
from phasewise.rules.errors import Cancelled, MachineError, PhasewiseError, Stopped, TooSlow
from phasewise.rules.load import Rulebook

Answer = TypeVar("Answer")
LOG = logging.getLogger("phasewise.dashboard")
_KEPT_ANSWERS = 64
_KEPT_ABSENT, _ABSENT_LENGTH = 1024, 256
_LOOK_EVERY_S = 0.1
_LOOK = """
WITH hot AS (
  SELECT count(*) AS requests, coalesce(sum("revision"), 0)::BIGINT AS revisions, max("received_unix_ns") AS received,
    max("finished_unix_ns") FILTER ("finished_unix_ns" <= ?) AS finished FROM main."requests"
), sampled AS (
  SELECT count(*) AS samples, max("unix_ns") FILTER ("unix_ns" <= ?) AS sampled FROM main."engine_samples"
), cold AS (
  SELECT coalesce(sum("rows") FILTER ("kind" = 'requests'), 0)::BIGINT AS requests,
    coalesce(sum("rows") FILTER ("kind" = 'engine_samples'), 0)::BIGINT AS samples,
    coalesce(sum("rows") FILTER ("kind" = 'engine_steps'), 0)::BIGINT AS steps,
    max("high_unix_ns") FILTER ("kind" = 'requests' AND "high_unix_ns" <= ?) AS finished,
    max("high_unix_ns") FILTER ("kind" = 'engine_samples' AND "high_unix_ns" <= ?) AS sampled FROM main."cold_files"
), hours AS (
  SELECT max("received_unix_ns") AS received, coalesce(sum("generation"), 0)::BIGINT AS sealed FROM main."sealed_hours"
  WHERE "state" = 'sealed'
)
SELECT h."requests" + c."requests" AS requests, h."revisions", s."samples" + c."samples" AS samples,
  (SELECT count(*) FROM main."engine_steps") + c."steps" AS steps, greatest(h."received", o."received") AS received,
  greatest(h."finished", c."finished") AS finished, greatest(s."sampled", c."sampled") AS sampled, o."sealed"
FROM hot h, sampled s, cold c, hours o
"""


def package_version() -> str:
    try:
        return version("phasewise")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"


@dataclass(frozen=True, slots=True)
class GuardedReader:
    """A store whose failures are sentences: whatever its database raises becomes a MachineError. A query takes no longer than
    the work at hand may. waits: False for probes, which take no place from other readers."""

    store: Store
    waits: bool = True

    def query(self, sql: str, parameters: Sequence[object] = (), *, order_by: Sequence[str] = ()) -> pl.DataFrame:
        try:
            return self.store.query(sql, parameters, patience=at_hand().patience, waits=self.waits, order_by=order_by)
        except PhasewiseError:
            raise
        except Exception as error:
            LOG.exception("the store refused a query")
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise MachineError(f"the store does not answer: {first}") from error


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far the data reach. token changes whenever a row, a sample or a step was added or a row attributed again."""

    token: str
    requests_n: int
    samples_n: int
    steps_n: int
    newest_received_unix_ns: int | None
    newest_finished_unix_ns: int | None
    newest_sample_unix_ns: int | None

    @property
    def empty(self) -> bool:
        return self.requests_n == 0 and self.samples_n == 0 and self.steps_n == 0


@dataclass(slots=True)
class Answers:
    """Reads for all pages. Equal questions asked at once are computed once, and kept until the data move on."""

    store: Store
    writer: Writer
    rulebook: Rulebook
    data_dir: Path
    clock: Callable[[], int]
    serve_info: Mapping[str, object] = field(default_factory=dict)
    site_slo: str = ""
    works: Works = field(default_factory=Works)
    posture: Posture = field(default_factory=Posture)
    verdicts_told: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[Hashable, Future[object]] = field(default_factory=OrderedDict)
    # By id: the stand of the rows when none was known by it.
    _absent: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _watermark: tuple[int, Watermark] | None = None
    _watermark_lock: threading.Lock = field(default_factory=threading.Lock)
    _health_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "writer-health"))
    _health_asked: Future[tuple[int, Mapping[str, object]]] | None = None
    _health_kept: tuple[int, Mapping[str, object]] | None = None

    @property
    def reader(self) -> GuardedReader:
        return GuardedReader(self.store)

    def watermark(self) -> Watermark:
        """Looked up at most once a second, by one at a time. Slow readers must not make the store look dead: it takes no place
        among them, and where it takes too long itself the last known stand is told."""
        with self._watermark_lock:
            now = self.clock()
            kept = self._watermark
            if kept is not None and 0 <= now - kept[0] < 10**9:
                return kept[1]
            try:
                found = self._look()
            except Stopped:
                if kept is None:
                    raise
                return kept[1]
            self._watermark = (now, found)
            return found

    def _look(self) -> Watermark:
        probe = GuardedReader(self.store, waits=False)
        # Of the cold tier its list of files tells enough: this runs once a second, and reads none of them.
        told = probe.query(_LOOK, (self.clock() + FUTURE_NS,) * 4).row(0, named=True)
        return Watermark(
            token=".".join(
                str(told[name]) for name in ("requests", "revisions", "samples", "sampled", "steps", "sealed")
            ),
            requests_n=told["requests"],
            samples_n=told["samples"],
            steps_n=told["steps"],
            newest_received_unix_ns=told["received"],
            newest_finished_unix_ns=told["finished"],
            newest_sample_unix_ns=told["sampled"],
        )

    def once(self, key: Hashable, compute: Callable[[], Answer]) -> Answer:
        """The answer under this key, computed by whoever asks first; an error is told to all who wait, and not kept. Where the
        first one gave up, one of those who still want it begins again."""
        patience = at_hand().patience
        while True:
            try:
                return self._first_or_shared(key, compute)
            except (TooSlow, Cancelled):
                patience.check()

    def _first_or_shared(self, key: Hashable, compute: Callable[[], Answer]) -> Answer:
        patience = at_hand().patience
        with self._lock:
            kept = self._kept.get(key)
            mine = kept is None
            future: Future[object] = Future() if kept is None else kept
            if mine:
                self._kept[key] = future
                while len(self._kept) > _KEPT_ANSWERS:
                    self._kept.popitem(last=False)
        if mine:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    self._kept.pop(key, None)
                future.set_exception(error)
        while not future.done():
            patience.check()
            wait_for([future], _LOOK_EVERY_S)
        return future.result()  # type: ignore[return-value]

    def now(self) -> int:
        """The clock, up to the next whole second, so that the parts of one page look at one window."""
        return -(-self.clock() // 10**9) * 10**9

    def verdict(
        self, window: Window, filters: Sequence[Filter] = (), slo: Sequence[Objective] = ()
    ) -> Mapping[str, object]:
        """The verdict object of a window; equal questions share one computation until the data move."""
        filters, slo = tuple(filters), tuple(slo)
        self.count(window, filters)
        key = ("verdict", window, filters, slo, self.watermark().token)

        def compute() -> Mapping[str, object]:
            now = self.clock()
            found = window_verdict(self.reader, self.rulebook, window, filters=filters, slo=slo, now_unix_ns=now)
            self.verdicts_told[(str(found["status"]), str(found["primary"]), str(found.get("cause") or ""))] += 1
            return found

        return self.once(key, compute)

    def interference(self, window: Window, filters: Sequence[Filter] = ()) -> Mapping[str, object]:
        """Whose prompts took how much of whose time, of the requests of a window."""
        filters = tuple(filters)
        self.count(window, filters)
        return self.once(
            ("interference", window, filters, self.watermark().token),
            lambda: window_ledger(self.reader, self.rulebook, window, filters),
        )

    def request_interference(self, identifier: str) -> list[dict[str, object]]:
        """The same of one request, one object a match."""
        return request_ledgers(self.reader, self.rulebook, identifier)

    def request(self, identifier: str) -> list[dict[str, object]]:
        """`explain ID`: one object a matching request."""
        stand = self.store.requests_stand
        found = request_report(self.reader, self.rulebook, identifier)
        if not found and len(identifier) <= _ABSENT_LENGTH:
            with self._lock:
                self._absent[identifier] = stand
                self._absent.move_to_end(identifier)
                while len(self._absent) > _KEPT_ABSENT:
                    self._absent.popitem(last=False)
        return found

    def is_absent(self, identifier: str) -> bool:
        """Whether the same rows were asked for it already, in vain: whoever waits for a request asks again and again, of a store that is
        busy taking it in."""
        return self._absent.get(identifier) == self.store.requests_stand and not self.store.broken

    def count(self, window: Window, filters: Sequence[Filter] = ()) -> int:
        """Requests that ended in the window; whoever waits for the work at hand can be told."""
        rows = self.rows(window, filters)
        found = self.once(("count", rows, self.watermark().token), lambda: count_requests(self.reader, rows))
        at_hand().requests_n = found
        return found

    def rows(self, window: Window, filters: Sequence[Filter] = ()) -> Condition:
        """The rows of a window, for one of the questions below. InputError where they are many, of too long a time."""
        rows = rows_in(window, filters)
        if window.seconds > MOST_DAYS * 86_400:
            require_range(*self.once(("range", rows, self.watermark().token), lambda: self._range(rows)))
        return rows

    def _range(self, rows: Condition) -> tuple[int | None, int | None, int]:
        """First and last end of a request, and how many."""
        statement = (
            'SELECT min("finished_unix_ns") AS first, max("finished_unix_ns") AS last, count(*) AS n '
            f'FROM "requests" WHERE {rows.sql}'
        )
        found = self.reader.query(statement, rows.parameters).row(0, named=True)
        return found["first"], found["last"], int(found["n"])

    def slow_set(self, window: Window, filters: Sequence[Filter] = (), slo: Sequence[Objective] = ()) -> Condition:
        """The requests under question, by the rules of the verdict (`analyzer.findings`): those that break the SLO most
        broken; else the slowest tenth by end to end, at least 3."""
        rows = rows_in(window, filters)
        slo = tuple(slo)
        return self.once(
            ("slow", rows, slo, self.watermark().token), lambda: self._broken(rows, slo) or self._slowest(rows)
        )

    def _broken(self, rows: Condition, slo: Sequence[Objective]) -> Condition | None:
        best: tuple[int, Condition | None] = (0, None)
        for one in slo:
            column = OBJECTIVE_COLUMNS[one.metric, one.boundary]
            statement = (
                f'SELECT count(*) AS n, count("{column}") AS known, count(*) FILTER ("{column}" > ?) AS over, '
                f'count(*) FILTER ("tpot_s" > ?) AS slow FROM "requests" WHERE {rows.sql}'
            )
            found = self.reader.query(statement, (one.limit_s, one.limit_s, *rows.parameters)).row(0, named=True)
            over = found["over"]
            if column == "itl_p95_s" and not found["known"]:
                column, over = "tpot_s", found["slow"]
            if over > max(best[0], BROKEN_RATIO * found["n"]):
                best = (over, Condition(f'"{column}" > ?', (one.limit_s,)))
        return best[1]

    def _slowest(self, rows: Condition) -> Condition:
        edge = slow_edge(self.reader, rows)
        if edge.is_empty():
            return NOTHING_MARKED
        seconds, key = edge.row(0)
        return Condition('("e2e_s" > ? OR ("e2e_s" = ? AND "request_key" <= ?))', (seconds, seconds, key))

    def writer_health(self) -> Mapping[str, object]:
        """Counters and watermarks of the writer, at most a second old while it is not busy: it takes the writer's lock, and a
        large import holds that for long. Then the last known stand."""
        with self._lock:
            now = self.clock()
            if self._health_asked is not None and self._health_asked.done():
                # It came when whoever asked had gone: kept with its own time, and old by now where nobody asks often.
                if self._health_asked.exception() is None:
                    self._health_kept = self._health_asked.result()
                self._health_asked = None
            if self._health_asked is None and not (self._health_kept and 0 <= now - self._health_kept[0] < 10**9):
                self._health_asked = self._health_pool.submit(self._look_at_writer)
            asked = self._health_asked
        if asked is not None:
            try:
                self._health_kept = asked.result(timeout=1.0)
            except FutureTimeoutError:
                return self._health_kept[1] if self._health_kept else {}
            finally:
                if asked.done():
                    self._health_asked = None
        return self._health_kept[1] if self._health_kept else {}

    def _look_at_writer(self) -> tuple[int, Mapping[str, object]]:
        told = self.writer.health()
        return self.clock(), told

    def unmapped_spans(self) -> Mapping[str, int]:
        """Spans received so far that no profile knows, by "scope / name"."""
        found = self.writer_health().get("unmapped")
        return found if isinstance(found, Mapping) else {}

    def health(self) -> dict[str, object]:
        """The state that the shell shows and `/api/v1/health` answers with: ok, or degraded with what and what to do."""
        now = self.clock()
        told: dict[str, object] = {"version": package_version(), "now_unix_ns": now, "rules": self.rulebook.version}
        told["notices"] = self.posture.notices()
        try:
            mark = self.watermark()
            writer = dict(self.writer_health())
        except MachineError as error:
            return told | {
                "status": "degraded",
                "error": str(error),
                "remedy": "the pages come back by themselves once it can be read; the server's log says more",
            }
        newest = max(
            (t for t in (mark.newest_received_unix_ns, mark.newest_sample_unix_ns, mark.newest_finished_unix_ns) if t),
            default=None,
        )
        problem = (
            self.store.broken
            or writer.get("write_error")
            or self.store.checkpoint_error
            or writer.get("attribution_error")
        )
        return told | {
            "status": "degraded" if problem else "ok",
            "error": str(problem) if problem else None,
            "remedy": str(writer.get("remedy") or "see the server's log") if problem else None,
            "watermark": mark.token,
            "requests": mark.requests_n,
            "samples": mark.samples_n,
            "newest_unix_ns": newest,
            "newest_request_unix_ns": mark.newest_finished_unix_ns,
            "age_s": (now - newest) / 1e9 if newest is not None else None,
            "notice": "; ".join(_notices(writer)) or None,
            "writer": writer,
        }


def _notices(writer: Mapping[str, object]) -> list[str]:
    """What its user must know of the store although it works: what was lost, what waits for a decision."""
    losses, upkeep = writer.get("losses"), writer.get("upkeep")
    found = [str(text) for text in losses] if isinstance(losses, list) else []
    if isinstance(upkeep, Mapping):
        found += [f"retention: {upkeep['stopped']}"] if upkeep.get("stopped") else []
        found += [f"upkeep: {upkeep['error']}"] if upkeep.get("error") else []
        if unkept := upkeep.get("rollups_unkept"):
            found.append(f"rollups of expired hours are in the store's file alone: {unkept}")
    purge = writer.get("purge")
    if isinstance(purge, Mapping) and purge.get("unfinished"):
        why = f" ({purge['error']})" if purge.get("error") else ""
        found.append(f"a purge was broken off{why}: it goes on at the next start, or with the next purge")
    return found
