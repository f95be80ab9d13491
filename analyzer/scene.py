"""All that a verdict looks at: the rows of a window, the samples of its engines, their settings, and the time before.

Reading the store happens here and nowhere else in the analyzer's verdict; what follows is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.replicas import Reader, Replica, read_replicas
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.watermarks import FUTURE_NS
from phasewise.rules.vocabulary import CAUSE_COLUMNS

STALE_NS = 5 * 60 * 10**9  # live samples older than this say nothing about now
BASELINE_MAX_NS = 3600 * 10**9


# Columns of `requests` that verdicts look at; a row has twice as many.
ROW_COLUMNS = (
    "request_key trace_id instance engine engine_version model tenant request_class dataset outcome input_tokens cached_tokens"
    " output_tokens arrival_unix_ns queued_unix_ns scheduled_unix_ns finished_unix_ns e2e_s ttft_s queue_s context_s prefill_s"
    " first_token_s decode_s tpot_s external_s entry_e2e_s entry_ttft_s entry_tpot_s itl_p95_s client_gaps preemptions decode_batch_mean"
    " primary_class cause measured_s clamped missing_signals first_causes revision final"
).split() + list(CAUSE_COLUMNS)
_SELECT = f"SELECT {', '.join(ROW_COLUMNS)} FROM requests"


@dataclass(frozen=True, slots=True)
class Scene:
    """requests: served calls; refused, aborted: counts; before: served calls of the baseline window; unjoined: scraped
    instances that nothing tells whose they are."""

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


def read_scene(store: Reader, window: Window, filters: Sequence[Filter], now_unix_ns: int) -> Scene:
    """Everything the verdict of a window needs."""
    chosen = rows_in(window, filters, served=False)
    rows = store.query(f"{_SELECT} WHERE {chosen.sql}", chosen.parameters)
    served = rows.filter(~pl.col("outcome").fill_null("ok").is_in(["refused", "aborted"]))
    replicas, unjoined = read_replicas(store, window, filters, served)
    aborted_counted = int((rows["outcome"] == "aborted").sum()) + _aborted_counters(replicas)
    baseline = _baseline(window, served)
    before = served.clear()
    if baseline is not None:
        earlier = rows_in(baseline, filters)
        before = store.query(f"{_SELECT} WHERE {earlier.sql}", earlier.parameters)
    return Scene(
        window=window,
        requests=served.sort("finished_unix_ns", "request_key"),
        refused=int((rows["outcome"] == "refused").sum()),
        aborted=aborted_counted,
        replicas=replicas,
        before=before,
        baseline=baseline if len(before) else None,
        now_unix_ns=now_unix_ns,
        newest_unix_ns=_newest(served, replicas, now_unix_ns),
        unjoined=unjoined,
        unmapped_spans=_unmapped(store),
        facts=_facts(store, served),
    )


def _baseline(window: Window, served: pl.DataFrame) -> Window | None:
    first = served["arrival_unix_ns"].min()
    if not isinstance(first, int):
        return None
    end = max(window.from_unix_ns, 0)
    if end <= 0:
        return None
    return Window(max(0, end - min(window.to_unix_ns - end, BASELINE_MAX_NS)), end)


def _aborted_counters(replicas: Sequence[Replica]) -> int:
    total = 0.0
    for replica in replicas:
        counter = replica.samples["aborted"].drop_nulls()
        if len(counter) > 1:
            steps = counter.diff().drop_nulls()
            total += float(steps.filter(steps > 0).sum())
    return round(total)


def _newest(served: pl.DataFrame, replicas: Sequence[Replica], now_unix_ns: int) -> int | None:
    times = [served["finished_unix_ns"], *(replica.samples["unix_ns"] for replica in replicas)]
    # A clock that runs ahead says nothing of now: such rows are kept, and flagged.
    known = [t for one in times if isinstance(t := one.filter(one <= now_unix_ns + FUTURE_NS).max(), int)]
    return max(known, default=None)


def _unmapped(store: Reader) -> int:
    """Spans ever received that no engine profile knows."""
    counted = store.query("SELECT coalesce(sum(value), 0)::BIGINT AS n FROM counters WHERE name = 'unmapped_spans'")
    return int(counted["n"][0])


def _facts(store: Reader, served: pl.DataFrame) -> dict[str, object]:
    """What is known of the recordings behind the rows, for the badge: dataset -> facts."""
    names = served["dataset"].drop_nulls().unique().sort().to_list()
    if not names:
        return {}
    runs = store.query("SELECT name, facts FROM runs WHERE list_contains(?, name)", (names,))
    told = {row["name"]: json.loads(row["facts"] or "{}") for row in runs.iter_rows(named=True)}
    return {name: told.get(name, {}) for name in names}
