"""The interference ledger: whose prompts took how much of whose time.

What a request lost is what attribution booked to `interference`. It is divided among the requests whose prompts ran meanwhile: by the steps
of the engine, which say whose they were (`measured`), else by the overlap of times (`inferred`). What neither covers is unnamed. For each
request culprits and unnamed add up to what is booked to it, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from phasewise.analyzer.blame import divided_ns
from phasewise.analyzer.filters import rows_in
from phasewise.analyzer.interference_reading import LOST, Stretch, contexts, stretches
from phasewise.analyzer.interference_sights import COLUMN, Sight, sight_of
from phasewise.analyzer.replicas import Reader
from phasewise.analyzer.step_table import Ints
from phasewise.analyzer.window import Filter, Window
from phasewise.rules.load import Rulebook

MOST_CULPRITS, MOST_GROUPS, MOST_PAIRS = 10, 20, 40  # named one by one; the others together
_TOLD = ("request_id", "tenant", "route", "input_tokens", "cached_tokens", "prefill_s")
Group = tuple[str | None, str | None]  # tenant and route


def window_ledger(
    store: Reader,
    rulebook: Rulebook,
    window: Window,
    filters: Sequence[Filter] = (),
    *,
    most_rows: int | None = None,
) -> dict[str, object]:
    """Of the requests that ended in a window (and pass the filters) what they lost, by whose prompts took it.

    Of a window with more than most_rows requests (None: MOST_ROWS) some stretches are divided: `read` says how much of its interference
    they hold.
    """
    rows = rows_in(window, filters)
    told = store.query(
        f"SELECT count(*) AS n, count(*) FILTER ({LOST}) AS victims, "
        f'coalesce(sum(TRY_CAST("{COLUMN}" * 1e9 AS BIGINT)) FILTER ({LOST}), 0)::BIGINT AS lost '
        f'FROM "requests" WHERE {rows.sql}',
        rows.parameters,
    ).row(0, named=True)
    found = stretches(store, window, most_rows) if told["victims"] else []
    ledger = _ledger(store, rulebook, found, filters)
    return {
        "window": {"from_unix_ns": window.from_unix_ns, "to_unix_ns": window.to_unix_ns},
        "requests": told["n"],
        "victims": told["victims"],
        "interference_s": told["lost"] / 1e9,
        **ledger.json(whole=len(found) <= 1),
    }


@dataclass(slots=True)
class Ledger:
    """Added up over replicas and stretches, in whole nanoseconds. culprits: of the largest takers, label, what they took, of how many."""

    lost_ns: int = 0
    victims: int = 0
    measured_ns: int = 0
    inferred_ns: int = 0
    takers: int = 0
    groups_beside: int = 0
    pairs: dict[tuple[Group | None, Group], tuple[int, int, int]] = field(
        default_factory=dict
    )  # took, measured, victims
    culprits: list[dict[str, object]] = field(default_factory=list)

    def json(self, *, whole: bool) -> dict[str, object]:
        ordered = sorted(self.pairs.items(), key=lambda item: (-item[1][0], _sorted(item[0][0]), _sorted(item[0][1])))
        shown, rest = ordered[:MOST_PAIRS], ordered[MOST_PAIRS:]
        return {
            "read": None if whole else {"victims": self.victims, "interference_s": self.lost_ns / 1e9},
            "provenance": provenance(self.measured_ns, self.inferred_ns),
            "measured_s": self.measured_ns / 1e9,
            "inferred_s": self.inferred_ns / 1e9,
            "unnamed_s": (self.lost_ns - self.measured_ns - self.inferred_ns) / 1e9,
            "pairs": [
                {
                    "culprit": _group(culprit, self.groups_beside),
                    "victim": _group(victim),
                    "took_s": took / 1e9,
                    "share": share_of(took, self.lost_ns),
                    "victims": victims,
                    "provenance": provenance(measured, took - measured),
                }
                for (culprit, victim), (took, measured, victims) in shown
            ],
            "pairs_left_out": {"pairs": len(rest), "took_s": sum(took for _, (took, _, _) in rest) / 1e9},
            "culprits": self.culprits,
            "culprits_count": self.takers,
        }


def provenance(measured_ns: int, inferred_ns: int) -> str | None:
    """How it is known who took some time; None where nobody is named."""
    names = [name for name, ns in (("measured", measured_ns), ("inferred", inferred_ns)) if ns > 0]
    return "mixed" if len(names) > 1 else names[0] if names else None


def share_of(part_ns: int, whole_ns: int) -> float | None:
    return round(part_ns / whole_ns, 6) if whole_ns > 0 else None


def _group(group: Group | None, beside: int = 0) -> dict[str, object]:
    """others: how many further groups stand together."""
    tenant, route = group or (None, None)
    return {"tenant": tenant, "route": route, **({"others": beside} if group is None else {})}


def _sorted(group: Group | None) -> tuple[bool, tuple[bool, str], tuple[bool, str]]:
    tenant, route = group or (None, None)
    return group is None, (tenant is None, tenant or ""), (route is None, route or "")


def _ledger(store: Reader, rulebook: Rulebook, found: Sequence[Stretch], filters: Sequence[Filter]) -> Ledger:
    sights = [
        sight
        for stretch in found
        for context in contexts(store, stretch, filters)
        if (sight := sight_of(context, rulebook)) is not None
    ]
    return ledger_of(sights)


def ledger_of(sights: Sequence[Sight]) -> Ledger:
    """The ledger of some replicas' requests, the largest takers named: pure."""
    ledger = Ledger()
    taken = _taken(sights)
    top = taken.head(MOST_CULPRITS)
    groups = (
        taken.group_by("tenant", "route")
        .agg(pl.col("took_ns").sum())
        .sort("took_ns", "tenant", "route", descending=[True, False, False], nulls_last=True)
    )
    named: list[Group] = list(groups.select("tenant", "route").head(MOST_GROUPS).iter_rows())
    ledger.takers, ledger.groups_beside = len(taken), max(len(groups) - MOST_GROUPS, 0)
    keys = top["request_key"].to_list()
    took, measured, hit = (np.zeros(len(keys), dtype=np.int64) for _ in range(3))
    group_of = [*(_place(named, group) for group in top.select("tenant", "route").iter_rows()), *range(len(named) + 1)]
    for sight in sights:
        frame = _told(sight)
        columns = _columns(frame, keys, named)
        ns = divided_ns(sight.booked_ns, sight.seconds(columns, len(group_of)))
        by_steps, by_overlap = ns[:, 0:-1:2], ns[:, 1:-1:2]
        both = by_steps + by_overlap
        ledger.lost_ns += int(sight.booked_ns.sum())
        ledger.victims += int((sight.booked_ns > 0).sum())
        ledger.measured_ns += int(by_steps.sum())
        ledger.inferred_ns += int(by_overlap.sum())
        own = both[:, : len(keys)]
        took += own.sum(axis=0)
        measured += by_steps[:, : len(keys)].sum(axis=0)
        hit += (own > 0).sum(axis=0)
        _add_pairs(ledger, sight, frame, named, np.array(group_of), both, by_steps)
    ledger.culprits = [
        _culprit(row, int(took[k]), int(measured[k]), int(hit[k]), ledger.lost_ns)
        for k, row in enumerate(top.iter_rows(named=True))
    ]
    return ledger


