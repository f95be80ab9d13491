"""The interference ledger of one request: whose prompts took time of it, and of whom its own prompt did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl

from phasewise.analyzer.blame import divided_ns
from phasewise.analyzer.interference_ledger import provenance, share_of
from phasewise.analyzer.interference_reading import LOOK_NS, LOST, MOST_ROWS, context_of, replicas
from phasewise.analyzer.interference_sights import COLUMN, Sight, sight_of
from phasewise.analyzer.listing import find_requests
from phasewise.analyzer.replicas import Reader
from phasewise.analyzer.step_table import Ints
from phasewise.analyzer.window import Window
from phasewise.rules.load import Rulebook

MOST_NAMED = 20  # requests on either side; the others together
_TOLD = ("request_id", "tenant", "route", "input_tokens", "output_tokens")


def request_ledgers(store: Reader, rulebook: Rulebook, identifier: str) -> list[dict[str, object]]:
    """One object a request that the identifier names; where it names several, their keys alone."""
    rows = find_requests(store, identifier, limit=None)
    if rows.height > 1:
        return [{"request_key": key} for key in rows["request_key"].to_list()]
    return [_ledger(store, rulebook, row) for row in rows.iter_rows(named=True)]


def _ledger(store: Reader, rulebook: Rulebook, row: Mapping[str, Any]) -> dict[str, object]:
    instances = list(store.query("SELECT * FROM instances").iter_rows(named=True))
    (members,) = replicas(instances, [row["instance"] or ""])
    beside = _beside(store, members, row)
    keys = beside["request_key"].to_list()
    arrival, finished = int(row["arrival_unix_ns"]), int(row["finished_unix_ns"])
    # Whole lives of those beside it, so that what each lost can be divided among all that took it.
    low = max(min([arrival, *beside["arrival_unix_ns"].to_list()]), arrival - LOOK_NS)
    high = min(max([finished, *beside["finished_unix_ns"].to_list()]), finished + LOOK_NS) + 1
    if _count(store, members, low, high) > MOST_ROWS:
        low, high = arrival, finished + 1
    targets = [row["request_key"], *keys]
    context = context_of(store, instances, members, targets, Window(low, high), high + LOOK_NS)
    return told(sight_of(context, rulebook), row)


def _beside(store: Reader, members: list[str], row: Mapping[str, Any]) -> pl.DataFrame:
    """Others of the replica that lost time to anyone and were there between its arrival and its first token."""
    first = row["first_token_unix_ns"] or row["finished_unix_ns"]
    return store.query(
        f'SELECT "request_key", "arrival_unix_ns", "finished_unix_ns" FROM "requests" WHERE "finished_unix_ns" > ? AND '
        f'"finished_unix_ns" < ? AND "arrival_unix_ns" < ? AND coalesce("instance", \'\') IN ({", ".join("?" for _ in members)}) '
        f'AND {LOST} AND "request_key" <> ? ORDER BY "finished_unix_ns", "request_key" LIMIT ?',
        (row["arrival_unix_ns"], first + LOOK_NS, first, *members, row["request_key"], MOST_ROWS),
    )


def _count(store: Reader, members: list[str], low: int, high: int) -> int:
    found = store.query(
        'SELECT count(*) AS n FROM "requests" WHERE "finished_unix_ns" >= ? AND "finished_unix_ns" < ? AND "arrival_unix_ns" < ? '
        f"AND coalesce(\"instance\", '') IN ({', '.join('?' for _ in members)})",
        (low, high + LOOK_NS, high, *members),
    )
    return int(found["n"][0])


def told(sight: Sight | None, row: Mapping[str, Any]) -> dict[str, object]:
    """Of a sight whose targets are the request and those beside it: pure."""
    key = str(row["request_key"])
    booked_ns = 0 if row[COLUMN] is None else round(max(float(row[COLUMN]), 0.0) * 1e9)
    answer: dict[str, object] = {"request_key": key, "interference_s": booked_ns / 1e9}
    if sight is None:
        return answer | _lost([], booked_ns) | {"took": _took([])}
    frame = pl.DataFrame([sight.rows.series(name) for name in ("request_key", *_TOLD)])
    place = frame["request_key"].index_of(key)
    target = np.arange(len(frame)) if sight.rows.target is None else sight.rows.target
    own = np.flatnonzero(target == place)
    lost = _divided(sight, int(own[0])) if len(own) else []
    return answer | _lost(_named(frame, lost), booked_ns) | {"took": _took(_named(frame, _taken(sight, target, place)))}


_Entry = tuple[int, int, int]  # row, nanoseconds that steps tell, nanoseconds that an overlap does


def _divided(sight: Sight, target: int) -> list[_Entry]:
    """What each other request took of one target, in whole nanoseconds."""
    rows = np.zeros(0, dtype=np.int64)
    seconds, measured = np.zeros(0), np.zeros(0, dtype=np.bool_)
    for row, took, by_steps in sight.takers(target):
        rows, seconds, measured = np.append(rows, row), np.append(seconds, took), np.append(measured, by_steps)
    who, place = np.unique(rows, return_inverse=True)
    columns = np.bincount(place * 2 + ~measured, weights=seconds, minlength=2 * len(who)).astype(np.float64)
    ns = divided_ns(sight.booked_ns[target : target + 1], columns[None])[0]
    return [(int(row), int(ns[2 * k]), int(ns[2 * k + 1])) for k, row in enumerate(who.tolist())]


def _taken(sight: Sight, target: Ints, place: int | None) -> list[_Entry]:
    """What the request at this place took of each target: its own column beside that of all others."""
    if place is None:
        return []
    column_of = np.ones(len(sight.rows), dtype=np.int64)
    column_of[place] = 0
    ns = divided_ns(sight.booked_ns, sight.seconds(column_of, 2))
    return [(int(target[k]), int(ns[k, 0]), int(ns[k, 1])) for k in np.flatnonzero(ns[:, :2].any(axis=1)).tolist()]


def _named(frame: pl.DataFrame, entries: Iterable[_Entry]) -> list[tuple[dict[str, Any], int, int]]:
    """With whose they are, the largest first."""
    found = [(frame.row(row, named=True), steps, overlap) for row, steps, overlap in entries if steps + overlap > 0]
    return sorted(found, key=lambda one: (-one[1] - one[2], one[0]["request_key"]))


def _lost(named: list[tuple[dict[str, Any], int, int]], booked_ns: int) -> dict[str, object]:
    measured, inferred = sum(one for _, one, _ in named), sum(one for _, _, one in named)
    return {
        "provenance": provenance(measured, inferred),
        "measured_s": measured / 1e9,
        "inferred_s": inferred / 1e9,
        "unnamed_s": (booked_ns - measured - inferred) / 1e9,
        "culprits": _listed(named, booked_ns),
        "culprits_left_out": _rest(named),
    }


def _took(named: list[tuple[dict[str, Any], int, int]]) -> dict[str, object]:
    measured, inferred = sum(one for _, one, _ in named), sum(one for _, _, one in named)
    return {
        "took_s": (measured + inferred) / 1e9,
        "provenance": provenance(measured, inferred),
        "victims_count": len(named),
        "victims": _listed(named, measured + inferred),
        "victims_left_out": _rest(named),
    }


def _listed(named: list[tuple[dict[str, Any], int, int]], whole_ns: int) -> list[dict[str, object]]:
    return [
        {
            **who,
            "took_s": (steps + overlap) / 1e9,
            "share": share_of(steps + overlap, whole_ns),
            "provenance": provenance(steps, overlap),
        }
        for who, steps, overlap in named[:MOST_NAMED]
    ]


def _rest(named: list[tuple[dict[str, Any], int, int]]) -> dict[str, object]:
    rest = named[MOST_NAMED:]
    return {"requests": len(rest), "took_s": sum(steps + overlap for _, steps, overlap in rest) / 1e9}
