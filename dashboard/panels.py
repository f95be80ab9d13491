"""The pieces pages are made of: panels, badges, bars, tables, skeletons, and the states a panel can be in.

Text from telemetry only ever goes into text children, which the browser shows literally.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from dash import dcc, html

from phasewise.dashboard import format as fmt
from phasewise.dashboard.cards import clean
from phasewise.dashboard.wording import PHASES

Child = Any
GRAPH_CONFIG: Any = {"displayModeBar": False, "responsive": True, "doubleClick": False, "scrollZoom": False}


def attrs(**values: str) -> dict[str, Any]:
    """data- and aria- attributes, which Python cannot write as names: `attrs(data_copy=...)`."""
    return {name.replace("_", "-"): value for name, value in values.items()}


def box(names: str, *children: Child, **properties: Any) -> html.Div:
    return html.Div(list(children), className=names, **properties)


def text(names: str, value: object, **properties: Any) -> html.Span:
    return html.Span(clean(value), className=names, **properties)


def panel(
    title: str,
    *children: Child,
    note: str | None = None,
    source: str | None = None,
    flag: str | None = None,
    names: str = "",
    table: Child = None,
) -> html.Section:
    """A titled box. source: where its figures come from, under the question mark; flag: what is partial about it."""
    head: list[Child] = [html.H2(title, className="panel-title")]
    if note:
        head.append(text("panel-note", note))
    if flag:
        head.append(text("flag", flag))
    if source:
        head.append(html.Span("?", className="hint", title=source, tabIndex=0, **attrs(aria_label=source)))
    body = box("panel-body", *children)
    parts: list[Child] = [html.Header(head, className="panel-head"), body]
    if table is not None:
        parts.append(html.Details([html.Summary("Table"), table], className="as-table"))
    return html.Section(parts, className=f"panel {names}")


def chart(figure: dict[str, Any], identity: Any, height: int, label: str) -> html.Div:
    """A Plotly chart of a fixed height with a sentence for those who do not see it."""
    graph = dcc.Graph(
        id=identity,
        figure=figure,
        config=GRAPH_CONFIG,
        className="chart",
        style={"height": f"{height}px"},
        responsive=True,
    )
    return html.Div(graph, role="img", **attrs(aria_label=label))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers_from: int = 1) -> html.Div:
    """A plain table; columns from `numbers_from` on are right-aligned figures."""
    head = html.Tr([html.Th(name, className="num" if i >= numbers_from else "") for i, name in enumerate(columns)])
    body = [
        html.Tr([html.Td(clean(cell), className="num" if i >= numbers_from else "") for i, cell in enumerate(row)])
        for row in rows
    ]
    return box("table-scroll", html.Table([html.Thead(head), html.Tbody(body)], className="plain-table"))


def folded_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers_from: int = 1) -> html.Div:
    """A table behind the button of a chart. It is one component, whose rows the browser makes when it is opened: Dash tells
    every component of every change on the page, and a thousand cells nobody looks at would make all changes slow."""
    cells = [[clean(cell) for cell in row] for row in rows]
    told = json.dumps({"columns": list(columns), "rows": cells, "numbers_from": numbers_from}, ensure_ascii=False)
    return html.Div(className="table-scroll", **attrs(data_table=told))


def badge(value: str, tone: str = "", title: str | None = None) -> html.Span:
    return html.Span(clean(value), className=f"badge {tone}", title=title or "")


def swatch(colour: str, hatched: bool = False) -> html.Span:
    return html.Span(className="swatch hatched" if hatched else "swatch", style={"backgroundColor": colour})


def bar_row(
    label: str, share: float, value: str, *, colour: str | None = None, href: str | None = None, note: str = ""
) -> Child:
    """One horizontal bar: label, length as a share of the largest, value in figures."""
    fill = html.Span(
        className="bar-fill",
        style={"width": f"{max(share, 0.0) * 100:.2f}%", **({"backgroundColor": colour} if colour else {})},
    )
    inner = [
        text("bar-label", label, title=clean(label)),
        html.Span(fill, className="bar-track"),
        text("bar-value", value),
        text("bar-note", note) if note else None,
    ]
    kept = [part for part in inner if part is not None]
    return link(kept, href, "bar-row") if href else box("bar-row", *kept)


def link(children: Child, href: str, names: str = "", **properties: Any) -> html.A:
    """A link inside the pages: the shell moves without loading the document again."""
    return html.A(children, href=href, className=names, **attrs(data_nav="1"), **properties)


def phase_bar(phases: dict[str, float | None], scale_s: float) -> html.Div:
    """Phases as one bar in the order of time; `scale_s` seconds are the whole width."""
    parts = []
    for name, phase in PHASES.items():
        seconds = phases.get(name) or 0.0
        if seconds > 0 and scale_s > 0:
            parts.append(
                html.Span(
                    html.Span(phase.letter if seconds > 0.07 * scale_s else "", className="phase-letter"),
                    className=f"phase-part {'hatched' if name == 'residual' else ''}",
                    style={"width": f"{seconds / scale_s * 100:.3f}%", "backgroundColor": phase.colour},
                    title=f"{phase.title}: {fmt.seconds(seconds)}",
                )
            )
    return box("phase-bar", *parts)


def sparkline(values: Sequence[float | None], colour: str = "#7d8aa0") -> Child:
    """A small line without axes; unknown values leave it open, and with fewer than two there is an empty place."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return html.Span(className="sparkline")
    low, high = min(0.0, *known), max(known)
    span = (high - low) or 1.0
    step = 100 / max(len(values) - 1, 1)
    paths, open_path = [], False
    for i, value in enumerate(values):
        if value is None:
            open_path = False
            continue
        paths.append(f"{'L' if open_path else 'M'}{i * step:.1f} {22 - (value - low) / span * 20:.1f}")
        open_path = True
    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 100 24' preserveAspectRatio='none'>"
        f"<path d='{''.join(paths)}' fill='none' stroke='{colour}' stroke-width='1.5' vector-effect='non-scaling-stroke' "
        "stroke-linejoin='round' stroke-linecap='round'/></svg>"
    )
    return html.Img(src=f"data:image/svg+xml,{quote(svg)}", className="sparkline", alt="")


