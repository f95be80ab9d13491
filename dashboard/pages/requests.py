"""`/requests`: the requests one by one, with facets and the histogram of a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash_ag_grid as dag
from dash import ALL, Dash, Input, Output, State, dcc, html, no_update

from phasewise.analyzer.dimensions import DIMENSIONS, METRICS
from phasewise.dashboard import figures, tables
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.panels import box, chart, folded_table, link, panel, skeleton, slot, swatch, text
from phasewise.dashboard.regions import Region, in_browser, region, sink, started, view_of
from phasewise.dashboard.state import View
from phasewise.dashboard.states import empty_state, refused, stopped
from phasewise.dashboard.wording import PHASES, cause_text
from phasewise.dashboard.work import at_hand
from phasewise.rules.errors import InputError, PhasewiseError, Stopped

NAME = "requests"
FACETS = (
    "model",
    "instance",
    "cause",
    "input",
    "output",
    "cache",
    "tenant",
    "route",
    "finish_reason",
    "engine",
    "dataset",
)
_SHOWN_VALUES = 6


def _column(field: str, title: str, width: int, **more: Any) -> dict[str, Any]:
    return {"field": field, "headerName": title, "width": width, "sortable": False, "resizable": True, **more}


def _number_column(field: str, title: str, width: int) -> dict[str, Any]:
    return _column(
        field, title, width, cellClass="ag-right-aligned-cell", headerClass="ag-right-aligned-header", sortable=True,
        sortingOrder=["desc", "asc"],
    )  # fmt: skip


COLUMNS = [
    _column("finished", "Finished", 102, sortable=True, sortingOrder=["desc", "asc"]),
    _column("bar", "Phases", 140, cellRenderer="PhaseBar", flex=1, minWidth=90),
    _number_column("e2e", "E2E", 70),
    _number_column("ttft", "TTFT", 74),
    _number_column("tpot", "TPOT", 74),
    _number_column("queue", "Queue", 74),
    _number_column("input_tokens", "In", 64),
    _number_column("output_tokens", "Out", 58),
    _number_column("cached_tokens", "Cached", 78),
    _column("cause_text", "Cause", 126, cellRenderer="CauseMark"),
    _column("instance", "Instance", 84),
    _column("request_key", "Request", 84, cellRenderer="RequestLink"),
]


def layout(_: View) -> html.Div:
    return html.Div(
        [
            slot("requests-head", skeleton(1)),
            html.Div(
                [
                    slot("requests-facets", skeleton(420), "facet-region"),
                    html.Div(
                        [
                            slot("requests-histogram", skeleton(170)),
                            slot("requests-table", skeleton(420)),
                            dcc.Store(id="requests-stopped"),
                        ],
                        className="stack-column",
                    ),
                ],
                className="grid-facets",
            ),
        ],
        className="page page-full",
    )


def _table() -> html.Section:
    grid = dag.AgGrid(
        id="requests-grid",
        columnDefs=COLUMNS,
        rowModelType="infinite",
        className="grid-table",
        dashGridOptions={
            "cacheBlockSize": 100,
            "maxBlocksInCache": 40,
            "rowBuffer": 20,
            "rowHeight": 30,
            "headerHeight": 32,
            "infiniteInitialRowCount": 1,
            "suppressMultiSort": True,
            "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
            "theme": {"function": "phasewise_theme(themeQuartz)"},
            "animateRows": False,
        },
        style={"height": None, "width": "100%"},
    )
    head_line = [
        html.H2("Requests", className="panel-title"),
        html.Span("", id="requests-total", className="panel-note"),
        html.Span(className="grow"),
        _letters(),
    ]
    return html.Section([html.Header(head_line, className="panel-head"), grid], className="panel grid-panel")


def _letters() -> html.Div:
    shown = [phase for phase in PHASES.values() if phase.name not in ("combined",)]
    return box(
        "legend tight",
        *[
            html.Span([swatch(p.colour, p.name == "residual"), text("", p.title)], className="legend-item")
            for p in shown
        ],
    )


def register(app: Dash, answers: Answers) -> None:
    for one in REGIONS:
        region(app, answers, NAME, one)

    @app.callback(
        Output("requests-table", "children"),
        Input("query", "data"),
        Input("tick", "data"),
        State("requests-table", "children"),
    )
    async def mount(query: Mapping[str, Any] | None, tick: Mapping[str, Any] | None, shown: Any) -> Any:
        """The table comes once there is something to list, and then reads the API itself."""
        if query is None:
            return no_update
        work = started(answers, "requests-table", query, tick)
        return await answers.works.run(work, _mounted, answers, view_of(query), shown)

    @app.callback(
        Output("requests-table-notice", "children"),
        Input("requests-stopped", "data"),
        State("query", "data"),
        prevent_initial_call=True,
    )
    def tell(answer: Mapping[str, Any] | None, query: Mapping[str, Any]) -> Any:
        """The list reads the API in the browser, which hands on here why an answer was given up."""
        if not answer:
            return None
        if answer.get("wrong"):
            return refused(str(answer["error"]), str(answer["remedy"]))
        error = Stopped(str(answer["error"]), str(answer["remedy"]))
        return stopped(error, view_of(query), answers.now(), kept=bool(answer["kept"]))

    in_browser(app, "ranged", sink(), Input({"type": "range-chart", "name": ALL}, "relayoutData"))
    in_browser(
        app, "rows", Output("requests-grid", "getRowsResponse"), Input("requests-grid", "getRowsRequest"),
        State("query", "data"), initial=True,
    )  # fmt: skip
    in_browser(app, "reload", sink(), Input("query", "data"), Input("tick", "data"))
    in_browser(app, "open_row", sink(), Input("requests-grid", "cellDoubleClicked"))


def _mounted(answers: Answers, view: View, shown: Any) -> Any:
    there = isinstance(shown, Mapping) and shown.get("type") == "Section"
    try:
        view.check()
        silent = view.page != NAME or empty_state(answers, view) is not None
    except Stopped as error:
        return no_update if there or at_hand().overtaken else stopped(error, view, answers.now(), kept=False)
    except InputError:
        return None  # the head of the page says what is wrong; an empty table would deny it
    except PhasewiseError:
        return no_update if there else None
    if silent:
        return None
    return no_update if there else _table()


def head(answers: Answers, view: View) -> Any:
    if (empty := empty_state(answers, view)) is not None:
        return box("covers", html.H1("Requests", className="visually-hidden"), empty)
    return html.H1("Requests", className="visually-hidden")


def facets(answers: Answers, view: View) -> Any:
    """The filter drawer: fields with their values, counts, and how many of them are slow."""
    if empty_state(answers, view) is not None:
        return None
    found = tables.facets(answers, view, FACETS)
    blocks = []
    for one in found:
        field = DIMENSIONS[one["name"]]
        values = one["values"]
        if len(values) == 1 and one["name"] not in ("model", "instance"):
            continue
        most = max(value["n"] for value in values)
        rows = [
            link(
                [
                    text(
                        "facet-name",
                        cause_text(value["value"]).short
                        if one["name"] == "cause" and value["value"] != "unknown"
                        else value["value"],
                    ),
                    text("facet-n", fmt.compact(value["n"])),
                    html.Span(
                        [
                            html.Span(
                                className="facet-slow", style={"width": f"{value['marked_n'] / most * 100:.1f}%"}
                            ),
                            html.Span(
                                className="facet-rest",
                                style={"width": f"{(value['n'] - value['marked_n']) / most * 100:.1f}%"},
                            ),
                        ],
                        className="facet-track",
                    ),
                ],
                view.with_filters(NAME, field.filters(value["value"])),
                "facet",
                title=f"{fmt.count(value['marked_n'])} of {fmt.count(value['n'])} are slow; click to see only these",
            )
            for value in values[:_SHOWN_VALUES]
        ]
        more = (
            text("quiet small", f"{len(values) - _SHOWN_VALUES} more: type in the filter")
            if len(values) > _SHOWN_VALUES
            else None
        )
        blocks.append(box("facet-block", html.H3(one["title"], className="mini-title"), *rows, more))
    return panel(
        "Filter",
        *blocks,
        source="Counts of requests in the window under the filters in force; the orange part of a bar is slow ones.",
    )


def histogram(answers: Answers, view: View) -> Any:
    if empty_state(answers, view) is not None:
        return None
    metric = METRICS[view.metric]
    found = tables.histogram(answers, view, metric.name)
    limit = next((one.limit_s for one in view.slo if one.metric == metric.name), None)
    if not found["edges_s"]:
        return panel(metric.title, box("nothing", text("", f"No request in this window has a known {metric.title}.")))
    choices = box(
        "segmented",
        *[
            link(
                METRICS[name].title.partition(" (")[0],
                view.link(NAME, metric=name),
                f"segment {'current' if name == metric.name else ''}",
            )
            for name in ("ttft", "tpot", "e2e", "queue")
        ],
    )
    return panel(
        "Distribution",
        choices,
        chart(
            figures.histogram(found, limit),
            {"type": "range-chart", "name": metric.name},
            118,
            f"Histogram of {metric.title} of {fmt.counted(sum(found['n']), 'request')}",
        ),
        note=f"{metric.title}, slow ones in orange; drag to filter",
        source=f"requests.{metric.column}, {metric.boundary} boundary.",
        table=folded_table(
            [metric.title, "Requests", "Slow"],
            [
                (f"{fmt.seconds(a)} – {fmt.seconds(b)}", fmt.count(n), fmt.count(slow))
                for a, b, n, slow in zip(
                    found["edges_s"], found["edges_s"][1:], found["n"], found["slow_n"], strict=False
                )
            ],
        ),
    )


REGIONS = (
    Region("requests-head", head, lead=True),
    Region("requests-facets", facets),
    Region("requests-histogram", histogram),
)
