"""Replayed recordings: named by a resource attribute, kept as `runs`, so that their rows are badged wherever they are shown."""

from __future__ import annotations

import json

import polars as pl

from phasewise.collector.identity import DATASET
from phasewise.collector.records import Run
from phasewise.collector.transaction import Transaction

FACTS = "phasewise.dataset.facts"  # JSON object: engine, machine, load, requests, badge


def recordings_of(spans: pl.DataFrame) -> list[Run]:
    """One run a data set named by a resource of these spans (columns of SPAN_SCHEMA), over the time of its spans."""
    marked = spans.filter(pl.col("resource").str.contains(f'"{DATASET}"', literal=True))
    if marked.is_empty():
        return []
    seen = marked.group_by("resource").agg(pl.col("start_unix_ns").min(), pl.col("end_unix_ns").max()).sort("resource")
    found: dict[str, Run] = {}
    for resource, first, last in seen.iter_rows():
        told = json.loads(resource)
        name = str(told[DATASET])
        before = found.get(name)
        found[name] = Run(
            run=name,
            name=name,
            from_unix_ns=min(first, before.from_unix_ns) if before else first,
            to_unix_ns=max(last, before.to_unix_ns) if before else last,
            facts=_object(told.get(FACTS)),
        )
    return list(found.values())


def _object(text: object) -> str | None:
    """The facts as they came, where they are a JSON object; anything else is no fact."""
    try:
        return text if isinstance(text, str) and isinstance(json.loads(text), dict) else None
    except ValueError:
        return None


def note_recordings(transaction: Transaction, spans: pl.DataFrame) -> None:
    """Writes the runs of these spans; a run that is known already grows over the new time."""
    for run in recordings_of(spans):
        known = transaction.query("SELECT from_unix_ns, to_unix_ns, facts FROM runs WHERE run = ?", [run.run])
        first, last, facts = run.from_unix_ns, run.to_unix_ns, run.facts
        for earlier_first, earlier_last, earlier_facts in known.iter_rows():
            first, last, facts = min(first, earlier_first), max(last, earlier_last), facts or earlier_facts
        if known.height == 1 and (first, last, facts) == known.row(0):
            continue
        transaction.execute("DELETE FROM runs WHERE run = ?", [run.run])
        transaction.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?)", [run.run, run.name, first, last, facts])
