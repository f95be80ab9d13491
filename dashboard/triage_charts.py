"""The figures of the triage page: the stat row, TTFT as a heatmap, causes over time, and four small time lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash import html

from phasewise.analyzer import questions
from phasewise.analyzer.window import Objective, Window
from phasewise.dashboard import figures, tables
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.figures import Limit, Line
from phasewise.dashboard.panels import box, chart, folded_table, panel, sparkline, swatch, text
from phasewise.dashboard.state import View
from phasewise.dashboard.states import LOW_TRAFFIC, empty_state
from phasewise.dashboard.wording import cause_colour, cause_text

TTFT, TPOT, QUEUE, RUNNING, KV = "#56B4E9", "#35C79A", "#E69F00", "#8EA4C8", "#D98CC0"


def stats(answers: Answers, view: View) -> Any:
    """Eight figures with their course and their change against the window before."""
    if empty_state(answers, view) is not None:
        return None
    window = tables.closed(view.window(answers.now()), answers)
    now = tables.overview(answers, view)
    series = tables.timeline(answers, view)
    earlier = Window(window.from_unix_ns - (window.to_unix_ns - window.from_unix_ns), window.from_unix_ns)
    rows = answers.rows(earlier, view.filters)
    before: dict[str, Any] = questions.ask(answers.reader, questions.overview_sql(), rows).row(0, named=True)
    return box("stats", *[_stat(one) for one in _stat_rows(now, before, series, window.seconds, view.slo)])


def _stat_rows(
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    series: Mapping[str, Any],
    seconds: float,
    slo: Sequence[Objective],
) -> list[dict[str, Any]]:
    got, trend, engine = now["requests"], series["requests"]["series"], series["engine"]["series"]
    bin_s = series["requests"]["bin_s"]
    # A window before with next to nothing in it is no yardstick.
    comparable = before["n"] >= max(LOW_TRAFFIC, 0.05 * got["n"])

    def per_s(name: str) -> list[float | None]:
        # No request ended in an empty bin: that is a rate of zero, not a gap.
        return [(value or 0) / bin_s for value in trend.get(name, [])]

    def rate(name: str, label: str, unit: str) -> dict[str, Any]:
        value = None if got[name] is None else got[name] / seconds
        old = None if before[name] is None else before[name] / seconds
        return {
            "label": label,
            "value": fmt.compact(value),
            "unit": unit,
            "delta": fmt.change(value, old) if comparable else None,
            "line": per_s(name),
        }

    def delay(name: str, label: str, colour: str) -> dict[str, Any]:
        value, n = got[f"{name}_p95_s"], got[f"{name}_n"]
        limit = next((one.limit_s for one in slo if one.metric == name and one.boundary == "engine"), None)
        return {
            "label": label,
            "value": fmt.seconds(value, fmt.NONE),
            "delta": fmt.change(value, before[f"{name}_p95_s"]) if comparable else None,
            "line": trend.get(f"{name}_p95_s", []),
            "colour": colour,
            "tone": "" if limit is None or value is None else "bad" if value > limit else "good",
            "few": f"few (n={n})" if questions.few(n, 0.95) and n else None,
        }

    errors = got["error_n"] / got["n"] if got["n"] else None
    waiting = [value for value in engine.get("waiting", []) if value is not None]
    gaps = delay("itl", "ITL p95", TPOT) if got["itl_n"] else delay("tpot", "TPOT p95", TPOT)
    return [
        rate("n", "Requests", "/s"),
        rate("input_tokens", "Input", "tok/s"),
        rate("output_tokens", "Output", "tok/s"),
        {
            "label": "Errors",
            "value": fmt.share(errors, fmt.NONE),
            "tone": "bad" if (errors or 0) > 0.01 else "",
            "line": trend.get("error_n", []),
        },
        delay("ttft", "TTFT p95", TTFT),
        gaps,
        delay("e2e", "E2E p95", "#B9C6DA"),
        {
            "label": "Waiting",
            "value": fmt.number(waiting[-1], unknown=fmt.NONE) if waiting else fmt.NONE,
            "few": None if waiting else "no engine metrics",
            "line": engine.get("waiting", []),
            "colour": QUEUE,
        },
    ]


def _stat(one: Mapping[str, Any]) -> html.Div:
    delta = one.get("delta")
    return box(
        "stat",
        box(
            "stat-head",
            text("stat-label", one["label"]),
            text("stat-delta", delta, title="Against the window before") if delta else None,
        ),
        box(
            f"stat-value {one.get('tone') or ''}",
            text("", one["value"]),
            text("stat-unit", one["unit"]) if one.get("unit") else None,
            text("stat-few", one["few"]) if one.get("few") else None,
        ),
        sparkline(one.get("line") or [], one.get("colour", "#7d8aa0")),
    )


def charts(answers: Answers, view: View) -> Any:
    """TTFT as a heatmap, and causes over time."""
    if empty_state(answers, view) is not None:
        return None
    heat = tables.heat(answers, view, "ttft")
    window = (heat["window"]["from_unix_ns"], heat["window"]["to_unix_ns"])
    limit = next((one.limit_s for one in view.slo if one.metric == "ttft"), None)
    series = tables.timeline(answers, view)
    booked = series["causes"]["series"]
    causes = [name for name in booked if name not in ("n", "e2e_s")]
    totals = {name: sum(value or 0.0 for value in booked[name]) for name in causes}
    ordered = sorted(causes, key=lambda name: -totals[name])
    whole = sum(totals.values()) or 1.0
    legend = box(
        "legend",
        *[
            html.Span(
                [
                    swatch(cause_colour(name)),
                    text("", cause_text(name).short),
                    text("quiet", fmt.percent(totals[name] / whole)),
                ],
                className="legend-item",
            )
            for name in ordered[:7]
        ],
    )
    return [
        panel(
            "TTFT",
            chart(
                figures.heatmap(heat, window, limit_s=limit, box=None, select=False),
                {"type": "time-chart", "name": "heat"},
                190,
                f"Heatmap of time to first token of {fmt.counted(heat['n'], 'request')} over time",
            )
            if heat["n"]
            else box("nothing", text("", "No request in this window has a known TTFT.")),
            note="requests by completion time; drag to zoom",
            source="requests.ttft_s at the engine boundary, quarter octaves, square-root colour.",
            table=folded_table(
                ["TTFT", "Requests"],
                [
                    (f"{fmt.seconds(heat['edges_s'][i])} – {fmt.seconds(heat['edges_s'][i + 1])}", fmt.count(sum(row)))
                    for i, row in enumerate(heat["counts"])
                ],
            ),
        ),
        panel(
            "Causes over time",
            chart(
                figures.cause_areas(series["causes"], window),
                {"type": "time-chart", "name": "causes"},
                168,
                f"Share of time by cause; most goes to {cause_text(ordered[0]).short}" if ordered else "No cause known",
            ),
            legend,
            note="share of end-to-end seconds",
            source="Cause columns of requests, by completion time.",
            table=folded_table(
                ["Cause", "Share"], [(cause_text(name).short, fmt.share(totals[name] / whole)) for name in ordered]
            ),
        ),
    ]


def time_lines(answers: Answers, view: View) -> Any:
    """TTFT, token gaps, queue and running, KV and preemptions: four small charts on one time axis."""
    if answers.watermark().empty:
        return None
    series = tables.timeline(answers, view)
    got, engine = series["requests"], series["engine"]
    scraped = any(value is not None for value in engine["series"].get("running", []))
    if not any(got["series"].get("n", [])) and not scraped:
        return None
    drawn = _Drawn((series["window"]["from_unix_ns"], series["window"]["to_unix_ns"]), series["annotations"])
    limits = {
        one.metric: (Limit(one.limit_s, f"SLO {fmt.seconds(one.limit_s)}"),)
        for one in view.slo
        if one.boundary == "engine"
    }
    gap = "itl" if any(value is not None for value in got["series"].get("itl_p95_s", [])) else "tpot"
    unfiltered = engine["not_filtered_by"]
    flag = f"not filtered by {', '.join(unfiltered)}" if unfiltered and scraped else None
    gauges = engine["series"]
    waiting = [
        Line("running", gauges.get("running", []), RUNNING, 1.5),
        Line("waiting", gauges.get("waiting", []), QUEUE, 2.0, filled=True),
    ]
    in_use = [Line("KV in use", gauges.get("kv_usage_ratio", []), KV, 1.8, filled=True)]
    return box(
        "grid-4",
        drawn.panel(
            "TTFT", "ttft", got, _percentiles(got, "ttft", TTFT), "seconds", "requests.ttft_s, engine boundary",
            note="p50 p95 p99", limits=limits.get("ttft", ()),
        ),
        drawn.panel(
            gap.upper(), gap, got, _percentiles(got, gap, TPOT), "seconds",
            f"requests.{'itl_p95_s' if gap == 'itl' else 'tpot_s'}, engine boundary", note="p50 p95 p99", limits=limits.get(gap, ()),
        ),
        drawn.panel(
            "Waiting and running", "queue", engine, waiting, "count", "Gauges of the engines' /metrics, or what their own steps say, summed over replicas",
            flag=flag, absent=_NO_SCRAPES,
        ),
        drawn.panel(
            "KV cache in use", "kv", engine, in_use, "ratio",
            "Fullest KV pool by the engines' /metrics or steps; the threshold of 97 % is a default", note=_preempted(gauges), flag=flag,
            absent=_NO_SCRAPES, top=1.0, limits=(Limit(0.97, "97 %"),),
        ),
    )  # fmt: skip


_NO_SCRAPES = "No engine metrics in this window: start serve with --scrape http://ENGINE/metrics."


def _percentiles(over_time: Mapping[str, Any], name: str, colour: str) -> list[Line]:
    series = over_time["series"]
    return [
        Line("p99", series.get(f"{name}_p99_s", []), colour, 1.0, "dot", 0.75),
        Line("p95", series.get(f"{name}_p95_s", []), colour, 2.0),
        Line("p50", series.get(f"{name}_p50_s", []), colour, 1.2, "solid", 0.55),
    ]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Small charts over one window, with the same marks on all of them."""

    window: tuple[int, int]
    marks: Sequence[Mapping[str, Any]]

    def panel(
        self,
        title: str,
        name: str,
        over_time: Mapping[str, Any],
        lines: Sequence[Line],
        unit: str,
        source: str,
        *,
        note: str | None = None,
        flag: str | None = None,
        absent: str = "Not known in this window.",
        top: float | None = None,
        limits: Sequence[Limit] = (),
    ) -> Any:
        known = [line for line in lines if any(value is not None for value in line.values)]
        if not known:
            return panel(title, box("nothing", text("", absent)), source=source)
        starts = over_time["starts_unix_ns"]
        figure = figures.time_lines(
            starts, known, self.window, bin_s=over_time["bin_s"], unit=unit, limits=limits, marks=self.marks, top=top
        )
        return panel(
            title,
            chart(figure, {"type": "time-chart", "name": name}, 150, _summary(title, known, starts, unit)),
            note=note,
            source=source,
            flag=flag,
            table=_series_table(starts, known, unit),
        )