def copyable(command: str) -> html.Div:
    """A command with a button that copies it."""
    return box(
        "command",
        html.Code(clean(command)),
        html.Button("Copy", className="button quiet small", type="button", **attrs(data_copy=clean(command))),
    )


def skeleton(*heights: int, names: str = "") -> html.Div:
    """Grey shapes of the final size, so that nothing moves when the figures come."""
    return box(
        f"skeleton-stack {names}", *[html.Div(className="skeleton", style={"height": f"{h}px"}) for h in heights]
    )


def slot(name: str, waiting: Child, names: str = "") -> html.Div:
    """A place on a page that a callback fills (see `dashboard.regions`): a notice, the content, whether it ever loaded."""
    return html.Div(
        [html.Div(id=f"{name}-notice"), html.Div(waiting, id=name), dcc.Store(id=f"{name}-ok"), _working(name)],
        className=f"region {names}",
    )


def _working(name: str) -> html.Div:
    """What the browser shows over a slot that takes long: `assets/phasewise.js` fills it in."""
    cancel = html.Button("Cancel", className="button quiet small", type="button", **attrs(data_cancel=name))
    return box("working", html.Span("", className="working-text"), cancel, role="status")


def state_card(title: str, *children: Child, tone: str = "", icon: str = "") -> html.Div:
    """What stands where there is nothing to show, and what to do about it."""
    head = box("state-head", text("state-icon", icon) if icon else None, html.H2(clean(title), className="state-title"))
    return box(f"panel state {tone}", head, *children)
