"""Charts as plain Plotly figures: functions of data to dictionaries. Colours of text and grid lines come from the style sheet.

Texts that came from telemetry are escaped here: Plotly would make links of them.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.dashboard import format as fmt
from phasewise.dashboard.wording import cause_colour, cause_text

Figure = dict[str, Any]
Numbers = Sequence[float | None]
FONT = 'Inter, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MUTED = "#8f9bad"
GRID = "rgba(128,144,170,0.16)"
SLO_COLOUR = "#ff6b6b"
WARN_COLOUR = "#E6B450"


def safe(text: object) -> str:
    """Text that Plotly shows as it is."""
    return html.escape(str(text), quote=False)


@dataclass(frozen=True, slots=True)
class Line:
    """One series. values in seconds, counts or ratios; None is a gap. filled: the area under it is tinted."""

    name: str
    values: Numbers
    colour: str
    width: float = 1.5
    dash: str = "solid"
    opacity: float = 1.0
    filled: bool = False
    texts: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A dashed line with what it is: an SLO, or a threshold and where it is from."""

    value: float
    label: str
    colour: str = SLO_COLOUR


def _layout(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 11, "color": MUTED},
        "margin": {"l": 48, "r": 8, "t": 6, "b": 22},
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "#10151c",
            "bordercolor": "#364152",
            "font": {"size": 11, "color": "#e8ecf2", "family": FONT},
        },
        "dragmode": "zoom",
        "selectdirection": "h",
        "uirevision": "keep",
        "transition": {"duration": 0},
    }
    return base | changes


def _axis(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "gridcolor": GRID,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "fixedrange": True,
        "automargin": False,
        "tickfont": {"size": 10.5},
    }
    return base | changes


def time_axis(from_unix_ns: int, to_unix_ns: int, labels: int = 6, **changes: Any) -> dict[str, Any]:
    """A UTC clock axis over the window; dragging on it zooms."""
    seconds = (to_unix_ns - from_unix_ns) / 1e9
    day = "%b %-d" if seconds <= 300 * 86400 else "%b %Y"
    form = "%H:%M:%S" if seconds <= 600 else "%H:%M" if seconds <= 2 * 86400 else day
    return _axis(
        type="date",
        range=[from_unix_ns / 1e6, to_unix_ns / 1e6],
        tickformat=form,
        hoverformat="%b %-d %H:%M:%S",
        nticks=labels,
        tickangle=0,
        showgrid=False,
        fixedrange=False,
        **changes,
    )


def nice_ticks(high: float, most: int = 4) -> list[float]:
    """Round tick values from 0 to at least `high`."""
    if not high > 0 or not math.isfinite(high):
        return [0.0, 1.0]
    raw = high / (most - 1)
    scale = 10 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


def unit_text(value: float, unit: str) -> str:
    """An axis or hover text in the unit of a chart."""
    return {"seconds": fmt.seconds, "ratio": fmt.share}.get(unit, fmt.compact)(value)


def with_gaps(xs: Sequence[float], values: Numbers, width: float) -> tuple[list[float], list[float | None]]:
    """Points without the bins that hold nothing, and a break wherever more than the usual distance between points is empty.

    A scrape every 15 s in bins of 10 s leaves every third bin empty and is no gap; ten silent minutes are one.
    """
    known = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
    if len(known) < 2:
        return [x for x, _ in known], [value for _, value in known]
    distances = sorted(b[0] - a[0] for a, b in itertools.pairwise(known))
    usual = max(distances[len(distances) // 2], width)
    out_x: list[float] = []
    out_y: list[float | None] = []
    for i, (x, value) in enumerate(known):
        if i and x - known[i - 1][0] > 2.5 * usual:
            out_x.append((x + known[i - 1][0]) / 2)
            out_y.append(None)
        out_x.append(x)
        out_y.append(value)
    return out_x, out_y


def time_lines(
    starts_unix_ns: Sequence[int],
    lines: Sequence[Line],
    window: tuple[int, int],
    *,
    bin_s: float,
    unit: str,
    limits: Sequence[Limit] = (),
    marks: Sequence[Mapping[str, Any]] = (),
    top: float | None = None,
) -> Figure:
    """Series over time bins, drawn at the middle of their bin. top: a fixed end of the axis (1 for ratios)."""
    width_ms = bin_s * 1e3
    centres = [start / 1e6 + width_ms / 2 for start in starts_unix_ns]
    traces = []
    highest = 0.0
    for line in lines:
        xs, ys = with_gaps(centres, line.values, width_ms)
        highest = max([highest, *(y for y in ys if y is not None)])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len([y for y in ys if y is not None]) < 2 or None in ys else "lines",
                "name": safe(line.name),
                "x": xs,
                "y": ys,
                "connectgaps": False,
                "opacity": line.opacity,
                "line": {"color": line.colour, "width": line.width, "dash": line.dash, "shape": "linear"},
                "marker": {"color": line.colour, "size": 3},
                "fill": "tozeroy" if line.filled else "none",
                "fillcolor": tint(line.colour, 0.14),
                "text": ["" if y is None else unit_text(y, unit) for y in ys],
                "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
            }
        )
    shown = [limit for limit in limits if limit.value <= 3 * highest or top is not None]
    end = top if top is not None else max([highest * 1.08, *(limit.value * 1.25 for limit in shown)], default=1.0)
    ticks = nice_ticks(end) if top is None else [0, 0.25, 0.5, 0.75, 1]
    layout = _layout(
        xaxis=time_axis(*window, labels=4),
        yaxis=_axis(
            range=[0, max(end, 1e-9) if top is None else top * 1.04],
            tickvals=ticks,
            ticktext=[unit_text(tick, unit) for tick in ticks],
        ),
        shapes=[_limit_line(limit) for limit in shown] + [_mark_line(mark) for mark in marks],
        annotations=[_limit_text(limit, below=top is not None and limit.value > 0.8 * top) for limit in shown],
    )
    return {"data": traces, "layout": layout}


