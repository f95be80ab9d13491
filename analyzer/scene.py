"""All that a verdict looks at: the rows of a window, the samples of its engines, their settings, and the time before.

Reading the store happens here and nowhere else in the analyzer's verdict; what follows is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from phasewise.analyzer.coverage import UNKNOWN, Sampling, sampling_of
from phasewise.analyzer.crowd import crowd_of, many, read_crowd, served, with_outcome
from phasewise.analyzer.devices import Devices, devices_in, devices_of
from phasewise.analyzer.draw import Drawn, are_many, count_rows, drawn_of
from phasewise.analyzer.ended import Ended, EndedRows, EndedStored
from phasewise.analyzer.filters import NOT_FINISHED, Condition, rows_in, sample_conditions
from phasewise.analyzer.frames import where
from phasewise.analyzer.replicas import LIVE_NS, Reader, Replica, read_replicas
from phasewise.analyzer.stored_traffic import stored_traffic
from phasewise.analyzer.sums import RowSums, Sums
from phasewise.analyzer.traffic import RowTraffic, Traffic
from phasewise.analyzer.whole import Whole, read_whole
from phasewise.analyzer.window import Filter, Objective, Window
from phasewise.collector.watermarks import FUTURE_NS
from phasewise.rules.vocabulary import CAUSE_COLUMNS

STALE_NS = 5 * 60 * 10**9  # live samples older than this say nothing about now
BASELINE_MAX_NS = 3600 * 10**9


# Columns of `requests` that verdicts look at; a row has half as many again.
ROW_COLUMNS = (
    "request_key trace_id instance engine engine_version model tenant request_class dataset outcome input_tokens cached_tokens"
    " output_tokens arrival_unix_ns queued_unix_ns scheduled_unix_ns finished_unix_ns e2e_s ttft_s queue_s context_s prefill_s"
    " first_token_s decode_s tpot_s external_s entry_e2e_s entry_side entry_before_s entry_ttft_s entry_tpot_s itl_p95_s client_gaps preemptions decode_batch_mean"
    " primary_class cause measured_s clamped missing_signals first_causes quality revision final"
).split() + list(CAUSE_COLUMNS)
_ORDER = ("finished_unix_ns", "request_key")
_SELECT = f"SELECT {', '.join(ROW_COLUMNS)} FROM requests"


@dataclass(frozen=True, slots=True)
class Scene:
    """requests: served calls, all of them or (`drawn`) some; refused, aborted: counts; before: served calls of the baseline window, all
    or (`drawn_before`) some; unjoined: scraped instances that nothing tells whose they are; sampling: how many of the finished requests
    sent spans; estimated_aborted: of `aborted`, those that only the web server's counter tells of; ended: by replica, how many
    (running, waiting) of its newest sample had ended before the window did; whole: where `requests` are drawn, what rests on all of
    them; drawn_scrapes: of the replicas' samples. sums, traffic: of all requests, whether they were read or not."""

    window: Window
    requests: pl.DataFrame
    refused: int
    aborted: int
    replicas: tuple[Replica, ...]
    before: pl.DataFrame
    baseline: Window | None
    now_unix_ns: int
    newest_unix_ns: int | None
    unjoined: tuple[str, ...] = ()
    unmapped_spans: int = 0
    facts: Mapping[str, object] = field(default_factory=dict)
    ended: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    devices: Devices = ()  # of these replicas
    sampling: Sampling = UNKNOWN
    estimated_aborted: int = 0
    drawn: Drawn | None = None
    drawn_before: Drawn | None = None
    drawn_scrapes: Drawn | None = None
    whole: Whole | None = None
    sums: Sums = field(init=False)
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        whole = self.whole
        object.__setattr__(self, "sums", RowSums(self.requests) if whole is None else whole.sums)
        object.__setattr__(self, "traffic", RowTraffic(self.requests) if whole is None else whole.traffic)


