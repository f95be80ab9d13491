"""`/slices`: what the slow requests have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dash import Dash, Input, html

from phasewise.analyzer.dimensions import DIMENSIONS, METRICS, UNKNOWN, dimension
from phasewise.dashboard import figures, tables
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.panels import attrs, badge, box, chart, folded_table, link, panel, skeleton, slot, text
from phasewise.dashboard.regions import Region, in_browser, region, sink
from phasewise.dashboard.state import CELLS, View
from phasewise.dashboard.states import empty_state, low_traffic
from phasewise.dashboard.wording import CLASS_COLOURS, cause_text, class_title

NAME = "slices"
AXES = ("input", "output", "concurrency", "cache", "model", "instance", "engine", "tenant", "route", "cause")
CELL_TITLES = {"p50": "p50", "p95": "p95", "p99": "p99", "slow": "share that is slow", "share": "largest class"}
_MOST_COLUMNS = 14
# From low to high on a dark page and on a light one alike: one hue, growing in strength.
_SCALE = ("#1d3346", "#234f6d", "#2b6f95", "#3f8fb5", "#E6B450", "#E69F00", "#D55E00")
_BRIGHT_FROM = 4  # colours from here on carry dark text


def layout(_: View) -> html.Div:
    return html.Div(
        [
            slot("slices-head", skeleton(46)),
            html.Div(
                [slot("slices-heat", skeleton(300)), slot("slices-differences", skeleton(300))], className="grid-7-5"
            ),
            slot("slices-grid", skeleton(320)),
        ],
        className="page",
    )


def register(app: Dash, answers: Answers) -> None:
    for one in REGIONS:
        region(app, answers, NAME, one)
    in_browser(app, "boxed", sink(), Input({"type": "select-chart", "name": "slices"}, "selectedData"))


def _choices(label: str, key: str, options: list[tuple[str, str]], current: str) -> html.Label:
    return html.Label(
        [
            text("quiet", label),
            html.Select(
                [html.Option(title, value=value, selected=value == current) for value, title in options],
                className="select",
                **attrs(data_select=key),
            ),
        ],
        className="choice",
    )


def head(answers: Answers, view: View) -> Any:
    if (empty := empty_state(answers, view)) is not None:
        return empty
    found = tables.overview(answers, view)["requests"]
    what = "in the box" if view.box else "that break the SLO or are the slowest tenth"
    return [
        box(
            "page-head",
            box(
                "",
                html.H1("What do the slow ones have in common?", className="page-title"),
                text(
                    "quiet",
                    f"{fmt.counted(found['n'], 'request')} in this window. Compared: those {what}, against all others.",
                ),
            ),
            html.Span(className="grow"),
            _choices("Metric", "metric", [(m.name, m.title) for m in METRICS.values()], view.metric),
        ),
        low_traffic(found["n"], view),
    ]


def heat(answers: Answers, view: View) -> Any:
    if empty_state(answers, view) is not None:
        return None
    found = tables.heat(answers, view, view.metric)
    window = (found["window"]["from_unix_ns"], found["window"]["to_unix_ns"])
    limit = next((one.limit_s for one in view.slo if one.metric == view.metric), None)
    box_shape = None
    if (drawn := view.box) is not None:
        box_shape = (drawn.from_unix_ns / 1e6, drawn.to_unix_ns / 1e6, drawn.low_s, drawn.high_s)
    title = METRICS[view.metric].title
    if not found["n"]:
        return panel(f"{title} over time", box("nothing", text("", f"No request in this window has a known {title}.")))
    return panel(
        f"{title} over time",
        chart(
            figures.heatmap(found, window, limit_s=limit, box=box_shape, select=True),
            {"type": "select-chart", "name": "slices"},
            318,
            f"Heatmap of {title} of {fmt.counted(found['n'], 'request')} over time; drag a box to compare it with the rest",
        ),
        link("Clear the box", view.link(NAME, sel=None), "text-link") if view.box else None,
        note="drag a box around what you want explained",
        source=f"requests.{METRICS[view.metric].column}, {METRICS[view.metric].boundary} boundary, by completion time.",
        table=folded_table(
            [title, "Requests"],
            [
                (f"{fmt.seconds(found['edges_s'][i])} – {fmt.seconds(found['edges_s'][i + 1])}", fmt.count(sum(row)))
                for i, row in enumerate(found["counts"])
            ],
        ),
    )


def differences(answers: Answers, view: View) -> Any:
    """Fields ranked by the share of excess time they explain."""
    if empty_state(answers, view) is not None:
        return None
    found = tables.difference_list(answers, view, (), view.metric)
    over = [one for one in found["differences"] if one["lift"] is None or one["lift"] > 1.05]
    shown = [one for one in over if (one["explains_ratio"] or 0) > 0.005 or not one["faint"]][:8]
    name = "Box" if found["boxed"] else "Slow ones"
    note = f"{fmt.count(found['selection_n'])} against {fmt.count(found['rest_n'])}"
    source = (
        "Explains: share of the selection's time above the mean of others of its shape that would vanish if requests with this "
        "value took as long as those without it. Lift: its share in the selection over its share in the rest. Faint: not "
        "significant after correction for the number of values."
    )
    if found["boxed"] and found["selection_n"] < tables.LEAST_ROWS:
        body: Any = box(
            "nothing",
            text(
                "",
                f"The box holds {fmt.counted(found['selection_n'], 'request')}. Draw a larger one: from {tables.LEAST_ROWS} on they can be compared.",
            ),
        )
        return panel("What differs", body, note=note, source=source)
    if not shown:
        return panel(
            "What differs",
            box("nothing", text("", "No field tells the slow ones from the rest in this window.")),
            note=note,
            source=source,
        )
    rows = []
    for rank, one in enumerate(shown, 1):
        same = f", same as {', '.join(twin['title'].lower() for twin in one['same_as'])}" if one["same_as"] else ""
        field = dimension(one["field"])
        rows.append(
            link(
                [
                    text("rank", rank),
                    box("difference-name", text("quiet", f"{one['title']}{same}"), text("strong", one["value"])),
                    box(
                        "pair-bars",
                        _pair(one["share_in_selection"], "selection"),
                        _pair(one["share_in_rest"], "rest"),
                    ),
                    text("num lift", f"{fmt.number(one['lift'], 2)}×" if one["lift"] is not None else "only here"),
                    text("num explains", fmt.percent(one["explains_ratio"], fmt.NONE)),
                ],
                view.with_filters(NAME, field.filters(one["value"])),
                f"difference {'faint' if one['faint'] else ''}",
                title="Click to filter",
            )
        )
    head_row = box(
        "difference head",
        text("rank", ""),
        text("", name + " / rest"),
        text("", ""),
        text("num", "Lift"),
        text("num", "Explains"),
    )
    hidden = (
        text(
            "panel-foot",
            f"Not compared, with under {tables.LEAST_ROWS} requests: {fmt.counted(found['hidden'], 'value')}.",
        )
        if found["hidden"]
        else None
    )
    return panel(
        "What differs",
        box("differences", head_row, *rows),
        hidden,
        note=note,
        source=source,
        table=folded_table(
            ["Field", "Value", "n", "In selection", "In rest", "Lift", "Explains"],
            [
                (
                    one["title"], one["value"], fmt.count(one["n"]), fmt.share(one["share_in_selection"], fmt.NONE),
                    fmt.share(one["share_in_rest"], fmt.NONE), fmt.number(one["lift"], 3, fmt.NONE), fmt.share(one["explains_ratio"], fmt.NONE),
                )
                for one in found["differences"]
            ],
            numbers_from=2,
        ),
    )  # fmt: skip


def _pair(share: float | None, side: str) -> html.Span:
    return html.Span(
        html.Span(className=f"pair-fill {side}", style={"width": f"{(share or 0) * 100:.1f}%"}),
        className="pair-track",
        title=f"{'Selection' if side == 'selection' else 'Rest'}: {fmt.share(share, fmt.NONE)}",
    )


def grid(answers: Answers, view: View) -> Any:
    """Two fields against each other: one figure a cell, its size the number of requests."""
    if empty_state(answers, view) is not None:
        return None
    by = (view.rows, view.columns) if view.rows != view.columns else (view.rows,)
    found = tables.slice_list(answers, view, by, view.metric)
    cells = {(c["values"][by[0]], c["values"][by[-1]] if len(by) > 1 else ""): c for c in found["cells"]}
    row_field = DIMENSIONS[by[0]]
    column_field = DIMENSIONS[by[1]] if len(by) > 1 else None
    row_names = sorted({key[0] for key in cells}, key=row_field.order)
    column_names = sorted({key[1] for key in cells}, key=column_field.order) if column_field else [""]
    column_names = _most_used(column_names, cells, 1)
    row_names = _most_used(row_names, cells, 0)
    figures_of = {key: _figure(cell, view.cell) for key, cell in cells.items()}
    known = [value for value in figures_of.values() if isinstance(value, float)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    most = max((cell["n"] for cell in cells.values()), default=1)
    corner: list[Any] = [f"{row_field.title} ↓", html.Br(), f"{column_field.title} →" if column_field else ""]
    head_cells = [
        html.Th(corner, className="corner"),
        *[html.Th(_short(name, by[-1]), title=name) for name in column_names],
    ]
    body = []
    for row_name in row_names:
        tds: list[Any] = [html.Th(_short(row_name, by[0]), className="row-name", title=row_name)]
        for column_name in column_names:
            cell = cells.get((row_name, column_name))
            tds.append(_grid_cell(cell, view, row_field, row_name, column_field, column_name, low, high, most))
        body.append(html.Tr(tds))
    axes = [(name, DIMENSIONS[name].title) for name in AXES]
    title = METRICS[view.metric].title
    return panel(
        "Two-way grid",
        box(
            "grid-controls",
            _choices("Rows", "rows", axes, view.rows),
            _choices("Columns", "cols", axes, view.columns),
            _choices("Cell", "cell", [(cell, CELL_TITLES[cell]) for cell in CELLS], view.cell),
            html.Span(className="grow"),
            _cache_note(found, by),
            _legend(view.cell, low, high),
        ),
        box("table-scroll", html.Table([html.Thead(html.Tr(head_cells)), html.Tbody(body)], className="slice-grid")),
        note=f"{title if view.cell in ('p50', 'p95', 'p99') else CELL_TITLES[view.cell]}; the bar is the number of requests; click for the requests",
        source="Linear interpolation between order statistics (quantile_cont). Struck through: fewer requests than the percentile needs.",
        table=folded_table(
            [row_field.title, column_field.title if column_field else "", "n", "p50", "p95", "p99", "Slow"],
            [
                (
                    key[0],
                    key[1],
                    fmt.count(c["n"]),
                    fmt.seconds(c["p50_s"], fmt.NONE),
                    fmt.seconds(c["p95_s"], fmt.NONE),
                    fmt.seconds(c["p99_s"], fmt.NONE),
                    fmt.count(c["slow_n"]),
                )
                for key, c in cells.items()
            ],
            numbers_from=2,
        ),
    )


def _most_used(names: list[str], cells: Mapping[tuple[str, str], Any], side: int) -> list[str]:
    if len(names) <= _MOST_COLUMNS:
        return names
    totals = {name: sum(cell["n"] for key, cell in cells.items() if key[side] == name) for name in names}
    kept = set(sorted(names, key=lambda name: -totals[name])[:_MOST_COLUMNS])
    return [name for name in names if name in kept]


def _short(name: str, field: str) -> str:
    """A label of an axis: causes and classes in words, the unit only in the title."""
    if name == UNKNOWN:
        return name
    if field == "cause":
        return cause_text(name).short
    return class_title(name) if field == "primary" else name.removesuffix(" tokens")


def _figure(cell: Mapping[str, Any], kind: str) -> float | str | None:
    if kind in ("p50", "p95", "p99"):
        value = cell[f"{kind}_s"]
        return float(value) if value is not None else None
    if kind == "slow":
        return cell["slow_n"] / cell["n"] if cell["n"] else None
    shares: Mapping[str, float] = cell["shares"]
    return max(shares, key=lambda name: shares[name]) if shares else None


def _grid_cell(
    cell: Mapping[str, Any] | None,
    view: View,
    row: Any,
    row_name: str,
    column: Any,
    column_name: str,
    low: float,
    high: float,
    most: int,
) -> html.Td:
    if cell is None:
        return html.Td(className="slice-cell empty")
    value = _figure(cell, view.cell)
    few = view.cell in cell["few"]
    if isinstance(value, str):
        shown, colour = (
            f"{class_title(value)} {fmt.percent(cell['shares'][value])}",
            CLASS_COLOURS.get(value, "#5B6675"),
        )
    elif value is None:
        shown, colour = UNKNOWN, "transparent"
    else:
        shown = fmt.share(value) if view.cell == "slow" else fmt.seconds(value)
        colour = _SCALE[_step(value, low, high, view.cell)]
    narrowed = [*row.filters(row_name), *(column.filters(column_name) if column else ())]
    weight = (cell["n"] / most) ** 0.5
    inner = link(
        [
            text(f"cell-value {'few' if few else ''}", shown),
            html.Span(html.Span(className="cell-bar", style={"width": f"{weight * 100:.0f}%"}), className="cell-track"),
            text("cell-n", f"n={fmt.compact(cell['n'])}"),
        ],
        View("requests", None, view.pairs).with_filters("requests", narrowed),
        "cell-link",
        title=f"p50 {fmt.seconds(cell['p50_s'])}, p95 {fmt.seconds(cell['p95_s'])}, {fmt.count(cell['slow_n'])} of {fmt.count(cell['n'])} slow",
    )
    dark = isinstance(value, str) or (isinstance(value, float) and _step(value, low, high, view.cell) >= _BRIGHT_FROM)
    return html.Td(inner, className=f"slice-cell {'on-bright' if dark else ''}", style={"backgroundColor": colour})


def _step(value: float, low: float, high: float, kind: str) -> int:
    """Which colour of the scale: even steps of a share, even ratios of a duration."""
    if high <= low:
        return 0
    even = kind == "slow" or low <= 0
    place = (value - low) / (high - low) if even else math.log(value / low) / math.log(high / low)
    return min(int(place * len(_SCALE)), len(_SCALE) - 1)


def _legend(kind: str, low: float, high: float) -> html.Div | None:
    if kind == "share":
        return None
    as_text = fmt.share if kind == "slow" else fmt.seconds
    return box(
        "scale",
        text("quiet", as_text(low)),
        html.Span([html.Span(style={"backgroundColor": colour}) for colour in _SCALE], className="scale-steps"),
        text("quiet", as_text(high)),
    )


def _cache_note(found: Mapping[str, Any], by: tuple[str, ...]) -> Any:
    """Where spans carry no cached tokens, the engines' own ratio stands beside the axis that is unknown."""
    if "cache" not in by:
        return None
    values = {cell["values"]["cache"] for cell in found["cells"]}
    if UNKNOWN not in values:
        return None
    ratio = found["prefix_hit_ratio"]
    told = (
        f"all requests together: {fmt.share(ratio)} of prompt tokens hit, by the engines' counters"
        if ratio is not None
        else "no counter tells it either"
    )
    return html.Span([badge("cache per request unknown", "quiet"), text("quiet", f" {told}")])


REGIONS = (
    Region("slices-head", head, lead=True),
    Region("slices-heat", heat),
    Region("slices-differences", differences),
    Region("slices-grid", grid),
)