def _culprit(row: Mapping[str, object], took: int, measured: int, victims: int, lost: int) -> dict[str, object]:
    return {
        "request_key": row["request_key"],
        **{name: row[name] for name in _TOLD},
        "took_s": took / 1e9,
        "share": share_of(took, lost),
        "victims": victims,
        "provenance": provenance(measured, took - measured),
    }


def _told(sight: Sight) -> pl.DataFrame:
    """Whose each row is, in order."""
    return pl.DataFrame([sight.rows.series(name) for name in ("request_key", *_TOLD)])


def _taken(sights: Iterable[Sight]) -> pl.DataFrame:
    """Requests whose prompts took time of any target, those that took most first."""
    found = [_told(sight).with_columns(took_ns=pl.Series(sight.taken_ns())) for sight in sights]
    if not found:
        return pl.DataFrame(schema={"request_key": pl.String, **dict.fromkeys(_TOLD, pl.String), "took_ns": pl.Int64})
    some = pl.concat(found).filter(pl.col("took_ns") > 0)
    added = some.group_by("request_key").agg(pl.col(_TOLD).first(), pl.col("took_ns").sum())
    return added.sort("took_ns", "request_key", descending=[True, False])


def _place(named: Sequence[Group], group: Group) -> int:
    """Of a group among those that are named; the last place is that of all others."""
    return named.index(group) if group in named else len(named)


def _columns(frame: pl.DataFrame, keys: Sequence[str], named: Sequence[Group]) -> Ints:
    """Column of each row: its own among the largest takers, else that of its group, else that of all others."""
    own = pl.DataFrame({"request_key": pl.Series(keys, dtype=pl.String), "own": np.arange(len(keys))})
    groups = pl.DataFrame(
        {
            "tenant": pl.Series([tenant for tenant, _ in named], dtype=pl.String),
            "route": pl.Series([route for _, route in named], dtype=pl.String),
            "group": np.arange(len(named)) + len(keys),
        }
    )
    placed = frame.select("request_key", "tenant", "route").join(
        own, on="request_key", how="left", maintain_order="left"
    )
    placed = placed.join(groups, on=["tenant", "route"], how="left", nulls_equal=True, maintain_order="left")
    last = len(keys) + len(named)
    return placed.select(pl.coalesce("own", "group", pl.lit(last)).cast(pl.Int64)).to_series().to_numpy()


def _add_pairs(
    ledger: Ledger, sight: Sight, frame: pl.DataFrame, named: Sequence[Group], group_of: Ints, both: Ints, steps: Ints
) -> None:
    """both, steps: [targets, columns] nanoseconds, all and what steps tell; group_of: which group each column belongs to."""
    target = np.arange(len(sight.rows)) if sight.rows.target is None else sight.rows.target
    victims = frame.select("tenant", "route")[target].with_row_index("place")
    for (tenant, route), own in victims.group_by("tenant", "route", maintain_order=True):
        place = own["place"].to_numpy()
        for group in range(len(named) + 1):
            columns = np.flatnonzero(group_of == group)
            took = both[np.ix_(place, columns)].sum(axis=1)
            if not took.any():
                continue
            key = (named[group] if group < len(named) else None, (tenant, route))
            before = ledger.pairs.get(key, (0, 0, 0))
            new = (int(took.sum()), int(steps[np.ix_(place, columns)].sum()), int((took > 0).sum()))
            ledger.pairs[key] = (before[0] + new[0], before[1] + new[1], before[2] + new[2])
