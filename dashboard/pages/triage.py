"""`/triage`: is something slow now, for whom, why, and what to try first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import Dash, dcc, html

from phasewise.analyzer.dimensions import DIMENSIONS
from phasewise.analyzer.window import Window
from phasewise.dashboard import format as fmt
from phasewise.dashboard import tables, triage_charts
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.cards import RUNS_SHOWN, by_kind, clean, ends_now, open_word
from phasewise.dashboard.panels import (
    attrs,
    badge,
    bar_row,
    box,
    folded_table,
    panel,
    phase_bar,
    skeleton,
    slot,
    swatch,
    text,
)
from phasewise.dashboard.regions import Region, region
from phasewise.dashboard.state import View
from phasewise.dashboard.states import empty_state, low_traffic
from phasewise.dashboard.verdict_card import verdict_card
from phasewise.dashboard.wording import PHASES, cause_colour, cause_text, dataset_kind

NAME = "triage"
WHERE = ("instance", "input", "output", "route", "tenant", "model")
_SHOWN_WHERE = 3
_SHOWN_VALUES = 5
_LISTED = 20


def layout(_: View) -> html.Div:
    return html.Div(
        [
            slot("triage-headline", skeleton(58), "headline-region"),
            slot("triage-stats", skeleton(82)),
            html.Div(
                [
                    slot("triage-card", skeleton(640)),
                    html.Div(
                        [slot("triage-where", skeleton(200, 150, 220)), slot("triage-charts", skeleton(250, 250))],
                        className="stack-column",
                    ),
                ],
                className="grid-8-4",
            ),
            slot("triage-time", html.Div([skeleton(190) for _ in range(4)], className="grid-4")),
        ],
        className="page",
    )


def register(app: Dash, answers: Answers) -> None:
    for one in REGIONS:
        region(app, answers, NAME, one)


def _verdict(answers: Answers, view: View) -> Mapping[str, Any]:
    return answers.verdict(view.window(answers.now()), view.filters, view.slo)


def _silent(answers: Answers, view: View, verdict: Mapping[str, Any]) -> bool:
    """Nothing ended in the window and nothing is in flight."""
    return not verdict.get("requests") and verdict.get("status") == "unknown" and not verdict.get("open")


def headline(answers: Answers, view: View) -> Any:
    """The sentence; or why there is none."""
    if answers.watermark().empty:
        return empty_state(answers, view)
    verdict = _verdict(answers, view)
    if _silent(answers, view, verdict) and (empty := empty_state(answers, view)) is not None:
        return empty
    status = str(verdict.get("status"))
    window: Mapping[str, int] = verdict["window"]
    facts = [_window_text(Window(window["from_unix_ns"], window["to_unix_ns"]), answers.now())]
    facts.append(fmt.counted(verdict.get("requests"), "request"))
    for key, word in (
        ("open", open_word(ends_now(verdict, answers.now()))),
        ("provisional", "provisional"),
        ("refused", "refused"),
        ("aborted", "aborted"),
    ):
        if verdict.get(key):
            facts.append(f"{fmt.count(verdict[key])} {word}")
    sentence = str(verdict.get("headline") or "")
    return [
        box(
            "headline",
            box(
                "headline-text",
                html.H1(
                    [html.Span(status, className=f"status status-{status}"), text("sentence", _bare(sentence))],
                    className="headline-sentence",
                ),
                box(
                    "headline-facts", *[text("fact", fact) for fact in facts], *recorded_badges(verdict.get("recorded"))
                ),
            ),
            _slo_editor(view),
        ),
        low_traffic(int(verdict.get("requests") or 0), view),
    ]


def _bare(sentence: str) -> str:
    """The sentence without the status word, which stands beside it as a mark."""
    for word in ("Slow: ", "Healthy: ", "Slow now: "):
        if sentence.startswith(word):
            rest = sentence[len(word) :]
            return rest[:1].upper() + rest[1:]
    return sentence


def _window_text(window: Window, now_unix_ns: int) -> str:
    if window.from_unix_ns <= 0 and window.to_unix_ns > 4 * 10**18:
        return "All data"
    if window.from_unix_ns <= 0:
        return f"Until {fmt.moment(window.to_unix_ns, day=True)} UTC"
    return f"{fmt.interval(window.from_unix_ns, window.to_unix_ns, now_unix_ns)} UTC"


def recorded_badges(recorded: object) -> list[Any]:
    """What tells a recording or a simulation from live traffic: engine, machine and size of each; of more than a few, how many."""
    if not isinstance(recorded, Mapping):
        return []
    found: list[Any] = []
    if len(recorded) > RUNS_SHOWN:
        for kind, names in by_kind(recorded).items():
            found.append(badge(f"{kind}, {fmt.counted(len(names), 'run')}", "recorded", _listed(names)))
        return found
    for name, facts in recorded.items():
        told = facts if isinstance(facts, Mapping) else {}
        parts = [str(told[key]) for key in ("engine", "machine") if told.get(key)]
        if told.get("requests"):
            parts.append(fmt.counted(told["requests"], "request"))
        found.append(badge(dataset_kind(name), "recorded", clean(str(name))))
        found.append(text("fact", " · ".join([str(told.get("title") or name), *parts])))
    return found


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _slo_editor(view: View) -> html.Details:
    label = ", ".join(f"{one.metric.upper()} ≤ {fmt.seconds(one.limit_s)}" for one in view.slo) or "none set"
    return html.Details(
        [
            html.Summary([text("quiet", "SLO"), text("", label)], className="button"),
            box(
                "popover right slo-popover",
                html.H3("What counts as slow"),
                dcc.Input(
                    id="slo-input",
                    value=view.slo_text,
                    placeholder="ttft:2s,itl:80ms",
                    className="field",
                    autoComplete="off",
                ),
                box(
                    "state-actions",
                    html.Button("Apply", className="button primary", type="button", **attrs(data_apply_slo="1")),
                    html.Button(
                        "Without", className="button quiet", type="button", **attrs(data_change='{"slo": null}')
                    ),
                ),
                text(
                    "popover-note",
                    "ttft, tpot, itl, e2e, queue; client.ttft for the client's clock. Without one: the slowest tenth.",
                ),
            ),
        ],
        className="pop",
    )


def card(answers: Answers, view: View) -> Any:
    """The verdict card."""
    if answers.watermark().empty:
        return None
    verdict = _verdict(answers, view)
    if _silent(answers, view, verdict):
        return None
    return verdict_card(verdict, view, current=ends_now(verdict, answers.now()))


def where(answers: Answers, view: View) -> Any:
    """Beside the card: what the slow set's time goes to, the phases of slow and other requests, and where slow ones are."""
    if empty_state(answers, view) is not None:
        return None
    verdict = _verdict(answers, view)
    return [
        _cause_bars(verdict, ends_now(verdict, answers.now())),
        _phases(tables.phase_stack(answers, view)),
        _where(answers, view),
    ]


