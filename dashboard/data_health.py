"""Is the data good enough: coverage of the window, what was refused, what is not joined, how far behind we are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.analyzer import gauges, questions
from phasewise.analyzer.devices import devices_in
from phasewise.analyzer.window import Window
from phasewise.collector.lone_halves import QUALITY
from phasewise.dashboard import format as fmt
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.state import View
from phasewise.dashboard.states import strangers_text
from phasewise.dashboard.tables import window_object

GOOD_COVERAGE = 0.9
MOST_TARGETS = 4  # that a page names
APART_S = 0.1  # clocks that stand closer are nothing to speak of


def data_health(answers: Answers, view: View) -> dict[str, Any]:
    """Coverage of the window by field and by instance, the writer's and the receiver's counters, instances and how they joined."""
    window = view.window(answers.now())
    rows = answers.rows(window, view.filters)
    reader = answers.reader
    overall = questions.ask(reader, questions.overview_sql(), rows).row(0, named=True)
    samples = gauges.ask_samples(reader, gauges.totals_sql(), window, view.filters).row(0, named=True)
    instances = reader.query(
        'SELECT "instance", "kind", "engine", "engine_version", "model", "joined_to", "joined_by", "first_seen_unix_ns", '
        '"last_seen_unix_ns", "settings" FROM "instances" ORDER BY "kind", "instance", "first_seen_unix_ns"'
    ).to_dicts()
    for one in instances:  # name -> {value, source, unix_ns?, others?}
        one["settings"] = json.loads(one["settings"]) if one["settings"] else {}
    unjoined = reader.query(
        'SELECT count(*) AS n FROM "engine_samples" WHERE NOT coalesce("joined", TRUE) AND "unix_ns" >= ? AND "unix_ns" < ?',
        (window.from_unix_ns, window.to_unix_ns),
    )["n"][0]
    n = overall["n"]
    provenance: Any = answers.verdict(window, view.filters, view.slo)["provenance"]
    sampling = provenance["sampling"]
    writer = dict(answers.writer_health())
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
            "spans": sampling["coverage_ratio"]
            if sampling
            else None,  # of the finished requests that the engines count
        },
        "sampling": sampling,
        "aborted_estimate": provenance["aborted"],
        "engine_samples": samples["samples_n"],
        "engine_samples_unjoined": unjoined,
        "replicas_sampled": samples["replicas_n"],
        "instances": instances,
        "quality": _quality(answers, window, view),
        "scrapes": writer.get("scrapes", []),
        "devices": devices_in(reader, window),
        "scrape_sources": writer.get("scrape_sources", []),
        "writer": writer,
        "receiver": _receiver(answers),
    }


def _quality(answers: Answers, window: Window, view: View) -> dict[str, int]:
    """Requests of the window by quality flag: what their telemetry contradicted or left out, and what was done about it."""
    rows = answers.rows(window, view.filters)
    found = answers.reader.query(
        f'SELECT flag, count(*) AS n FROM (SELECT unnest(string_split(trim("quality", \'[]"\'), \'","\')) AS flag '
        f'FROM "requests" WHERE {rows.sql} AND "quality" IS NOT NULL) GROUP BY 1 ORDER BY 2 DESC, 1',
        rows.parameters,
    )
    return dict(found.iter_rows())


def _ratio(part: int | None, whole: int) -> float | None:
    return (part or 0) / whole if whole else None


def _receiver(answers: Answers) -> Any:
    """The counters that the receiving process writes beside its journal."""
    try:
        return json.loads((answers.data_dir / "receive.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _told_differently(instances: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Instance -> settings of which its sources say different things."""
    found: dict[str, list[str]] = {}
    for one in instances:
        for name, entry in one["settings"].items():
            if any(other.get("value") != entry.get("value") for other in entry.get("others", ())):
                found.setdefault(one["instance"], []).append(name)
    return found


