"""Answers as plain objects, for the API and for the pages alike: numbers in seconds and tokens, `None` for unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from phasewise.analyzer import gauges, questions
from phasewise.analyzer.dimensions import DIMENSIONS, UNKNOWN, Dimension, dimension, metric
from phasewise.analyzer.filters import Condition, sample_conditions
from phasewise.analyzer.listing import count_requests
from phasewise.analyzer.window import Window
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.caps import require_groups
from phasewise.dashboard.state import View
from phasewise.dashboard.wording import PHASES
from phasewise.rules.errors import InputError
from phasewise.rules.vocabulary import CAUSES, CLASSES

TREND_METRICS = ("ttft", "tpot", "itl", "e2e", "queue")
# Fields whose differences are looked for, when nobody says which.
DIFFERENCE_FIELDS = (
    "input",
    "output",
    "concurrency",
    "cache",
    "model",
    "instance",
    "tenant",
    "route",
    "engine_version",
)
LEAST_ROWS = 30  # a value with fewer requests says nothing about what slow ones have in common
SIGNIFICANT = 0.01
MOST_BINS, LEAST_BINS, ROWS_A_BIN = 90, 15, 4


def window_object(window: Window) -> dict[str, object]:
    return {
        "from_unix_ns": window.from_unix_ns,
        "to_unix_ns": window.to_unix_ns,
        "from": fmt.timestamp(max(window.from_unix_ns, 0)),
        "to": fmt.timestamp(min(window.to_unix_ns, 4 * 10**18)),
    }


def closed(window: Window, answers: Answers) -> Window:
    """The window without its endless ends, for axes: no earlier than the first data, no later than the last."""
    if window.seconds <= 400 * 86400:
        return window
    found = answers.reader.query(
        'SELECT min("arrival_unix_ns") AS first, max("finished_unix_ns") AS last FROM "requests" '
        'WHERE "finished_unix_ns" >= ? AND "finished_unix_ns" < ?',
        (window.from_unix_ns, window.to_unix_ns),
    ).row(0, named=True)
    if found["first"] is None:
        return window
    return Window(max(window.from_unix_ns, found["first"]), min(window.to_unix_ns, found["last"] + 1))


def overview(answers: Answers, view: View) -> dict[str, Any]:
    """One row of figures for the window, and the engine counters beside them."""
    window = view.window(answers.now())
    key = ("overview", window, view.filters, view.slo, answers.watermark().token)
    return answers.once(key, lambda: _overview(answers, view, window))


def _overview(answers: Answers, view: View, window: Window) -> dict[str, Any]:
    rows = answers.rows(window, view.filters)
    slow = answers.slow_set(window, view.filters, view.slo)
    found: dict[str, Any] = questions.ask(answers.reader, questions.overview_sql(), rows, marked=slow).row(
        0, named=True
    )
    engine: dict[str, Any] = gauges.ask_samples(answers.reader, gauges.totals_sql(), window, view.filters).row(
        0, named=True
    )
    hits, looked_up = engine["prefix_hits_tokens_change"], engine["prefix_queries_tokens_change"]
    ratio = hits / looked_up if hits is not None and looked_up else engine["prefix_hit_gauge_ratio"]
    return {"window": window_object(window), "requests": found, "engine": engine | {"prefix_hit_ratio": ratio}}


def timeline(answers: Answers, view: View) -> dict[str, Any]:
    """Series over equal time bins: percentiles of finished requests, and the engines' gauges. None is a gap."""
    window = closed(view.window(answers.now()), answers)
    key = ("timeline", window, view.filters, answers.watermark().token)
    return answers.once(key, lambda: _timeline(answers, view, window))