def _cause_bars(verdict: Mapping[str, Any], current: bool) -> Any:
    shares: Mapping[str, float] = verdict.get("affected_shares") or verdict.get("shares") or {}
    ordered = sorted(shares.items(), key=lambda item: -item[1])[:6]
    if not ordered:
        return None
    largest = ordered[0][1]
    rows = [
        bar_row(cause_text(cause).short, share / largest, fmt.percent(share), colour=cause_colour(cause))
        for cause, share in ordered
        if share >= 0.002
    ]
    live = (verdict.get("in_flight") or {}).get("leads")
    return panel(
        "Where their time goes",
        box("bars", *rows),
        note=("requests in flight" if current else "requests open at the end") if live else "affected requests",
        source="Seconds booked to each cause, as a share of the end-to-end seconds of the affected requests (architecture 3).",
        table=folded_table(["Cause", "Share"], [(cause_text(c).short, fmt.share(s)) for c, s in shares.items()]),
    )


def _phases(stack: Mapping[str, Any]) -> Any:
    sides = [(name, stack[name]) for name in ("slow", "others") if name in stack and stack[name]["e2e_s"] is not None]
    if not sides:
        return None
    scale = max(max(side["e2e_s"], sum(max(v or 0.0, 0.0) for v in side["phases"].values())) for _, side in sides)
    rows = []
    for name, side in sides:
        label = "Slow" if name == "slow" else "Others"
        rows.append(
            box(
                "stack-row",
                box("stack-label", text("", label), text("quiet", f"n={fmt.count(side['n'])}")),
                phase_bar(side["phases"], scale),
                text("stack-value", fmt.seconds(side["e2e_s"])),
            )
        )
    used = [name for name in PHASES if any((side["phases"][name] or 0) > 0.002 * scale for _, side in sides)]
    legend = box(
        "legend",
        *[
            html.Span([swatch(PHASES[n].colour, n == "residual"), text("", PHASES[n].title)], className="legend-item")
            for n in used
        ],
    )
    cells = [
        (PHASES[name].title, *(fmt.seconds(side["phases"][name], "not reported") for _, side in sides))
        for name in PHASES
    ]
    return panel(
        "Phases, mean a request",
        box("stack", *rows),
        legend,
        source="Phases of the accounting identity as the engine reports them (queue_s, prefill_s, decode_s, ...), both bars on one scale.",
        table=folded_table(["Phase", *("Slow" if n == "slow" else "Others" for n, _ in sides)], cells),
    )


def _where(answers: Answers, view: View) -> Any:
    found = tables.where(answers, view, WHERE)
    telling = [one for one in found if len(one["values"]) > 1]
    if not telling:
        return None
    blocks = []
    for one in telling[:_SHOWN_WHERE]:
        total = sum(value["marked_n"] for value in one["values"]) or 1
        ranked = sorted(one["values"], key=lambda value: -value["marked_n"])[:_SHOWN_VALUES]
        field = DIMENSIONS[one["name"]]
        rows = [
            bar_row(
                value["value"],
                value["marked_n"] / total,
                fmt.percent(value["marked_n"] / total),
                href=view.with_filters("triage", field.filters(value["value"])),
                note=f"{fmt.count(value['marked_n'])} of {fmt.count(value['n'])}",
            )
            for value in ranked
            if value["marked_n"]
        ]
        blocks.append(box("where-block", html.H3(one["title"], className="mini-title"), box("bars with-note", *rows)))
    return panel(
        "Where slow requests are",
        *blocks,
        note="click to filter",
        source="The affected requests by field. Compare with all requests on the Slices page before calling it a cause.",
    )


REGIONS = (
    Region("triage-headline", headline, lead=True),
    Region("triage-stats", triage_charts.stats),
    Region("triage-card", card),
    Region("triage-where", where),
    Region("triage-charts", triage_charts.charts),
    Region("triage-time", triage_charts.time_lines),
)
