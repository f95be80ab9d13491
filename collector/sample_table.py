"""Rows of `engine_samples`: each reading of an instance once; and the counters that tell which scrape is which replica."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from phasewise.collector.fingerprints import Counters, Ends, Fit, Floats, fit, together
from phasewise.collector.joins import Deviation
from phasewise.collector.lake import HOUR_NS
from phasewise.collector.transaction import Transaction

MINUTE_NS = 60 * 10**9


def add_samples(transaction: Transaction, samples: pl.DataFrame) -> pl.DataFrame:
    """Insert the samples that are not there yet (instance, time); returns them."""
    if samples.is_empty():
        return samples
    once = samples.unique(["instance", "unix_ns"], keep="first", maintain_order=True)
    low, high = once["unix_ns"].min(), once["unix_ns"].max()
    known = transaction.query(
        "SELECT DISTINCT instance, unix_ns FROM engine_samples s SEMI JOIN new_samples n USING (instance, unix_ns) "
        "WHERE s.unix_ns BETWEEN ? AND ?",
        [low, high],
        new_samples=once.select("instance", "unix_ns"),
    )
    new = once.join(known, on=["instance", "unix_ns"], how="anti", maintain_order="left")
    transaction.insert("engine_samples", new)
    return new


def deviations(transaction: Transaction) -> Deviation:
    """How far a scrape's finished counter runs from the spans of some instances together; each is read once."""
    known: dict[tuple[tuple[str, ...], str, int, int], Fit | None] = {}
    finished: dict[tuple[str, int, int], Ends] = {}
    counts: dict[tuple[str, int, int], Counters] = {}

    def of_spans(instance: str, low: int, high: int) -> Ends:
        if (instance, low, high) not in finished:
            transaction.look_back("requests", within=(low, high))  # a join rests on sealed hours as well
            stored = transaction.query(
                "SELECT finished_unix_ns, e2e_s FROM whole.requests WHERE instance = ? AND outcome = 'ok' "
                "AND finished_unix_ns BETWEEN ? AND ? ORDER BY finished_unix_ns",
                [instance, low, high],
            )
            finished[instance, low, high] = Ends(stored["finished_unix_ns"].to_numpy(), _floats(stored["e2e_s"]))
        return finished[instance, low, high]

    def of_scrape(instance: str, low: int, high: int) -> Counters:
        if (instance, low, high) not in counts:
            transaction.look_back("engine_samples", within=(low, high))
            rows = transaction.query(
                "SELECT unix_ns, finished, e2e_sum_s FROM whole.engine_samples WHERE instance = ? AND finished IS NOT NULL "
                "AND unix_ns BETWEEN ? AND ? ORDER BY unix_ns",
                [instance, low, high],
            )
            counts[instance, low, high] = Counters(
                rows["unix_ns"].to_numpy(), _floats(rows["finished"]), _floats(rows["e2e_sum_s"])
            )
        return counts[instance, low, high]

    def deviation(spans: tuple[str, ...], scrape: str, from_unix_ns: int, to_unix_ns: int) -> Fit | None:
        # Whole minutes, so that pairs of nearly the same time share what is read.
        key = (spans, scrape, from_unix_ns // MINUTE_NS * MINUTE_NS, -(-to_unix_ns // MINUTE_NS) * MINUTE_NS)
        if key not in known:
            low, high = key[2:]
            ends = together([of_spans(name, low, high) for name in spans])
            known[key] = fit(of_scrape(scrape, low, high), ends)
        return known[key]

    return deviation


def _floats(values: pl.Series) -> Floats:
    """NaN where unknown."""
    return values.cast(pl.Float64).fill_null(float("nan")).to_numpy()


def hours_marked_otherwise(transaction: Transaction, instance: str, joined: bool, low: int, high: int) -> set[int]:
    """Hours (whole ones since 1970) of that time with samples of an instance that are marked otherwise than `joined`, sealed ones too."""
    transaction.look_back("engine_samples", within=(low, high))
    found = transaction.query(
        f"SELECT DISTINCT unix_ns // {HOUR_NS} AS hour FROM whole.engine_samples WHERE instance = ? AND joined != ? "
        "AND unix_ns BETWEEN ? AND ?",
        [instance, joined, low, high],
    )
    return set(found["hour"].to_list())


def mark_joined(transaction: Transaction, joined: Mapping[str, bool]) -> None:
    """Note on hot samples whether their instance is known."""
    for instance, value in joined.items():
        transaction.execute(
            "UPDATE engine_samples SET joined = ? WHERE instance = ? AND joined != ?", [value, instance, value]
        )
