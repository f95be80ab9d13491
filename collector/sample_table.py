"""Rows of `engine_samples`: each reading of an instance once; and the counters that tell which scrape is which replica."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import polars as pl

from phasewise.collector.joins import Deviation, counter_deviation
from phasewise.collector.store import Transaction


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


def deviations(transaction: Transaction, fresh: Callable[[str], pl.DataFrame]) -> Deviation:
    """How far a scrape's finished counter runs from the spans of some instances together; each is read once.

    fresh: rows of an instance that are not in the store yet.
    """
    known: dict[tuple[tuple[str, ...], str, int, int], float | None] = {}
    finished: dict[str, list[int]] = {}
    counts: dict[str, list[tuple[int, float]]] = {}

    def of_spans(instance: str) -> list[int]:
        if instance not in finished:
            stored = transaction.query(
                "SELECT request_key, finished_unix_ns FROM requests WHERE instance = ? AND outcome = 'ok'", [instance]
            )
            own = fresh(instance).select("request_key", "finished_unix_ns")
            both = pl.concat([stored, own]).unique("request_key")
            finished[instance] = both["finished_unix_ns"].sort().to_list()
        return finished[instance]

    def of_scrape(instance: str) -> list[tuple[int, float]]:
        if instance not in counts:
            rows = transaction.query(
                "SELECT unix_ns, finished FROM engine_samples WHERE instance = ? AND finished IS NOT NULL ORDER BY unix_ns",
                [instance],
            )
            counts[instance] = list(rows.iter_rows())
        return counts[instance]

    def deviation(spans: tuple[str, ...], scrape: str, from_unix_ns: int, to_unix_ns: int) -> float | None:
        key = (spans, scrape, from_unix_ns, to_unix_ns)
        if key not in known:
            inside = [point for point in of_scrape(scrape) if from_unix_ns <= point[0] <= to_unix_ns]
            ends = heapq.merge(*(of_spans(name) for name in spans))
            known[key] = counter_deviation(inside, list(ends))
        return known[key]

    return deviation


def mark_joined(transaction: Transaction, joined: Mapping[str, bool]) -> None:
    """Note on stored samples whether their instance is known."""
    for instance, value in joined.items():
        transaction.execute(
            "UPDATE engine_samples SET joined = ? WHERE instance = ? AND joined != ?", [value, instance, value]
        )
