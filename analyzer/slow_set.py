"""The requests under question: those that break an objective, else the slowest tenth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from phasewise.analyzer.coverage import UNKNOWN, Sampling
from phasewise.analyzer.sums import RowSums, Sums
from phasewise.analyzer.window import Objective

BROKEN_RATIO = 0.01  # of requests over a limit: from here on an objective is broken
SLOW_SET_MIN = 3
OBJECTIVE_COLUMNS = {
    ("ttft", "engine"): "ttft_s",
    ("tpot", "engine"): "tpot_s",
    ("itl", "engine"): "itl_p95_s",
    ("e2e", "engine"): "e2e_s",
    ("queue", "engine"): "queue_s",
    ("ttft", "client"): "entry_ttft_s",
    ("e2e", "client"): "entry_e2e_s",
    ("itl", "client"): "itl_p95_s",
    ("tpot", "client"): "tpot_s",
    ("queue", "client"): "queue_s",
}


@dataclass(frozen=True, slots=True)
class SlowSet:
    """objective: the most broken one, the first where none is; over_limit: how many requests are over it; breaks: whether those are
    so many that it is broken, and `rows` are they. sums: of all of them, also where `rows` are drawn."""

    objective: Objective | None
    over_limit: int | None
    breaks: bool
    rows: pl.DataFrame
    sums: Sums


def slow_set(rows: pl.DataFrame, objectives: Sequence[Objective], sampling: Sampling = UNKNOWN) -> SlowSet:
    """The requests under question among all those that are attributed."""
    objective, broken = most_broken(rows, objectives)
    breaks = objective is not None and len(rows) > 0 and sampling.share(broken, rows) > BROKEN_RATIO
    chosen = broken if breaks else slowest(rows, sampling)
    return SlowSet(objective, len(broken) if objective is not None else None, breaks, chosen, RowSums(chosen))


def limited(rows: pl.DataFrame, objective: Objective) -> pl.DataFrame:
    """Rows that break an objective; a row without that figure breaks nothing."""
    knows = rows["itl_p95_s"].null_count() < len(rows)
    return rows.filter(pl.col(objective_column(objective, knows)) > objective.limit_s)


def objective_column(objective: Objective, knows_gaps: bool) -> str:
    """knows_gaps: whether any request tells the gaps between its tokens."""
    column = OBJECTIVE_COLUMNS[objective.metric, objective.boundary]
    # Without inter-token gaps the mean gap of the request stands in; the page names it TPOT.
    return "tpot_s" if column == "itl_p95_s" and not knows_gaps else column


def most_broken(rows: pl.DataFrame, objectives: Sequence[Objective]) -> tuple[Objective | None, pl.DataFrame]:
    """The objective that most requests break, and those requests; none given or none broken: (the first, no rows)."""
    best: tuple[Objective | None, pl.DataFrame] = (objectives[0] if objectives else None, rows.clear())
    for objective in objectives:
        broken = limited(rows, objective)
        if len(broken) > len(best[1]):
            best = (objective, broken)
    return best


def slowest(rows: pl.DataFrame, sampling: Sampling = UNKNOWN) -> pl.DataFrame:
    """The slowest tenth by end-to-end time, at least 3; of a sample, the rows that stand for the slowest tenth of all requests."""
    # Only what tells which they are is put in order: all columns of many rows take as much again while they are.
    judged = rows.select("e2e_s", "request_key", "finished_unix_ns").with_row_index("place")
    known = judged.filter(pl.col("e2e_s").is_not_null()).sort(["e2e_s", "request_key"], descending=[True, False])
    count = tenth(len(known))
    if sampling.is_partial and len(known):
        population = float(sampling.weights(known).sum()) / (sampling.share(known, known) or 1.0)
        reached = np.cumsum(sampling.weights(known)) >= population / 10
        count = max(SLOW_SET_MIN, int(reached.argmax()) + 1 if reached.any() else len(known))
    return rows[known["place"].head(count)]


def tenth(count: int) -> int:
    """How many of so many requests are taken for the slow ones where no limit tells."""
    return max(SLOW_SET_MIN, -(-count // 10))
