"""Is the data good enough: coverage of the window, what was refused, what is not joined, how far behind we are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phasewise.analyzer import gauges, questions
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.state import View
from phasewise.dashboard.tables import window_object

GOOD_COVERAGE = 0.9


def data_health(answers: Answers, view: View) -> dict[str, Any]:
    """Coverage of the window by field and by instance, the writer's and the receiver's counters, instances and how they joined."""
    window = view.window(answers.now())
    rows = answers.rows(window, view.filters)
    reader = answers.reader
    overall = questions.ask(reader, questions.overview_sql(), rows).row(0, named=True)
    samples = gauges.ask_samples(reader, gauges.totals_sql(), window, view.filters).row(0, named=True)
    instances = reader.query(
        'SELECT "instance", "kind", "engine", "engine_version", "model", "joined_to", "joined_by", "first_seen_unix_ns", '
        '"last_seen_unix_ns" FROM "instances" ORDER BY "kind", "instance"'
    ).to_dicts()
    unjoined = reader.query(
        'SELECT count(*) AS n FROM "engine_samples" WHERE NOT coalesce("joined", TRUE) AND "unix_ns" >= ? AND "unix_ns" < ?',
        (window.from_unix_ns, window.to_unix_ns),
    )["n"][0]
    n = overall["n"]
    return {
        "window": window_object(window),
        "requests": n,
        "provisional": overall["provisional_n"],
        "coverage": {
            "phases": _ratio(overall["phases_n"], n),
            "ttft": _ratio(overall["ttft_n"], n),
            "tpot": _ratio(overall["tpot_n"], n),
            "queue": _ratio(overall["queue_n"], n),
            "cached_tokens": _ratio(overall["cached_n"], n),
            "client": _ratio(overall["client_e2e_n"], n),
        },
        "engine_samples": samples["samples_n"],
        "engine_samples_unjoined": unjoined,
        "replicas_sampled": samples["replicas_n"],
        "instances": instances,
        "writer": dict(answers.writer_health()),
        "receiver": _receiver(answers),
    }


def _ratio(part: int | None, whole: int) -> float | None:
    return (part or 0) / whole if whole else None


def _receiver(answers: Answers) -> Any:
    """The counters that the receiving process writes beside its journal."""
    try:
        return json.loads((answers.data_dir / "receive.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def problems(answers: Answers, view: View) -> list[tuple[str, str]]:
    """What a reader of this window should know before trusting it: what, and why it matters or what to do."""
    if answers.watermark().empty:
        return []
    told = data_health(answers, view)
    coverage: Mapping[str, float | None] = told["coverage"]
    found = []
    phases = coverage["phases"]
    if phases is not None and phases < GOOD_COVERAGE:
        lacking = fmt.percent(1 - phases)
        found.append(
            (
                f"{lacking} of requests lack phase data",
                "Their time cannot be booked to a cause; it counts as unexplained.",
            )
        )
    if told["requests"] and not told["engine_samples"]:
        found.append(
            (
                "No engine metrics in this window",
                "Running, waiting and KV use are unknown: start serve with --scrape http://ENGINE/metrics.",
            )
        )
    if told["engine_samples_unjoined"]:
        found.append(
            (
                f"{fmt.count(told['engine_samples_unjoined'])} scrapes belong to no known instance",
                "They are kept and used by nothing: give the scrape an instance, or the engine's spans a service.instance.id.",
            )
        )
    unmapped = _find(told["writer"], "unmapped")
    if unmapped:
        found.append(
            (
                f"{fmt.count(unmapped)} spans of unknown engines",
                "They are kept, shown in the waterfall, and not counted as requests.",
            )
        )
    return found


def _find(tree: object, word: str) -> float:
    """The sum of the counters whose name holds a word, at any depth."""
    if not isinstance(tree, Mapping):
        return 0
    total = 0.0
    for name, value in tree.items():
        if isinstance(value, Mapping):
            total += (
                sum(v for v in value.values() if isinstance(v, int | float))
                if word in str(name)
                else _find(value, word)
            )
        elif word in str(name) and isinstance(value, int | float):
            total += value
    return total
