"""The states of a page that are not figures: never any data, no traffic, nothing matches, too little, wrong question, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from phasewise.analyzer.listing import count_requests
from phasewise.analyzer.window import Filter, Window
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.cards import clean
from phasewise.dashboard.panels import attrs, box, copyable, link, state_card, text
from phasewise.dashboard.state import View
from phasewise.rules.errors import InputError

LOW_TRAFFIC = 30
_SIGNS = {
    "eq": "=",
    "ne": "≠",
    "in": "in",
    "gt": ">",
    "lt": "<",
    "ge": "≥",
    "le": "≤",
    "exists": "known",
    "prefix": "starts with",
}


def filter_text(filter_: Filter) -> str:
    if filter_.op == "exists":
        return f"{filter_.key} {'known' if filter_.value == 'true' else 'unknown'}"
    return f"{filter_.key} {_SIGNS[filter_.op]} {filter_.value}"


def without_filter(view: View, index: int) -> str:
    """The address without one filter, counted as `view.filters` counts them."""
    kept, position = [], -1
    for name, value in view.pairs:
        counted = (name == "f" and value) or name.startswith("var-")
        if counted and (name == "f" or any(f.key == name[4:] and f.value == value for f in view.filters)):
            position += 1
            if position == index:
                continue
        kept.append((name, value))
    return View(view.page, view.identifier, tuple(kept)).link(view.page, identifier=view.identifier)


def empty_state(answers: Answers, view: View) -> Any | None:
    """Why there is nothing to show, or None where there is something."""
    if answers.watermark().empty:
        return onboarding(answers)
    window = view.window(answers.now())
    if count_requests(answers.reader, answers.rows(window, view.filters)):
        return None
    everything = count_requests(answers.reader, answers.rows(window))
    if everything and view.filters:
        return _nothing_matches(answers, view, window, everything)
    return _no_traffic(answers, view, window)


def _nothing_matches(answers: Answers, view: View, window: Window, everything: int) -> html.Div:
    counts = []
    for index in range(len(view.filters)):
        others = [one for i, one in enumerate(view.filters) if i != index]
        counts.append((count_requests(answers.reader, answers.rows(window, others)), index))
    left, index = max(counts, key=lambda pair: (pair[0], -pair[1]))
    label = filter_text(view.filters[index])
    return state_card(
        f"0 of {fmt.count(everything)} requests match",
        box("state-text", text("", f"Without {label}, {fmt.count(left)} of them would.")),
        box(
            "state-actions",
            link(f"Remove {clean(label)}", without_filter(view, index), "button primary"),
            link("Remove all filters", _unfiltered(view), "button"),
        ),
        icon="∅",
    )


def _unfiltered(view: View) -> str:
    kept = tuple((name, value) for name, value in view.pairs if name != "f" and not name.startswith("var-"))
    return View(view.page, view.identifier, kept).link(view.page)


def _no_traffic(answers: Answers, view: View, window: Window) -> html.Div:
    newest = answers.watermark().newest_finished_unix_ns
    who = " for " + ", ".join(filter_text(one) for one in view.filters) if view.filters else ""
    lines = [text("", f"No request ended in {fmt.interval(window.from_unix_ns, window.to_unix_ns)} UTC{who}.")]
    actions = []
    if newest is not None:
        lines.append(text("", f"The last one stored ended at {fmt.moment(newest, day=True)} UTC."))
        start, end = newest - 10 * 60 * 10**9, newest + 60 * 10**9
        actions.append(
            link(
                "Go to the last requests",
                view.link(view.page, **{"from": fmt.timestamp(start), "to": fmt.timestamp(end)}),
                "button primary",
            )
        )
    actions.append(link("Last 24 hours", view.link(view.page, **{"from": "now-24h", "to": "now"}), "button"))
    return state_card("No traffic in this window", box("state-text", *lines), box("state-actions", *actions), icon="○")


def onboarding(answers: Answers) -> html.Div:
    """The first-run card: three commands, and what has arrived so far."""
    info = answers.serve_info
    host = str(info.get("host") or "127.0.0.1")
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    grpc, http = info.get("otlp_grpc_port", 4317), info.get("otlp_http_port", 4318)
    steps = [
        (
            "vLLM",
            "Start the engine with its request spans switched on",
            f"vllm serve MODEL --otlp-traces-endpoint http://{host}:{grpc}",
        ),
        (
            "SGLang",
            "The same for SGLang; its metrics need their own switch",
            f"python -m sglang.launch_server --model-path MODEL --enable-metrics --enable-trace --otlp-traces-endpoint {host}:{grpc}",
        ),
        (
            "No engine at hand",
            "See it on recorded telemetry of a real vLLM under overload",
            "phasewise demo",
        ),
    ]
    items = [
        html.Li(
            [html.Div([text("step-name", name), text("step-text", what)], className="step-head"), copyable(command)]
        )
        for name, what, command in steps
    ]
    ticks = [
        ("Server is up and the store can be read", True),
        ("Request span received", False),
        ("Engine metrics found (serve --scrape http://ENGINE/metrics)", False),
        ("First verdict", False),
    ]
    return state_card(
        "Waiting for the first request",
        box(
            "state-text",
            text(
                "",
                f"Listening for OpenTelemetry on {host}:{grpc} (gRPC) and {host}:{http} (HTTP). This page fills by itself.",
            ),
        ),
        html.Ol(items, className="steps"),
        html.Ul(
            [
                html.Li(
                    [html.Span("✓" if done else "", className="tick"), text("", what)], className="done" if done else ""
                )
                for what, done in ticks
            ],
            className="ticks",
        ),
        tone="onboarding",
        icon="◌",
    )


def low_traffic(n: int, view: View) -> html.Div | None:
    """A note where percentiles rest on too few requests."""
    if n == 0 or n >= LOW_TRAFFIC:
        return None
    return box(
        "notice quiet",
        text(
            "",
            f"Only {n} request{'s' if n != 1 else ''} in this window: percentiles and shares rest on few of them.",
        ),
        link("Widen to 1 hour", view.link(view.page, **{"from": "now-1h", "to": "now"}), "text-link")
        if view.relative
        else None,
    )


def wrong_question(error: InputError, view: View) -> html.Div:
    """The address asks for something that cannot be answered: what, and what to write instead."""
    actions: Sequence[Any] = [link("Remove all filters", _unfiltered(view), "button")] if view.pairs else []
    if error.source in ("from", "to", "time"):
        actions = [link("Last 15 minutes", view.link(view.page, **{"from": None, "to": None}), "button")]
    return state_card(
        "This address cannot be answered",
        box("state-text", text("", str(error))),
        box("state-actions", *actions),
        tone="warning",
        icon="!",
    )


def failed(sentence: str, reference: str, *, kept: bool) -> html.Div:
    """An error: a sentence, its number, and a way to try again. `kept`: figures from before stand below."""
    retry = html.Button("Retry", className="button", type="button", **attrs(data_retry="1"))
    details = f"{clean(sentence)} (error {reference})"
    copy = html.Button("Copy details", className="button quiet", type="button", **attrs(data_copy=details))
    number = text("notice-id", f"error {reference}")
    if kept:
        return box(
            "notice error",
            text("notice-title", sentence),
            text("", "The figures below are from before."),
            number,
            retry,
            copy,
        )
    title, _, rest = sentence.partition(": ")
    return state_card(
        title,
        box("state-text", text("", rest) if rest else None, number),
        box("state-actions", retry, copy),
        tone="failed",
        icon="!",
    )


def wrong_page(view: View) -> html.Div:
    """An address that names no page."""
    return state_card(
        f"There is no page {view.page!r}",
        box("state-actions", link("Triage", view.link("triage"), "button primary")),
        tone="warning",
        icon="?",
    )
