"""What the interference ledger reads of a store: victims, and all that ran beside them on their replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.interference_sights import COLUMN
from phasewise.analyzer.replicas import Reader, settings_of
from phasewise.analyzer.window import Filter, Window
from phasewise.collector.context import REQUEST_COLUMNS, Context
from phasewise.collector.exposition import SAMPLE_SCHEMA
from phasewise.collector.joins import peers
from phasewise.collector.requests import FULL_SCHEMA
from phasewise.collector.steps import STEP_SCHEMA

MOST_ROWS = 40_000  # requests of a window whose losses are divided; of more, those of some stretches of it
MOST_STEPS = 300_000  # the same for steps, of which long requests have many
STRETCHES = 4
LOOK_NS = 3600 * 10**9  # what ended or began farther away is not looked for
LABELS = ("request_id", "tenant", "route", "prefill_s")
_SCHEMA = {name: FULL_SCHEMA[name] for name in dict.fromkeys((*REQUEST_COLUMNS, *LABELS, COLUMN))}
_SELECT = f"SELECT {', '.join(f'r.{chr(34)}{name}{chr(34)}' for name in _SCHEMA)} FROM requests r"
_INSTANCE = "coalesce(\"instance\", '')"
LOST = f'coalesce("{COLUMN}", 0) >= 5e-10'  # a nanosecond, rounded


@dataclass(frozen=True, slots=True)
class Stretch:
    """Requests that end in the window are asked about; rows that end from low to high are looked at."""

    window: Window
    low_unix_ns: int
    high_unix_ns: int


def stretches(store: Reader, window: Window, most_rows: int | None = None) -> list[Stretch]:
    """The window, or where it holds more than `most_rows` (None: MOST_ROWS) or too many steps, the last part of each quarter of its
    requests, as they end."""
    rows = rows_in(window, served=False)
    told = store.query(
        'SELECT count(*) AS n, min("finished_unix_ns") AS first, max("finished_unix_ns") AS last FROM "requests" '
        f"WHERE {rows.sql}",
        rows.parameters,
    ).row(0, named=True)
    if not told["n"]:
        return []
    steps = store.query(
        "SELECT count(*) AS n FROM engine_steps WHERE start_unix_ns BETWEEN ? AND ?", (told["first"], told["last"])
    )["n"][0]
    ratio = min(1.0, (most_rows or MOST_ROWS) / told["n"], MOST_STEPS / max(steps, 1))
    inside = Window(int(told["first"]), int(told["last"]) + 1)
    if ratio == 1.0:
        return [Stretch(inside, inside.from_unix_ns - LOOK_NS, inside.to_unix_ns + LOOK_NS)]
    ends = [(k + 1) / STRETCHES for k in range(STRETCHES)]
    begins = [end - ratio / STRETCHES for end in ends]
    sights = [max(end - 3 * ratio / STRETCHES, 0.0) for end in ends]
    listed = ", ".join(f"{one:.9f}" for one in (*sights, *begins, *ends))
    found = store.query(
        f'SELECT unnest(quantile_disc("finished_unix_ns", [{listed}])) AS at FROM "requests" WHERE {rows.sql}',
        rows.parameters,
    )["at"].to_list()
    made = []
    for k in range(STRETCHES):
        low, start, end = found[k], found[k + STRETCHES], found[k + 2 * STRETCHES] + (k == STRETCHES - 1)
        if end > start:
            made.append(Stretch(Window(start, end), low, end + (end - start)))
    return made


def contexts(store: Reader, stretch: Stretch, filters: Sequence[Filter]) -> Iterator[Context]:
    """One a replica on which requests of the stretch lost time, in order of its name; all of them out of one reading."""
    rows = rows_in(stretch.window, filters)
    victims = store.query(
        f'SELECT "request_key", {_INSTANCE} AS "of", "arrival_unix_ns" FROM "requests" WHERE {rows.sql} AND {LOST}',
        rows.parameters,
    )
    if victims.is_empty():
        return
    instances = list(store.query("SELECT * FROM instances").iter_rows(named=True))
    first = max(int(victims["arrival_unix_ns"].min()), stretch.low_unix_ns)  # type: ignore[arg-type]
    around = _rows(store, None, Window(first, stretch.window.to_unix_ns), stretch.high_unix_ns)
    name = pl.col("instance").fill_null("")
    for members in replicas(instances, victims["of"].unique().sort().to_list()):
        own = victims.filter(pl.col("of").is_in(members))
        low = max(int(own["arrival_unix_ns"].min()), stretch.low_unix_ns)  # type: ignore[arg-type]
        near = around.filter(name.is_in(members) & (pl.col("finished_unix_ns") >= low))
        yield _context(store, instances, members, own["request_key"], Window(low, stretch.window.to_unix_ns), near)


def replicas(instances: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """The instances of each replica that any of some instances belongs to."""
    found: dict[tuple[str, ...], None] = {}
    for name in names:
        found.setdefault(tuple(peers(instances, name) if name else [name]))
    return [list(members) for members in found]


def context_of(
    store: Reader,
    instances: Sequence[Mapping[str, Any]],
    members: Sequence[str],
    targets: Collection[str],
    span: Window,
    high_unix_ns: int,
) -> Context:
    """Requests of a replica that were there in the span and ended before `high_unix_ns`, and their steps."""
    return _context(store, instances, members, targets, span, _rows(store, members, span, high_unix_ns))


def _context(
    store: Reader,
    instances: Sequence[Mapping[str, Any]],
    members: Sequence[str],
    targets: Collection[str],
    span: Window,
    rows: pl.DataFrame,
) -> Context:
    return Context(
        instance=members[0],
        requests=rows,
        samples=pl.DataFrame(schema=SAMPLE_SCHEMA),
        steps=_steps(store, members, rows, span),
        targets=targets,
        settings=settings_of([dict(row) for row in instances], list(members), span),
    )


def _rows(store: Reader, members: Sequence[str] | None, span: Window, high_unix_ns: int) -> pl.DataFrame:
    """members: instances; None: all."""
    own = "TRUE" if members is None else f"{_INSTANCE} IN ({', '.join('?' for _ in members)})"
    found = store.query(
        f'{_SELECT} WHERE "finished_unix_ns" >= ? AND "finished_unix_ns" < ? AND "arrival_unix_ns" < ? AND {own}',
        (span.from_unix_ns, high_unix_ns, span.to_unix_ns, *(members or ())),
    )
    return found.select(pl.col(name).cast(kind) for name, kind in _SCHEMA.items())


def _steps(store: Reader, members: Sequence[str], rows: pl.DataFrame, span: Window) -> pl.DataFrame:
    """All steps of these requests, or where those are many, the steps of the span."""
    nothing = pl.DataFrame(schema=STEP_SCHEMA)
    if rows["segments"].null_count() == len(rows):
        return nothing
    low = max(int(rows["arrival_unix_ns"].min()), span.from_unix_ns - LOOK_NS)  # type: ignore[arg-type]
    high = min(int(rows["finished_unix_ns"].max()), span.to_unix_ns + LOOK_NS)  # type: ignore[arg-type]
    where = f"instance IN ({', '.join('?' for _ in members)}) AND start_unix_ns BETWEEN ? AND ?"
    count = store.query(f"SELECT count(*) AS n FROM engine_steps WHERE {where}", (*members, low, high))["n"][0]
    if count > 2 * MOST_STEPS:
        low, high = span.from_unix_ns, span.to_unix_ns
    found = store.query(
        f"SELECT {', '.join(STEP_SCHEMA)} FROM engine_steps WHERE {where} ORDER BY instance, step",
        (*members, low, high),
    )
    return found.select(pl.col(name).cast(kind) for name, kind in STEP_SCHEMA.items())
