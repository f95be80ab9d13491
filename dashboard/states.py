"""The states of a page that are not figures: never any data, no traffic, nothing matches, too little, wrong question, errors."""

from __future__ import annotations

from typing import Any

from dash import html

from phasewise.analyzer.window import Filter, Window
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.cards import clean
from phasewise.dashboard.panels import attrs, box, copyable, link, state_card, text
from phasewise.dashboard.state import FILTER_NAMES, OWN_KEYS, View
from phasewise.rules.errors import InputError, Stopped

LOW_TRAFFIC = 30
_SHOWN_NAMES = 5
_CATCH_ALL = "llm_request_generic"  # the profile of engines that have none
_LONGEST_NAME = 80
_SHORT_S = 900.0
_LONGEST_HALVED_S = 400 * 86400  # a window from the beginning of time has no useful half
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
        if view.filter_of(name, value) is not None:
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
    if answers.count(window, view.filters):
        return None
    everything = answers.count(window)
    if everything and view.filters:
        return _nothing_matches(answers, view, window, everything)
    return _no_traffic(answers, view, window)


def _nothing_matches(answers: Answers, view: View, window: Window, everything: int) -> html.Div:
    counts = []
    for index in range(len(view.filters)):
        others = [one for i, one in enumerate(view.filters) if i != index]
        counts.append((answers.count(window, others), index))
    left, index = max(counts, key=lambda pair: (pair[0], -pair[1]))
    label = filter_text(view.filters[index])
    return state_card(
        f"0 of {fmt.counted(everything, 'request')} match",
        box("state-text", text("", f"Without {label}, {fmt.count(left)} of them would.")),
        box(
            "state-actions",
            link(f"Remove {clean(label)}", without_filter(view, index), "button primary"),
            link("Remove all filters", _unfiltered(view), "button"),
        ),
        icon="∅",
    )


def _unfiltered(view: View) -> str:
    kept = tuple(
        (name, value) for name, value in view.pairs if name not in FILTER_NAMES and not name.startswith("var-")
    )
    return View(view.page, view.identifier, kept).link(view.page, identifier=view.identifier)


def _no_traffic(answers: Answers, view: View, window: Window) -> html.Div:
    newest = answers.watermark().newest_finished_unix_ns
    who = " for " + ", ".join(filter_text(one) for one in view.filters) if view.filters else ""
    lines = [
        text("", f"No request ended in {fmt.interval(window.from_unix_ns, window.to_unix_ns, answers.now())} UTC{who}.")
    ]
    if newest is None and (strangers := strangers_text(answers)) is not None:
        lines += [text("strong", f"{strangers[0]}."), text("", strangers[1])]
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


def strangers_text(answers: Answers) -> tuple[str, str] | None:
    """Spans that no profile knows, where there are any: how many, and their names with what they are kept for."""
    unmapped = answers.unmapped_spans()
    if not unmapped:
        return None
    n = sum(unmapped.values())
    ordered = sorted(unmapped.items(), key=lambda item: (-item[1], item[0]))
    names = ", ".join(clean(name)[:_LONGEST_NAME] for name, _ in ordered[:_SHOWN_NAMES])
    more = f", and {len(ordered) - _SHOWN_NAMES} other names" if len(ordered) > _SHOWN_NAMES else ""
    alone = answers.watermark().requests_n == 0
    what = "none is of a known engine" if alone else "of no known engine"
    received = f"{fmt.count(n)} span{'s' if n != 1 else ''} received"
    title = f"{received}, {what}" if alone else f"{received} {what}"
    return title, f"Names: {names}{more}."


def onboarding(answers: Answers) -> html.Div:
    """The first-run card: three commands, and what has arrived so far."""
    strangers = strangers_text(answers)
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
        ("Request span of a known engine received", False),
        ("Engine metrics found (serve --scrape http://ENGINE/metrics)", False),
        ("First verdict", False),
    ]
    return state_card(
        strangers[0] if strangers else "Waiting for the first request",
        box(
            "state-text",
            *(
                [
                    text("", strangers[1]),
                    text("", f"They are kept, and no request is counted. Profiles exist for {_known(answers)}."),
                ]
                if strangers
                else []
            ),
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


def _known(answers: Answers) -> str:
    profiles = sorted(answers.rulebook.engines.values(), key=lambda one: one.order)
    return ", ".join(one.title for one in profiles if one.role == "engine" and one.id != _CATCH_ALL)


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
    source = str(error.source)
    here = {"identifier": view.identifier}
    if source in ("from", "to", "time"):
        actions = [
            link("Last 15 minutes", view.link(view.page, **here, **{"from": None, "to": None}), "button primary")
        ]
    elif keys := {"by": ("rows", "cols")}.get(source) or (
        (source,) if source in OWN_KEYS and source != "filter" else ()
    ):
        actions = [link("Leave it out", view.link(view.page, **here, **dict.fromkeys(keys)), "button primary")]
    else:
        actions = [link("Remove all filters", _unfiltered(view), "button primary")]
    return state_card(
        "This address cannot be answered",
        box("state-text", text("", str(error))),
        box("state-actions", *actions),
        tone="warning",
        icon="!",
    )


def refused(sentence: str, remedy: str) -> html.Div:
    """A list that could not be asked for that way."""
    return box("notice error", text("notice-title", sentence), text("", remedy))


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


def stopped(error: Stopped, view: View, now_unix_ns: int, *, kept: bool) -> html.Div:
    """A part that was given up: why, and what to ask instead. `kept`: figures from before stand below."""
    title = error.problem[:1].upper() + error.problem[1:]
    hint = f"{error.remedy[:1].upper()}{error.remedy[1:]}." if error.remedy else ""
    actions: list[Any] = [link(name, address, "button") for name, address in narrower(view, now_unix_ns)]
    actions.append(html.Button("Retry", className="button quiet", type="button", **attrs(data_retry="1")))
    if kept:
        return box(
            "notice quiet",
            text("notice-title", title),
            text("", f"{hint} The figures below are from before.".strip()),
            *actions,
        )
    return state_card(
        title,
        box("state-text", text("", hint)) if hint else None,
        box("state-actions", *actions),
        tone="stopped",
        icon="◔",
    )


def narrower(view: View, now_unix_ns: int) -> list[tuple[str, str]]:
    """Shorter windows with the same end, as name and address: the later half, and 15 minutes. None for a single request."""
    if view.page == "trace":
        return []
    window = view.window(now_unix_ns)
    lengths_s = [_SHORT_S] if window.seconds > _SHORT_S else []
    if 2 < window.seconds <= _LONGEST_HALVED_S:
        lengths_s.insert(0, window.seconds / 2)
    moving = view.to_text == "now"
    found = {}
    for length_s in lengths_s:
        start = f"now-{round(length_s)}s" if moving else fmt.timestamp(window.to_unix_ns - round(length_s * 1e9))
        last = f"Last {fmt.seconds(length_s)}" if length_s != _SHORT_S else "Last 15 minutes"
        found[last if moving else f"{last} of this window"] = view.link(view.page, **{"from": start})
    return list(found.items())


def wrong_page(view: View) -> html.Div:
    """An address that names no page."""
    return state_card(
        f"There is no page {view.page!r}",
        box("state-actions", link("Triage", view.link("triage"), "button primary")),
        tone="warning",
        icon="?",
    )