def _preempted(engine: Mapping[str, Any]) -> str | None:
    values = [value for value in engine.get("preemptions_change", []) if value is not None]
    if not values:
        return None
    total = sum(values)
    return fmt.counted(total, "preemption") if total else "no preemptions"


def _summary(title: str, lines: Sequence[Line], starts: Sequence[int], unit: str) -> str:
    """One sentence for the chart: first and last value of its main line, and when."""
    line = max(lines, key=lambda one: one.width)
    known = [(start, value) for start, value in zip(starts, line.values, strict=True) if value is not None]
    if not known:
        return f"{title}: no values"
    (first, a), (last, b) = known[0], known[-1]
    moved = "stayed at" if a == b else "rose from" if b > a else "fell from"
    values = figures.unit_text(a, unit) if a == b else f"{figures.unit_text(a, unit)} to {figures.unit_text(b, unit)}"
    return f"{title} {line.name} {moved} {values} between {fmt.moment(first)} and {fmt.moment(last)} UTC"


def _series_table(starts: Sequence[int], lines: Sequence[Line], unit: str) -> Any:
    rows = []
    for i, start in enumerate(starts):
        values = [line.values[i] for line in lines]
        if any(value is not None for value in values):
            rows.append((fmt.moment(start), *(fmt.NONE if v is None else figures.unit_text(v, unit) for v in values)))
    return folded_table(["UTC", *(line.name for line in lines)], rows)