def _timeline(answers: Answers, view: View, window: Window) -> dict[str, Any]:
    rows = answers.rows(window, view.filters)
    n = count_requests(answers.reader, rows)
    # A percentile of two requests is noise: with little traffic the bins are wider. Samples come at their own pace.
    grid = questions.bins(window, max(LEAST_BINS, min(MOST_BINS, n // ROWS_A_BIN)))
    fine = questions.bins(window, MOST_BINS)
    trend = questions.ask(answers.reader, questions.trend_sql(TREND_METRICS), rows, grid=grid)
    causes = questions.ask(answers.reader, questions.causes_over_time_sql(), rows, grid=grid)
    state = gauges.ask_samples(answers.reader, gauges.state_sql(), window, view.filters, grid=fine)
    _, unfiltered = sample_conditions(view.filters)
    shown = [cause for cause in CAUSES if causes.height and (causes[cause].sum() or 0) > 0]
    return {
        "window": window_object(window),
        "requests": _spread(trend, grid),
        "causes": _spread(causes.select("bin", "n", "e2e_s", *shown), grid),
        "engine": _spread(state, fine) | {"not_filtered_by": list(unfiltered)},
        "annotations": annotations_in(answers, window),
    }


def _spread(frame: pl.DataFrame, grid: questions.Bins) -> dict[str, Any]:
    """Columns over all bins: a bin without a row is None, which charts leave open."""
    places = {index: row for row, index in enumerate(frame["bin"].to_list())}
    order = [places.get(index) for index in range(grid.count)]
    series = {}
    for name in frame.columns:
        if name != "bin":
            values = frame[name].to_list()
            series[name] = [None if row is None else values[row] for row in order]
    return {"bin_s": grid.width_ns / 1e9, "starts_unix_ns": grid.starts_unix_ns, "series": series}


def annotations_in(answers: Answers, window: Window) -> list[dict[str, Any]]:
    """Marks of the time axis; what people said about verdicts is not one of them."""
    frame = answers.reader.query(
        'SELECT "unix_ns", "kind", "text", "source" FROM "annotations" WHERE "unix_ns" >= ? AND "unix_ns" < ? '
        'AND "kind" <> \'outcome\' ORDER BY "unix_ns", "text" LIMIT 200',
        (window.from_unix_ns, window.to_unix_ns),
    )
    return frame.to_dicts()


def phase_stack(answers: Answers, view: View) -> dict[str, Any]:
    """Mean seconds a request by phase, for the slow set and for the others; a phase nobody reports is None."""
    window = view.window(answers.now())
    slow = answers.slow_set(window, view.filters, view.slo)
    frame = questions.ask(answers.reader, questions.phases_sql(), answers.rows(window, view.filters), marked=slow)
    found: dict[str, Any] = {}
    for row in frame.iter_rows(named=True):
        n = row["n"]
        means = {name: row[f"{name}_s"] / n if row[f"{name}_n"] else None for name in PHASES}
        found["slow" if row["marked"] else "others"] = {
            "n": n,
            "e2e_s": row["e2e_s"] / row["e2e_n"] if row["e2e_n"] else None,
            "phases": means,
            "known_n": {name: row[f"{name}_n"] for name in PHASES},
        }
    return found


def heat(answers: Answers, view: View, metric_name: str) -> dict[str, Any]:
    """Counts over time bins and quarter octaves of a metric."""
    window = closed(view.window(answers.now()), answers)
    grid = questions.bins(window, 72)
    rows = answers.rows(window, view.filters)
    frame = questions.ask(answers.reader, questions.heat_sql(metric_name), rows, grid=grid)
    levels = frame["level"].to_list()
    low, high = (min(levels), max(levels)) if levels else (0, -1)
    counts = [[0] * grid.count for _ in range(low, high + 1)]
    for row in frame.iter_rows(named=True):
        if 0 <= row["bin"] < grid.count:
            counts[row["level"] - low][row["bin"]] = row["n"]
    return {
        "metric": metric_name,
        "window": window_object(window),
        "bin_s": grid.width_ns / 1e9,
        "starts_unix_ns": grid.starts_unix_ns,
        "edges_s": [2 ** (level / questions.STEPS_AN_OCTAVE) for level in range(low, high + 2)] if levels else [],
        "counts": counts,
        "n": int(frame["n"].sum() or 0),
    }


def histogram(answers: Answers, view: View, metric_name: str) -> dict[str, Any]:
    """Counts over quarter octaves of a metric, slow ones apart."""
    window = view.window(answers.now())
    slow = answers.slow_set(window, view.filters, view.slo)
    rows = answers.rows(window, view.filters)
    frame = questions.ask(answers.reader, questions.histogram_sql(metric_name), rows, marked=slow)
    levels = frame["level"].to_list()
    every = range(min(levels), max(levels) + 1) if levels else range(0)
    by_level = {row["level"]: row for row in frame.iter_rows(named=True)}
    return {
        "metric": metric_name,
        "edges_s": [2 ** (level / questions.STEPS_AN_OCTAVE) for level in [*every, every.stop]] if levels else [],
        "n": [by_level[level]["n"] if level in by_level else 0 for level in every],
        "slow_n": [by_level[level]["marked_n"] if level in by_level else 0 for level in every],
    }


def selection(answers: Answers, view: View, window: Window) -> Condition:
    """The requests in question: inside the box drawn on the heatmap, else the slow set."""
    if (box := view.box) is None:
        return answers.slow_set(window, view.filters, view.slo)
    column = metric(view.metric).column
    return Condition(
        f'("finished_unix_ns" >= ? AND "finished_unix_ns" < ? AND "{column}" >= ? AND "{column}" < ?)',
        (box.from_unix_ns, box.to_unix_ns, box.low_s, box.high_s),
    )


def slice_list(answers: Answers, view: View, by: Sequence[str], metric_name: str) -> dict[str, Any]:
    """Cells of one or two dimensions (more are taken too): n, percentiles with their mark `few`, slow ones, class shares."""
    window = view.window(answers.now())
    dims = [dimension(name) for name in by]
    if not dims or len(dims) > 4:
        raise InputError("by", ",".join(by), "names no or too many dimensions", "one to four")
    chosen = metric(metric_name)
    rows = answers.rows(window, view.filters)
    marked = selection(answers, view, window)
    sql = questions.slices_sql(tuple(found.name for found in dims), chosen.name)
    found = questions.ask(answers.reader, sql, rows, marked=marked)
    require_groups(found.height)
    frame = questions.sorted_by(found, dims)
    return {
        "window": window_object(window),
        "by": [found.name for found in dims],
        "metric": chosen.name,
        "boundary": chosen.boundary,
        "cells": [_cell(row, dims) for row in frame.iter_rows(named=True)],
        "prefix_hit_ratio": prefix_hit_ratio(answers, view, window) if "cache" in by else None,
    }


def _cell(row: Mapping[str, Any], dims: Sequence[Dimension]) -> dict[str, Any]:
    n = row["metric_n"]
    seconds = {name: row[f"{name}_s"] for name in CLASSES}
    booked = sum(seconds.values())
    return {
        "values": {found.name: row[f"by_{i}"] for i, found in enumerate(dims)},
        "n": row["n"],
        "slow_n": row["marked_n"],
        "metric_n": n,
        **{f"p{round(p * 100)}_s": row[f"metric_p{round(p * 100)}_s"] for p in questions.PERCENTILES},
        "few": [f"p{round(p * 100)}" for p in questions.PERCENTILES if questions.few(n, p)],
        "e2e_s": row["e2e_s"],
        "shares": {name: value / booked for name, value in seconds.items() if value > 0} if booked > 0 else {},
    }


def prefix_hit_ratio(answers: Answers, view: View, window: Window) -> float | None:
    """Of all prompt tokens looked up in the window, the share found in the cache, by the engines' own counters."""
    row = gauges.ask_samples(answers.reader, gauges.totals_sql(), window, view.filters).row(0, named=True)
    hits, looked_up = row["prefix_hits_tokens_change"], row["prefix_queries_tokens_change"]
    if hits is not None and looked_up:
        return float(hits / looked_up)
    gauge = row["prefix_hit_gauge_ratio"]
    return float(gauge) if gauge is not None else None


def difference_list(answers: Answers, view: View, by: Sequence[str], metric_name: str) -> dict[str, Any]:
    """Values of fields ranked by how much of the selection's excess time each explains. lift: its share in the selection
    over its share in the rest; faint: not significant after correcting for the number of values looked at."""
    window = view.window(answers.now())
    rows = answers.rows(window, view.filters)
    marked = selection(answers, view, window)
    name = metric(metric_name).name
    asked = [dimension(field) for field in (by or DIFFERENCE_FIELDS)]
    found: list[dict[str, Any]] = []
    same: dict[tuple[Any, ...], dict[str, Any]] = {}
    marked_n = rest_n = 0
    for field in asked:
        frame = questions.ask(answers.reader, questions.differences_sql(field.name, name), rows, marked=marked)
        if frame.is_empty():
            continue
        marked_n = int(frame["marked_n"].sum())
        rest_n = int(frame["n"].sum()) - marked_n
        excess_s = float(frame["excess_s"].sum() or 0)
        signature = tuple(sorted((row["marked_n"], row["n"]) for row in frame.iter_rows(named=True)))
        for row in frame.iter_rows(named=True):
            entry = _difference(row, field, marked_n, rest_n, excess_s)
            twin = same.get((signature, row["marked_n"], row["n"])) if len(signature) > 1 else None
            if twin is not None and field.edges is None:
                twin["same_as"].append({"field": field.name, "title": field.title, "value": row["value"]})
                continue
            same[(signature, row["marked_n"], row["n"])] = entry
            found.append(entry)
    tested = max(len(found), 1)
    kept = [entry for entry in found if entry["n"] >= LEAST_ROWS]
    for entry in kept:
        entry["faint"] = entry["p_value"] is None or entry["p_value"] * tested > SIGNIFICANT
    kept.sort(
        key=lambda one: (one["faint"], -(one["explains_ratio"] or 0), -(one["lift"] or 0), one["field"], one["value"])
    )
    return {
        "window": window_object(window),
        "metric": name,
        "selection_n": marked_n,
        "rest_n": rest_n,
        "boxed": view.box is not None,
        "hidden": len(found) - len(kept),
        "differences": kept,
    }


def _difference(
    row: Mapping[str, Any], field: Dimension, marked_n: int, rest_n: int, excess_s: float
) -> dict[str, Any]:
    inside, outside = row["marked_n"], row["n"] - row["marked_n"]
    share_in = inside / marked_n if marked_n else None
    share_out = outside / rest_n if rest_n else None
    return {
        "field": field.name,
        "title": field.title,
        "value": row["value"],
        "n": row["n"],
        "selection_n": inside,
        "share_in_selection": share_in,
        "share_in_rest": share_out,
        "lift": share_in / share_out if share_in is not None and share_out else None,
        "explains_ratio": row["explained_s"] / excess_s if excess_s > 0 else None,
        "p_value": _two_shares(inside, marked_n, outside, rest_n),
        "same_as": [],
    }


def _two_shares(a: int, n: int, b: int, m: int) -> float | None:
    """Two-sided p of equal shares a/n and b/m by the pooled normal approximation; None where it says nothing."""
    if not n or not m:
        return None
    pooled = (a + b) / (n + m)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return math.erfc(abs(a / n - b / m) / spread / math.sqrt(2)) if spread > 0 else None


def facets(answers: Answers, view: View, names: Sequence[str]) -> list[dict[str, Any]]:
    """Values with counts for the filter drawer; a field that only has one unknown value is left out."""
    window = view.window(answers.now())
    rows = answers.rows(window, view.filters)
    slow = answers.slow_set(window, view.filters, view.slo)
    found = []
    for name in names:
        field = DIMENSIONS[name]
        frame = questions.ask(answers.reader, questions.facet_sql(name), rows, marked=slow)
        values = frame.to_dicts()
        if not values or [value["value"] for value in values] == [UNKNOWN]:
            continue
        if field.edges is not None:
            values.sort(key=lambda value: field.order(value["value"]))
        found.append({"name": name, "title": field.title, "values": values})
    return found


def where(answers: Answers, view: View, names: Sequence[str]) -> list[dict[str, Any]]:
    """For each value of a few fields, how many of its requests are slow: where it hurts."""
    return [one for one in facets(answers, view, names) if len(one["values"]) > 1 or one["values"][0]["marked_n"]]