def read_scene(
    store: Reader, window: Window, filters: Sequence[Filter], now_unix_ns: int, objectives: Sequence[Objective] = ()
) -> Scene:
    """Everything the verdict of a window needs, by these objectives. Of many requests some are drawn, and what rests on all of them
    is asked of the store."""
    every, rows = rows_in(window, filters, served=False), rows_in(window, filters)
    until = now_unix_ns + FUTURE_NS
    if are_many(store, every):
        crowd = read_crowd(store, every, until)
        chosen = drawn_of(rows, many(served(crowd)))
        read = store.query(f"{_SELECT} WHERE {chosen.sql}", chosen.parameters, order_by=_ORDER)
    else:
        read = store.query(f"{_SELECT} WHERE {every.sql}", every.parameters, order_by=_ORDER)
        crowd, chosen = crowd_of(read, until), rows
    present = served(crowd)
    requests = where(read, ~pl.col("outcome").fill_null("ok").is_in(NOT_FINISHED))
    drawn = None if chosen == rows else Drawn(len(requests), many(present))
    replicas, unjoined, drawn_scrapes = read_replicas(store, window, filters, present)
    newest = _newest(present, replicas, until)
    # Counters are of the whole engine: they cannot be asked for a tenant's share.
    countable = replicas if not sample_conditions(filters)[1] else ()
    told_aborted = turned_away(with_outcome(crowd, "aborted"), countable, "aborted", window)
    given_up = answered_in_vain(countable, window)
    ended: Ended = EndedRows(requests) if drawn is None else EndedStored(store, rows, present)
    sampling = sampling_of(ended, countable, window, now_unix_ns)
    baseline = _baseline(window, present)
    before, drawn_before = requests.clear(), None
    if baseline is not None:
        before, drawn_before = _before(store, rows_in(baseline, filters))
    whole = None
    if drawn is not None:
        whole = read_whole(store, rows, requests, stored_traffic(store, rows, present), objectives, sampling)
    return Scene(
        window=window,
        requests=requests,
        refused=turned_away(with_outcome(crowd, "refused"), countable, "refused", window),
        aborted=max(told_aborted, given_up),
        estimated_aborted=max(0, given_up - told_aborted),
        sampling=sampling,
        replicas=replicas,
        before=before,
        baseline=baseline if len(before) else None,
        now_unix_ns=now_unix_ns,
        newest_unix_ns=newest,
        unjoined=unjoined,
        unmapped_spans=_unmapped(store),
        facts=_facts(store, rows if drawn is not None else requests),
        ended=_ended(store, replicas, window, newest, now_unix_ns),
        devices=devices_of(devices_in(store, window), [replica.instance for replica in replicas]),
        drawn=drawn,
        drawn_before=drawn_before,
        drawn_scrapes=drawn_scrapes,
        whole=whole,
    )


def _baseline(window: Window, present: pl.DataFrame) -> Window | None:
    first = present["arrival_min_unix_ns"].min()
    if not isinstance(first, int):
        return None
    end = max(window.from_unix_ns, 0)
    if end <= 0:
        return None
    return Window(max(0, end - min(window.to_unix_ns - end, BASELINE_MAX_NS)), end)


def _before(store: Reader, rows: Condition) -> tuple[pl.DataFrame, Drawn | None]:
    """The rows of the time before, or a draw of them."""
    count = count_rows(store, rows)
    chosen = drawn_of(rows, count)
    found = store.query(f"{_SELECT} WHERE {chosen.sql}", chosen.parameters)
    return found, None if chosen == rows else Drawn(len(found), count)


def turned_away(told: Mapping[str | None, int], replicas: Sequence[Replica], outcome: str, window: Window) -> int:
    """Calls of the window with this outcome (`refused`, `aborted`): those that rows tell of (by instance), and what the engines'
    counters of the same name count beyond them.

    One call may be told by its engine's span, by its client's, and by the counter: it is counted once. Rows of a client, or of an
    engine whose counters nobody joined to it, are taken for calls that only a counter tells of.
    """
    placed, only_counted = 0, 0
    for replica in replicas:
        if replica.counters[outcome].null_count() == len(replica.counters):
            continue
        own = sum(told.get(name, 0) for name in {replica.instance, *replica.members})
        placed += own
        only_counted += max(0, round(counted_in(replica.counters, outcome, window)) - own)
    whole = sum(told.values())
    return whole + max(0, only_counted - (whole - placed))


def answered_in_vain(replicas: Sequence[Replica], window: Window) -> int:
    """An estimate of the calls that their clients gave up, where the engine counts none (vLLM): answers that the web server ended
    with 2xx, less the requests that the engine finished.

    Both counters move when a request ends, so that those in flight are in neither (recorded scrapes of vLLM 0.32 show the two
    equal, with 64 requests open). A call with several sequences finishes several requests: then it is too low, never too high.
    """
    found = 0.0
    for replica in replicas:
        samples = replica.counters
        both = samples.filter(pl.col("answered").is_not_null() & pl.col("finished").is_not_null())
        if len(both) < 2:
            continue
        finished = counted_in(both, "finished", window) + counted_in(both, "aborted", window)
        found += max(0.0, counted_in(both, "answered", window) - finished)
    return round(found)