def _limit_line(limit: Limit) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit.value, "y1": limit.value,
        "line": {"color": limit.colour, "width": 1, "dash": "dash"},
    }  # fmt: skip


def _limit_text(limit: Limit, *, below: bool = False) -> dict[str, Any]:
    """At the left: what is looked at most, the newest, is at the right."""
    return {
        "xref": "paper", "x": 0, "y": limit.value, "text": safe(limit.label), "showarrow": False, "xanchor": "left",
        "yanchor": "top" if below else "bottom", "font": {"size": 10, "color": limit.colour},
    }  # fmt: skip


def _mark_line(mark: Mapping[str, Any]) -> dict[str, Any]:
    at = mark["unix_ns"] / 1e6
    return {
        "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at,
        "line": {"color": "#9b8cff", "width": 1, "dash": "dot"},
    }  # fmt: skip


def tint(colour: str, alpha: float) -> str:
    """A colour of six hex digits, made transparent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def heatmap(
    heat: Mapping[str, Any],
    window: tuple[int, int],
    *,
    limit_s: float | None,
    box: tuple[float, ...] | None,
    select: bool,
) -> Figure:
    """Requests over time (x) and a duration (y, logarithmic), square-root colour; where nothing happened nothing is drawn.

    select: dragging draws a box (over both axes) instead of zooming in time. box: (from ms, to ms, low s, high s) drawn before.
    """
    edges = heat["edges_s"]
    width_ms = heat["bin_s"] * 1e3
    xs = [start / 1e6 for start in heat["starts_unix_ns"]]
    xs = [*xs, xs[-1] + width_ms] if xs else []
    counts = heat["counts"]
    z = [[math.sqrt(n) if n else None for n in row] for row in counts]
    texts = [
        [
            f"{n} request{'s' if n != 1 else ''}<br>{fmt.seconds(edges[i])} – {fmt.seconds(edges[i + 1])}<br>from {fmt.moment(start)}"
            for start, n in zip(heat["starts_unix_ns"], row, strict=True)
        ]
        for i, row in enumerate(counts)
    ]
    logs = [math.log10(edge) for edge in edges]
    low, high = (logs[0], logs[-1]) if logs else (-2.0, 1.0)
    low, high = low - 0.12, high + 0.12
    ticks = list(_log_ticks(low, high))
    shapes, notes = [], []
    if limit_s is not None and low <= math.log10(limit_s) <= high:
        limit = Limit(math.log10(limit_s), f"SLO {fmt.seconds(limit_s)}")
        shapes, notes = [_limit_line(limit)], [_limit_text(limit)]
    layout = _layout(
        hovermode="closest",
        dragmode="select" if select else "zoom",
        xaxis=time_axis(*window),
        yaxis=_axis(
            range=[low, high],
            tickvals=[math.log10(tick) for tick in ticks],
            ticktext=[fmt.seconds(tick) for tick in ticks],
            fixedrange=not select,
        ),
        shapes=shapes,
        annotations=notes,
        newselection={"mode": "immediate", "line": {"color": "#e8ecf2", "width": 1, "dash": "dot"}},
        activeselection={"fillcolor": "rgba(255,255,255,0.08)"},
    )
    layout.pop("selectdirection")
    if box is not None:
        layout["selections"] = [
            {
                "type": "rect", "xref": "x", "yref": "y", "x0": box[0], "x1": box[1],
                "y0": math.log10(max(box[2], 1e-9)), "y1": math.log10(max(box[3], 1e-9)),
                "line": {"color": "#e8ecf2", "width": 1, "dash": "dot"},
            }
        ]  # fmt: skip
    trace = {
        "type": "heatmap",
        "x": xs,
        "y": logs,
        "z": z,
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
        "showscale": False,
        "zmin": 0,
        # The first half is transparency, so that one scale serves dark and light pages.
        "colorscale": [
            [0, "rgba(86,180,233,0.2)"],
            [0.5, "rgba(86,180,233,0.95)"],
            [0.75, "#F0C85A"],
            [1, "#F28E2B"],
        ],
    }
    return {"data": [trace], "layout": layout}


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 3, 10, 30 ... within the axis; only decades when it is long."""
    steps = (1, 3) if high - low < 3.5 else (1,)
    found = [m * 10.0**k for k in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    return [tick for tick in found if low <= math.log10(tick) <= high]


def cause_areas(over_time: Mapping[str, Any], window: tuple[int, int]) -> Figure:
    """Share of end-to-end seconds booked to each cause over time, stacked to 100 %; bins without requests stay open."""
    causes = {name: values for name, values in over_time["series"].items() if name not in ("n", "e2e_s")}
    width_ms = over_time["bin_s"] * 1e3
    xs = [start / 1e6 + width_ms / 2 for start in over_time["starts_unix_ns"]]
    totals = [sum(values[i] or 0.0 for values in causes.values()) for i in range(len(xs))]
    ordered = sorted(causes, key=lambda name: -sum(value or 0.0 for value in causes[name]))
    traces = []
    for name in ordered:
        ratios = [
            None if not total else (value or 0.0) / total for value, total in zip(causes[name], totals, strict=True)
        ]
        traces.append(
            {
                "type": "bar",
                "name": safe(cause_text(name).short),
                "x": xs,
                "y": ratios,
                "width": width_ms,
                "marker": {"color": cause_colour(name), "line": {"width": 0}},
                "text": ["" if ratio is None else fmt.percent(ratio) for ratio in ratios],
                "textposition": "none",
                "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
            }
        )
    layout = _layout(
        barmode="stack",
        xaxis=time_axis(*window),
        yaxis=_axis(range=[0, 1], tickvals=[0, 0.5, 1], ticktext=[fmt.percent(t) for t in (0.0, 0.5, 1.0)]),
    )
    return {"data": traces, "layout": layout}


def histogram(found: Mapping[str, Any], limit_s: float | None) -> Figure:
    """Requests by a duration on a logarithmic axis, the slow ones in another colour."""
    edges = found["edges_s"]
    centres = [math.log10(math.sqrt(a * b)) for a, b in itertools.pairwise(edges)]
    others = [n - slow for n, slow in zip(found["n"], found["slow_n"], strict=True)]
    spans = [f"{fmt.seconds(a)} – {fmt.seconds(b)}" for a, b in itertools.pairwise(edges)]
    width = math.log10(2) / 4 * 0.9
    low, high = (centres[0] - width, centres[-1] + width) if centres else (-2.0, 1.0)
    ticks = _log_ticks(low, high)

    def bars(name: str, values: Sequence[int], colour: str) -> dict[str, Any]:
        return {
            "type": "bar", "name": name, "x": centres, "y": values, "width": width, "customdata": spans,
            "marker": {"color": colour}, "hovertemplate": "%{customdata}: %{y:,}<extra>%{fullData.name}</extra>",
        }  # fmt: skip

    highest = max(found["n"], default=0)
    y_ticks = sorted({round(tick) for tick in nice_ticks(float(highest), 3)})
    shapes = []
    if limit_s is not None and low <= math.log10(limit_s) <= high:
        at = math.log10(limit_s)
        shapes.append(
            {
                "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at,
                "line": {"color": SLO_COLOUR, "width": 1, "dash": "dash"},
            }
        )  # fmt: skip
    layout = _layout(
        barmode="stack",
        hovermode="closest",
        xaxis=_axis(
            range=[low, high],
            tickvals=[math.log10(tick) for tick in ticks],
            ticktext=[fmt.seconds(tick) for tick in ticks],
            showgrid=False,
            fixedrange=False,
        ),
        yaxis=_axis(tickvals=y_ticks, ticktext=[fmt.compact(float(tick)) for tick in y_ticks], rangemode="tozero"),
        shapes=shapes,
    )
    return {"data": [bars("others", others, "#3f6f9c"), bars("slow", found["slow_n"], "#E69F00")], "layout": layout}
