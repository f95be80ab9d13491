"""`/trace/<id>`: where the time of one request went, and whether it was the request or its neighbours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import polars as pl
import pyarrow as pa
from dash import Dash, dcc, html

from phasewise.analyzer.listing import find_requests, neighbours
from phasewise.analyzer.step_samples import read_step_samples
from phasewise.collector.archive import SpanArchive
from phasewise.collector.redact import redact_spans
from phasewise.dashboard import format as fmt
from phasewise.dashboard.access import caller, log_content_access
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.panels import (
    GRAPH_CONFIG,
    attrs,
    badge,
    bar_row,
    box,
    folded_table,
    link,
    panel,
    skeleton,
    slot,
    state_card,
    swatch,
    table,
    text,
)
from phasewise.dashboard.regions import Region, region
from phasewise.dashboard.state import View
from phasewise.dashboard.waterfall import EngineCourse, pieces, span_rows, waterfall
from phasewise.dashboard.wording import PHASES, cause_colour, cause_text, class_title, dataset_kind

NAME = "trace"
_AROUND_NS = 3 * 10**9
_MOST_SAMPLES = 600
_MOST_NEIGHBOURS = 10


def layout(view: View) -> html.Div:
    return html.Div(slot("trace-body", skeleton(96, 420)), className="page")


def register(app: Dash, answers: Answers) -> None:
    for one in REGIONS:
        region(app, answers, NAME, one)


def body(answers: Answers, view: View) -> Any:
    identifier = view.identifier or ""
    found = find_requests(answers.reader, identifier)
    if found.is_empty():
        return _unknown(view, identifier)
    rows = found.to_dicts()
    if len(rows) > 1 and not any(row["request_key"] == identifier for row in rows):
        return _several(view, identifier, rows)
    return _one(answers, view, rows[0])


def _unknown(view: View, identifier: str) -> Any:
    return state_card(
        "This request is not stored",
        box(
            "state-text",
            text("", f"Nothing is known as {identifier[:120]}. One of three things happened:"),
            html.Ul(
                [
                    html.Li("It was never received: see whether other requests of that minute are here."),
                    html.Li("It was sampled out before it reached us: the sender's sampler decides that."),
                    html.Li("It is past retention: raw rows are kept 14 days by default."),
                ]
            ),
        ),
        box("state-actions", link("All requests", view.link("requests"), "button primary")),
        icon="?",
    )


def _several(view: View, identifier: str, rows: list[dict[str, Any]]) -> Any:
    items = [
        link(
            [
                text("mono", str(row["request_key"])[:12]),
                text("", fmt.moment(row["arrival_unix_ns"], day=True, fraction=True)),
                text("num", fmt.seconds(row["e2e_s"])),
                text("", cause_text(row["cause"]).short if row["cause"] else "Inconclusive"),
            ],
            view.link(NAME, identifier=row["request_key"]),
            "pick",
        )
        for row in rows
    ]
    return panel(f"{len(rows)} requests are known as {identifier[:60]}", box("picks", *items))


def _one(answers: Answers, view: View, row: Mapping[str, Any]) -> Any:
    report = next(
        (one for one in answers.request(row["request_key"]) if one.get("request_key") == row["request_key"]), {}
    )
    spans, missing = span_rows(_spans(answers, row["trace_id"]))
    engine = _engine(answers, row)
    others = neighbours(answers.reader, row, _MOST_NEIGHBOURS).sort("prefill_from_unix_ns", "request_key").to_dicts()
    figure, height = waterfall(row, spans, engine, others)
    flags = (
        [f"{missing} span{'s' if missing != 1 else ''} name a parent that is not here: lost, or sampled out"]
        if missing
        else []
    )
    if not spans:
        flags.append("raw spans are not stored for this request")
    if "clock_skew" in (row["quality"] or ""):
        flags.append("the clocks of its hosts stand apart: spans of one host do not line up with those of another")
    if not engine.known:
        flags.append("no engine metrics around it")
    return [
        _header(view, row, report),
        box("notice quiet", *[text("", flag[:1].upper() + flag[1:] + ".") for flag in flags]) if flags else None,
        panel(
            "Waterfall",
            html.Div(
                dcc.Graph(
                    id={"type": "waterfall", "name": "trace"},
                    figure=figure,
                    config=GRAPH_CONFIG,
                    style={"height": f"{height}px"},
                    responsive=True,
                ),
                role="img",
                **attrs(aria_label=_sentence(row)),
            ),
            _legend(),
            note="seconds from arrival; drag to zoom",
            source="Phases from requests.*_s (provenance on hover), spans from the archive, engine figures from /metrics of the same instance.",
            table=folded_table(
                ["Phase", "From", "Length", "Source"],
                [
                    (PHASES[p.phase].title, fmt.seconds(p.start_s), fmt.seconds(p.end_s - p.start_s), p.source)
                    for p in pieces(row)
                ],
            ),
        ),
        box("grid-2", _partition(row, report), _attributes(row, report)),
        panel(
            "Attributes as received",
            html.Details(
                [
                    html.Summary("Raw attributes of its spans, after redaction", className="text-link"),
                    _raw(answers, row),
                ]
            ),
        ),
    ]


_OUTER = {"server": "At the server in front", "client": "At the client"}


def _sentence(row: Mapping[str, Any]) -> str:
    parts = [f"{PHASES[p.phase].title} {fmt.seconds(p.end_s - p.start_s)}" for p in pieces(row)]
    return f"Waterfall: {', '.join(parts)}; {fmt.seconds(row['e2e_s'])} end to end"


def _header(view: View, row: Mapping[str, Any], report: Mapping[str, Any]) -> Any:
    verdict = report.get("verdict") or {}
    cause = row["cause"]
    facts = [
        ("E2E", fmt.seconds(row["e2e_s"])),
        ("TTFT", fmt.seconds(row["ttft_s"])),
        ("TPOT", fmt.seconds(row["tpot_s"])),
        ("In", fmt.count(row["input_tokens"])),
        ("Out", fmt.count(row["output_tokens"])),
        ("Cached", fmt.count(row["cached_tokens"])),
        (_OUTER.get(row.get("entry_side") or "", "At the client"), fmt.seconds(row["entry_e2e_s"]))
        if row["entry_e2e_s"] is not None
        else None,
        ("Preemptions", fmt.count(row["preemptions"])) if row["preemptions"] is not None else None,
        ("Finish", row["finish_reason"] or row["outcome"] or "unknown"),
    ]
    where = " on ".join(str(part) for part in (row["model"], row["instance"]) if part) or "unknown engine"
    engine = " ".join(str(part) for part in (row["engine"], row["engine_version"]) if part)
    return html.Header(
        [
            box(
                "trace-line",
                link("Requests", view.link("requests"), "text-link"),
                text("quiet", "/"),
                html.H1(str(row["trace_id"] or row["request_key"])[:16], className="trace-id mono"),
                text("", where),
                text("quiet", engine),
                text("quiet mono", f"{fmt.moment(row['arrival_unix_ns'], day=True, fraction=True)} UTC"),
                badge(dataset_kind(row["dataset"]), "recorded", str(row["dataset"])) if row["dataset"] else None,
                badge("provisional", "quiet", "Its neighbours may still arrive") if row["final"] is False else None,
                html.Span(className="grow"),
                badge(class_title(row["primary_class"]), f"class-{row['primary_class']}")
                if row["primary_class"]
                else None,
            ),
            html.P(
                str(verdict.get("sentence") or (cause_text(cause).title if cause else "No single cause explains it.")),
                className="trace-sentence",
            ),
            html.Dl(
                [
                    part
                    for fact in facts
                    if fact
                    for part in (html.Div([html.Dt(fact[0]), html.Dd(str(fact[1]))], className="fact-pair"),)
                ],
                className="trace-facts",
            ),
        ],
        className="panel trace-head",
    )


def _legend() -> Any:
    phases = [
        html.Span([swatch(p.colour, p.name == "residual"), text("", p.title)], className="legend-item")
        for p in PHASES.values()
    ]
    how = [
        html.Span([html.Span(className="swatch solid"), text("", "measured")], className="legend-item"),
        html.Span([html.Span(className="swatch outlined"), text("", "inferred")], className="legend-item"),
    ]
    return box("legend", *phases, html.Span(className="grow"), *how)


def _partition(row: Mapping[str, Any], report: Mapping[str, Any]) -> Any:
    parts: Mapping[str, float] = report.get("partition") or {}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    whole = row["e2e_s"] or sum(parts.values()) or 1.0
    rows = [
        bar_row(
            cause_text(cause).short,
            seconds / ordered[0][1],
            fmt.seconds(seconds),
            colour=cause_colour(cause),
            note=fmt.percent(seconds / whole),
        )
        for cause, seconds in ordered
        if seconds > 0
    ]
    if not rows:
        return panel("Booked to causes", box("nothing", text("", "Not attributed yet.")))
    return panel(
        "Booked to causes",
        box("bars with-note", *rows),
        note="each second to exactly one",
        source="Cause columns of requests; they sum to the end-to-end time.",
        table=folded_table(
            ["Cause", "Seconds", "Share"], [(cause, fmt.seconds(s), fmt.share(s / whole)) for cause, s in ordered]
        ),
    )


def _attributes(row: Mapping[str, Any], report: Mapping[str, Any]) -> Any:
    names = (
        ("Request key", "request_key"),
        ("Trace id", "trace_id"),
        ("Request id", "request_id"),
        ("Client request id", "client_request_id"),
        ("Service", "service"),
        ("Tenant", "tenant"),
        ("Route", "route"),
        ("Requests in the engine at arrival", "concurrency_at_arrival"),
        ("Batch while decoding, mean", "decode_batch_mean"),
        ("KV in use at admission", "kv_usage_admission_ratio"),
        ("KV in use, peak", "kv_usage_peak_ratio"),
        ("Source", "source"),
        ("Data set", "dataset"),
    )
    cells = []
    for label, name in names:
        value = row[name]
        if value is None:
            continue
        shown = (
            fmt.share(value)
            if name.endswith("_ratio")
            else fmt.number(value)
            if isinstance(value, float)
            else str(value)
        )
        cells.append((label, shown))
    missing = report.get("missing_signals") or []
    if missing:
        cells.append(("Missing signals", ", ".join(str(one).replace("_", " ") for one in missing)))
    quality = report.get("quality") or []
    if quality:
        cells.append(("Quality flags", ", ".join(str(one) for one in quality)))
    return panel("What is known of it", table(["Field", "Value"], cells, numbers_from=9))


def _spans(answers: Answers, trace_id: str | None, with_content: bool = False) -> list[dict[str, Any]]:
    """Spans of the trace; none where the archive lacks them. The page stands without."""
    if not trace_id:
        return []
    found: pa.Table = SpanArchive(answers.data_dir).trace(trace_id)
    if not with_content:  # also where content is kept no more: what was stored before is still there
        found, _ = redact_spans(found)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def _raw(answers: Answers, row: Mapping[str, Any]) -> Any:
    """Prompts and answers, where they are kept, only for who may see them; each look is in the audit log."""
    spans = _spans(answers, row["trace_id"], with_content=caller().allows("content"))
    if spans and answers.posture.content and caller().allows("content"):
        log_content_access(answers.data_dir, answers.clock(), str(row["request_key"]))
    blocks = []
    for span in spans[:20]:
        try:
            attributes = json.dumps(
                json.loads(span["attributes"] or "{}"), indent=2, ensure_ascii=False, sort_keys=True
            )
        except ValueError:
            attributes = str(span["attributes"])
        blocks.append(box("raw-block", text("strong", span["name"]), html.Pre(attributes[:20_000], className="raw")))
    return box("", *blocks) if blocks else text("quiet", "No raw spans are stored for this trace.")


def _engine(answers: Answers, row: Mapping[str, Any]) -> EngineCourse:
    """The samples of the request's instance, or its steps where there are none, from a little before its arrival to a little after
    its end."""
    if row["instance"] is None:
        return EngineCourse((), (), (), ())
    around = (row["arrival_unix_ns"] - _AROUND_NS, row["finished_unix_ns"] + _AROUND_NS)
    frame = answers.reader.query(
        'SELECT s."unix_ns", s."running", s."waiting", s."kv_usage_ratio" FROM "engine_samples" s WHERE coalesce(s."joined", TRUE) '
        'AND (s."instance" = ? OR s."instance" IN (SELECT "instance" FROM "instances" WHERE "joined_to" = ?)) '
        'AND s."unix_ns" BETWEEN ? AND ? ORDER BY s."unix_ns"',
        (row["instance"], row["instance"], *around),
    )
    if frame.is_empty():
        frame = read_step_samples(answers.reader, *around).filter(pl.col("instance") == row["instance"])
    step = max(1, frame.height // _MOST_SAMPLES)
    kept = frame.gather_every(step)
    return EngineCourse(
        kept["unix_ns"].to_list(),
        kept["running"].to_list(),
        kept["waiting"].to_list(),
        kept["kv_usage_ratio"].to_list(),
    )


REGIONS = (Region("trace-body", body, lead=True),)