def counted_in(samples: pl.DataFrame, column: str, window: Window) -> float:
    """How far a counter moved inside the window. A series that first appears between two samples of one process began at zero
    (labelled series appear with their first event), and so did that of a process which began just before it was first scraped; a
    counter that falls was reset, and counts from zero."""
    ordered = samples.sort("unix_ns")
    value, moment = ordered[column], ordered["unix_ns"]
    if value.null_count() == len(value):
        return 0.0
    value = value.fill_null(strategy="forward").fill_null(0.0)
    began = ordered["process_start_unix_s"][0]
    young = began is not None and moment[0] - began * 1e9 <= LIVE_NS and began * 1e9 >= window.from_unix_ns
    before = value.shift(1, fill_value=0.0 if young else None)
    moved = pl.select(pl.when(value >= before).then(value - before).otherwise(value)).to_series()
    inside = moment.is_between(window.from_unix_ns, window.to_unix_ns, closed="left") & before.is_not_null()
    return float(moved.filter(inside).sum())


def _ended(
    store: Reader, replicas: Sequence[Replica], window: Window, newest_unix_ns: int | None, now_unix_ns: int
) -> dict[str, tuple[int, int]]:
    """Requests that a replica's newest sample counts as running or waiting, and whose rows say that they ended since: the last step
    of an engine still counts those that it finished."""
    if newest_unix_ns is None:
        return {}
    end = min(newest_unix_ns, window.to_unix_ns)
    at: dict[str, int] = {}
    for replica in replicas:
        seen = replica.samples["unix_ns"]
        last = seen.filter(seen <= end).max()
        if isinstance(last, int) and last >= end - LIVE_NS:  # older samples say nothing about now
            at[replica.instance] = last
    if not at:
        return {}
    names = {name: one.instance for one in replicas if one.instance in at for name in (one.instance, *one.members)}
    until = min(window.to_unix_ns, now_unix_ns + FUTURE_NS)
    counted = store.query(
        "SELECT t.replica AS replica, count(*) FILTER (r.scheduled_unix_ns <= t.at) AS running, count(*) AS ended"
        " FROM requests r JOIN (SELECT unnest(?::VARCHAR[]) AS name, unnest(?::VARCHAR[]) AS replica, unnest(?::BIGINT[]) AS at) t"
        " ON r.instance = t.name AND r.finished_unix_ns > t.at"
        " AND coalesce(r.queued_unix_ns, r.arrival_unix_ns) <= t.at"
        " WHERE r.finished_unix_ns > ? AND r.finished_unix_ns < ? GROUP BY t.replica ORDER BY t.replica",
        (list(names), list(names.values()), [at[one] for one in names.values()], min(at.values()), until),
    )
    return {row["replica"]: (row["running"], row["ended"] - row["running"]) for row in counted.iter_rows(named=True)}


def _newest(present: pl.DataFrame, replicas: Sequence[Replica], until_unix_ns: int) -> int | None:
    times = [present["finished_now_unix_ns"], *(replica.samples["unix_ns"] for replica in replicas)]
    # A clock that runs ahead says nothing of now: such rows are kept, and flagged.
    known = [t for one in times if isinstance(t := one.filter(one <= until_unix_ns).max(), int)]
    return max(known, default=None)


def _unmapped(store: Reader) -> int:
    """Spans ever received that no engine profile knows."""
    counted = store.query("SELECT coalesce(sum(value), 0)::BIGINT AS n FROM counters WHERE name = 'unmapped_spans'")
    return int(counted["n"][0])


def _facts(store: Reader, rows: Condition | pl.DataFrame) -> dict[str, object]:
    """What is known of the recordings behind the rows, for the badge: dataset -> facts."""
    if isinstance(rows, Condition):
        told = store.query(
            f'SELECT DISTINCT "dataset" FROM "requests" WHERE {rows.sql} AND "dataset" IS NOT NULL', rows.parameters
        )
    else:
        told = rows
    names = told["dataset"].drop_nulls().unique().sort().to_list()
    if not names:
        return {}
    runs = store.query("SELECT name, facts FROM runs WHERE list_contains(?, name)", (names,))
    known = {row["name"]: json.loads(row["facts"] or "{}") for row in runs.iter_rows(named=True)}
    return {name: known.get(name, {}) for name in names}
