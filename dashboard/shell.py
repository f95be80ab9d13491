"""The frame around every page: navigation, time range, filters, freshness, data health, keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dash import dcc, html

from phasewise.analyzer.filters import FILTER_KEYS
from phasewise.analyzer.listing import distinct_values
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.panels import attrs, box, link, text
from phasewise.dashboard.state import FILTER_NAMES, QUICK_RANGES, View
from phasewise.dashboard.states import filter_text, without_filter
from phasewise.rules.errors import InputError, PhasewiseError

PAGES = (
    ("triage", "Triage", "What is slow now, why, and what to try"),
    ("requests", "Requests", "One by one"),
    ("slices", "Slices", "What the slow ones have in common"),
)
REFRESH = (
    ("off", None, "Off"),
    ("5s", 5, "5 s"),
    ("10s", 10, "10 s"),
    ("30s", 30, "30 s"),
    ("1m", 60, "1 min"),
    ("5m", 300, "5 min"),
)
KEYS = (
    ("?", "This list"),
    ("/", "Filter"),
    ("g t", "Triage"),
    ("g r", "Requests"),
    ("g s", "Slices"),
    ("t z", "Zoom out"),
    ("t ←  t →", "Shift the time range"),
    ("t a", "Make the time range absolute"),
    ("d r", "Refresh"),
    ("c s", "Copy a link with the time frozen"),
    ("esc", "Close"),
)


def shell() -> html.Div:
    """The static frame; `query` holds the address, `tick` changes when the data do."""
    return html.Div(
        [
            dcc.Store(id="boot", data=1),
            dcc.Store(id="query"),
            dcc.Store(id="path"),
            dcc.Store(id="tick"),
            dcc.Store(id="sink"),
            html.A("Skip to the content", href="#main", className="skip-link"),
            html.Nav(
                [
                    link([html.Span(className="logo"), text("brand-name", "phasewise")], "/triage", "brand"),
                    html.Div(id="nav", className="nav-links"),
                    html.Span(className="grow"),
                    html.Button(
                        [html.Span(className="icon icon-theme"), text("nav-label", "Theme")],
                        className="nav-button",
                        type="button",
                        title="Light or dark",
                        **attrs(data_theme_toggle="1"),
                    ),
                    html.Button(
                        [html.Span("?", className="key-icon"), text("nav-label", "Keys")],
                        className="nav-button",
                        type="button",
                        title="Keyboard shortcuts",
                        **attrs(data_open="keys"),
                    ),
                ],
                className="nav",
                **attrs(aria_label="Pages"),
            ),
            html.Div(
                [
                    html.Header(
                        [
                            html.Div(id="range", className="range"),
                            box(
                                "filter-box",
                                dcc.Input(
                                    id="filter-input",
                                    type="text",
                                    placeholder="Filter: model=NAME, ttft>2s",
                                    debounce=False,
                                    className="filter-input",
                                    list="filter-values",
                                    autoComplete="off",
                                ),
                                html.Datalist(id="filter-values"),
                            ),
                            html.Div(id="chips", className="chips"),
                            html.Span(className="grow"),
                            box(
                                "lamp",
                                html.Span(className="lamp-dot"),
                                html.Span("connecting", className="lamp-text"),
                                id="lamp",
                            ),
                            _share(),
                        ],
                        className="topbar",
                    ),
                    html.Div(id="notice", className="banner", role="note"),
                    html.Div(id="banner", className="banner", role="status"),
                    html.Div(id="strip"),
                    html.Main(id="main", className="main", tabIndex=-1),
                ],
                className="column",
            ),
            _keys(),
            html.Div(id="toast", className="toast", role="status", **attrs(aria_live="polite")),
        ],
        className="shell",
    )


def _share() -> html.Details:
    items = (
        ("link-frozen", "Link, time frozen"),
        ("link-live", "Link, live"),
        ("curl", "As curl"),
        ("cli", "As command line"),
    )
    return html.Details(
        [
            html.Summary("Share", className="button"),
            box(
                "popover right menu",
                *[
                    html.Button(label, className="menu-item", type="button", **attrs(data_share=kind))
                    for kind, label in items
                ],
            ),
        ],
        className="pop",
    )


def _keys() -> html.Div:
    rows = [html.Tr([html.Td([html.Kbd(part) for part in keys.split()]), html.Td(what)]) for keys, what in KEYS]
    return html.Div(
        html.Div([html.H2("Keys"), html.Table(html.Tbody(rows), className="plain-table")], className="dialog-body"),
        id="keys",
        className="dialog",
        role="dialog",
        **attrs(aria_label="Keyboard shortcuts"),
    )


def nav_links(view: View) -> list[Any]:
    kept = View(
        view.page,
        None,
        tuple((n, v) for n, v in view.pairs if n not in ("sel", "sort", "rows", "cols", "cell", "metric")),
    )
    return [
        link(
            [html.Span(className=f"icon icon-{page}"), text("nav-label", label)],
            kept.link(page),
            f"nav-link {'current' if page == view.page or (page == 'requests' and view.page == 'trace') else ''}",
            title=what,
        )
        for page, label, what in PAGES
    ]


def range_picker(view: View, now_unix_ns: int) -> list[Any]:
    """The time range: quick ranges, free text for both ends, shift and zoom, refresh."""
    quick = dict(QUICK_RANGES)
    try:
        window = view.window(now_unix_ns)
    except InputError:
        window = None
    if view.to_text == "now" and view.from_text in quick:
        label = quick[view.from_text]
    elif window is None:
        label = "Time range"
    elif window.from_unix_ns <= 0 and window.to_unix_ns > 4 * 10**18:
        label = "All data"
    elif view.relative:
        label = f"{view.from_text} to {view.to_text}"
    else:
        label = fmt.interval(window.from_unix_ns, window.to_unix_ns, now_unix_ns)
    refresh_label = next(
        (name for _, seconds, name in REFRESH if seconds == view.refresh_s),
        f"{view.refresh_s} s" if view.refresh_s else "Off",
    )
    return [
        html.Details(
            [
                html.Summary(
                    [html.Span(className="icon icon-clock"), text("", label)], className="button range-button"
                ),
                box(
                    "popover range-popover",
                    box(
                        "range-fields",
                        html.H3("From and to"),
                        html.Label(
                            [
                                "From",
                                dcc.Input(id="range-from", value=view.from_text, className="field", autoComplete="off"),
                            ]
                        ),
                        html.Label(
                            ["To", dcc.Input(id="range-to", value=view.to_text, className="field", autoComplete="off")]
                        ),
                        html.Button("Apply", className="button primary", type="button", **attrs(data_apply_range="1")),
                        text("popover-note", "now-90m, 2026-11-29 14:02, Unix seconds or ms. Zone: UTC."),
                    ),
                    box(
                        "range-quick",
                        *[
                            html.Button(
                                name,
                                className=f"menu-item {'current' if view.from_text == key and view.to_text == 'now' else ''}",
                                type="button",
                                **attrs(data_change=json.dumps({"from": key, "to": "now"})),
                            )
                            for key, name in QUICK_RANGES
                        ],
                    ),
                ),
            ],
            className="pop",
        ),
        box(
            "button-group",
            html.Button(
                "‹", className="button icon-only", type="button", title="Earlier (t ←)", **attrs(data_shift="-1")
            ),
            html.Button("›", className="button icon-only", type="button", title="Later (t →)", **attrs(data_shift="1")),
            html.Button(
                "⊖", className="button icon-only", type="button", title="Zoom out (t z)", **attrs(data_zoom="2")
            ),
        ),
        html.Details(
            [
                html.Summary(
                    [html.Span(className="icon icon-refresh"), text("", refresh_label)],
                    className="button",
                    title="Refresh",
                ),
                box(
                    "popover menu",
                    *[
                        html.Button(
                            name,
                            className=f"menu-item {'current' if name == refresh_label else ''}",
                            type="button",
                            **attrs(data_change=json.dumps({"refresh": key})),
                        )
                        for key, _, name in REFRESH
                    ],
                ),
            ],
            className="pop",
        )
        if view.relative
        else None,
        text("zone", "UTC"),
    ]


def chips(view: View) -> list[Any]:
    """The filters in force, each with its way out, and variables that filter nothing; a wrong one as it was written."""
    try:
        filters = view.filters
    except InputError:
        wrong = [value for name, value in view.pairs if name in FILTER_NAMES or name.startswith("var-")]
        return [text("chip wrong", ", ".join(wrong))]
    unused = [f"{name} = {value}" for name, value in view.unused_variables]
    note = f"{', '.join(unused)} filters nothing" if len(unused) == 1 else f"{', '.join(unused)} filter nothing"
    why = "No field of a request has this name. Phasewise keeps the variable in the address and shows all requests."
    return [
        html.Span(
            [
                text("chip-text", filter_text(one)),
                link(
                    "×", without_filter(view, index), "chip-remove", title="Remove", **attrs(aria_label="Remove filter")
                ),
            ],
            className="chip",
        )
        for index, one in enumerate(filters)
    ] + ([text("chip unused", note, title=why)] if unused else [])


def filter_values(answers: Answers) -> list[Any]:
    """Suggestions for the filter box: values seen, and the other keys."""
    found = distinct_values(answers.reader, ("model", "instance", "engine", "cause", "tenant", "route", "dataset"), 25)
    options = [html.Option(value=f"{key}={value}") for key, values in found.items() for value in values]
    return options + [
        html.Option(value=f"{name}>", label=key.text) for name, key in FILTER_KEYS.items() if key.kind == "seconds"
    ]


def health_strip(answers: Answers, view: View) -> Any:
    """One line, only when the data of the window have a gap the reader should know of."""
    from phasewise.dashboard.data_health import problems

    try:
        found = problems(answers, view)
    except PhasewiseError:
        return None
    if not found:
        return None
    return html.Details(
        [
            html.Summary(
                [
                    html.Span("!", className="strip-mark"),
                    text("", found[0][0]),
                    text("quiet", f"and {len(found) - 1} more" if len(found) > 1 else ""),
                    text("text-link", "why"),
                ]
            ),
            html.Ul([html.Li([text("strong", what), " ", text("quiet", why)]) for what, why in found]),
        ],
        className="strip",
    )


def banner_text(health: Mapping[str, object]) -> str:
    """What the sticky banner says while the store is not well, or has lost something."""
    if health.get("status") != "ok":
        return f"{health['error']} ({health['remedy']})"
    return str(health.get("notice") or "")
