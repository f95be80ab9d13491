"""Requests and turns one by one, as the list shows them: numbers, and with `display` the texts of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.analyzer.dimensions import UNKNOWN
from phasewise.analyzer.listing import count_requests, request_page
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.state import View
from phasewise.dashboard.tables import window_object
from phasewise.dashboard.wording import PHASES, cause_text
from phasewise.rules.errors import InputError


def request_list(
    answers: Answers, view: View, *, cursor: str | None = None, limit: int = 100, display: bool = False
) -> dict[str, Any]:
    """One page of requests. With `display` each row carries its figures as text, the way the pages show them."""
    window = view.window(answers.now())
    rows = answers.rows(window, view.filters)
    page = request_page(answers.reader, rows, view.order, cursor=cursor, limit=limit)
    found = page.rows.to_dicts()
    return {
        "window": window_object(window),
        "total": count_requests(answers.reader, rows) if cursor is None else None,
        "next": page.next_cursor,
        "requests": [display_row(row, day=window.seconds > 86400) for row in found] if display else found,
    }


def display_row(row: Mapping[str, Any], *, day: bool = False) -> dict[str, Any]:
    """A row of the list as text, and the widths of its phase bar in seconds."""
    text = {
        name: fmt.seconds(row[f"{name}_s"], fmt.NONE)
        for name in ("e2e", "ttft", "tpot", "queue", "prefill", "decode", "longest_gap")
    }
    bar = [
        {
            "phase": phase.name,
            "title": phase.title,
            "seconds": row[phase.column],
            "text": fmt.seconds(row[phase.column]),
        }
        for phase in PHASES.values()
        if (row[phase.column] or 0) > 0
    ]
    return {
        **text,
        "request_key": row["request_key"],
        "trace_id": row["trace_id"],
        "finished": fmt.moment(row["finished_unix_ns"], day=day, fraction=not day),
        "model": row["model"] or fmt.NONE,
        "instance": row["instance"] or fmt.NONE,
        "input_tokens": fmt.count(row["input_tokens"], fmt.NONE),
        "output_tokens": fmt.count(row["output_tokens"], fmt.NONE),
        "cached_tokens": fmt.count(row["cached_tokens"], UNKNOWN),
        "cause": row["cause"],
        "cause_text": cause_text(row["cause"]).short if row["cause"] else "Inconclusive",
        "primary": row["primary_class"],
        "preemptions": fmt.count(row["preemptions"], fmt.NONE),
        "outcome": row["outcome"] or fmt.NONE,
        "dataset": row["dataset"],
        "provisional": row["final"] is False,
        "bar": bar,
        "e2e_s": row["e2e_s"],
    }


def turn_list(answers: Answers, view: View, limit: int) -> dict[str, Any]:
    """User-visible turns that ended in the window, the latest first."""
    window = view.window(answers.now())
    if not 1 <= limit <= 1000:
        raise InputError("limit", str(limit), "is out of range", "between 1 and 1000")
    frame = answers.reader.query(
        'SELECT * FROM "turns" WHERE "finished_unix_ns" >= ? AND "finished_unix_ns" < ? '
        'ORDER BY "finished_unix_ns" DESC, "turn_key" LIMIT ?',
        (window.from_unix_ns, window.to_unix_ns, limit),
    )
    return {"window": window_object(window), "turns": frame.to_dicts()}