def _scrape_problems(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Metrics that are missing now: places that tell no targets, targets beyond the limit, scrapes that fail or are not stored."""
    found = []
    for source in told["scrape_sources"]:
        if source["problem"]:
            found.append((f"Targets of {source['job']} ({source['kind']})", f"{source['problem']}"))
        if source.get("left_out"):
            title = f"{fmt.count(source['left_out'])} targets of {source['job']} are not scraped"
            found.append((title, "There are more than one server scrapes: bring them in with ingest --prometheus."))
    failing = [one for one in told["scrapes"] if one["up"] is False or one["not_stored"]]
    for one in failing[:MOST_TARGETS]:
        what = "fails" if one["up"] is False else "is not stored"
        why = one["last_error"] or one["not_stored"]
        found.append(
            (f"Scraping {one['instance']} {what}", f"{why[:1].upper()}{why[1:]}. Samples of that time are missing.")
        )
    if len(failing) > MOST_TARGETS:
        more = fmt.count(len(failing) - MOST_TARGETS)
        found.append((f"Scraping {more} more targets fails", "The API's data health names each."))
    return found


def _clock_problems(skews: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Hosts whose clocks cannot stand together, by the calls between them."""
    apart = [one for one in skews if one["certain"] and abs(one["ahead_s"]) >= APART_S]
    return [
        (
            f"The clock of {one['other_host']} is {fmt.seconds(abs(one['ahead_s']))} {'ahead of' if one['ahead_s'] > 0 else 'behind'} "
            f"that of {one['host']}",
            "Durations are each host's own and hold; times of the two cannot be compared. Set their clocks, by NTP.",
        )
        for one in apart[:MOST_TARGETS]
    ]


def problems(answers: Answers, view: View) -> list[tuple[str, str]]:
    """What a reader of this window should know before trusting it: what, and why it matters or what to do."""
    found = []
    if (strangers := strangers_text(answers)) is not None:
        title, names = strangers
        found.append(
            (title, f"{names} They are kept, shown in the waterfall of their trace, and not counted as requests.")
        )
    if answers.watermark().empty:
        return found
    told = data_health(answers, view)
    coverage: Mapping[str, float | None] = told["coverage"]
    phases = coverage["phases"]
    if phases is not None and phases < GOOD_COVERAGE:
        lacking = fmt.percent(1 - phases)
        found.append(
            (
                f"{lacking} of requests lack phase data",
                "Their time cannot be booked to a cause; it counts as unexplained.",
            )
        )
    sampling = told["sampling"]
    if sampling and sampling["kind"] != "whole":
        title = f"Only {fmt.percent(sampling['coverage_ratio'])} of the finished requests sent spans"
        weighted = sampling["weighted_by"]
        found.append(
            (
                title,
                f"Their kind of sample: {sampling['kind']}. "
                + (
                    "Shares and percentiles hold for all requests; counts are those of the sample."
                    if weighted
                    else "Shares and percentiles are theirs, not those of all requests: send every span."
                ),
            )
        )
    for instance, settings in _told_differently(told["instances"]).items():
        found.append(
            (
                f"Sources differ on the settings of {instance}: {', '.join(settings[:4])}",
                "The running process is believed before its start-up log and its arguments; the API's data health shows who says what.",
            )
        )
    if told["requests"] and not told["replicas_sampled"]:
        found.append(
            (
                "No engine metrics in this window",
                "Running, waiting and KV use are unknown: start serve with --scrape http://ENGINE/metrics.",
            )
        )
    for device in told["devices"]:
        if device["xid"]:
            where = f" of {device['host']}" if device["host"] else ""
            title = f"{device['device']}{where} reports XID {device['xid']}"
            found.append(
                (title, "The driver saw an error of this device: see its log (dmesg) and the list of XID errors.")
            )
    if halves := told["quality"].get(QUALITY):
        found.append(
            (
                f"Of {fmt.count(halves)} requests only the prefill half came",
                "How long they took is unknown: look whether the engines that decode send their spans.",
            )
        )
    found += _clock_problems(told["writer"].get("clock_skews", []))
    found += _scrape_problems(told)
    if told["engine_samples_unjoined"]:
        found.append(
            (
                f"Scrapes of no known instance: {fmt.count(told['engine_samples_unjoined'])}",
                "They are kept and used by nothing: give the scrape an instance, or the engine's spans a service.instance.id.",
            )
        )
    return found
