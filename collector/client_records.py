"""A client's own records (benchmark tools, instrumented SDKs) against the rows of the calls they saw.

In this order, each record and each row once: the same trace; the same identifier; the request number in a `bench` identifier; the
same token counts inside the record's own time (marked inferred). Records that saw no known call become rows themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from phasewise.collector.attribution import typed
from phasewise.collector.completion import CLIENT_COLUMNS, NEAR_NS, Identifiers, filled
from phasewise.collector.requests import FULL_SCHEMA
from phasewise.collector.transaction import Transaction

RELATIVE = "relative_time"  # quality flag of records whose file holds no absolute times
BENCH_ID = r"bench-([0-9a-zA-Z]+)-(\d+)(?:-0)?$"
SLACK_NS = 250_000_000  # the engine's interval may stick out of the client's by that much: two clocks, two ends
END_SPREAD_NS = 10**9
LEAST_RATIO = 0.9  # of a file's records that must fit before relative times are trusted
PAIRS_LIMIT = 2_000_000


@dataclass(frozen=True, slots=True)
class Matched:
    """completed: whole rows that a record completed; added: records that are rows of their own; by: how many matched how."""

    completed: pl.DataFrame
    added: pl.DataFrame
    by: dict[str, int]


def match_records(transaction: Transaction, identifiers: Identifiers, records: pl.DataFrame) -> Matched:
    """records: rows of `requests` made by an importer, with entry_e2e_s and client_request_id (or trace_id) set."""
    rows = _candidates(transaction, records)
    found = pl.DataFrame(schema={"request_key": pl.String, "other": pl.String})
    by: dict[str, int] = {}
    ways = (
        ("trace", _by_trace),
        ("identifier", identifiers.pairs),
        ("bench_index", _by_bench_index),
        ("time_and_lengths", _by_time),
    )
    for way, pair in ways:
        free_rows = rows.join(found.select("request_key"), on="request_key", how="anti")
        free = records.join(found.select(pl.col("other").alias("request_key")), on="request_key", how="anti")
        if free_rows.is_empty() or free.is_empty():
            break
        new = pair(free_rows, free)
        if not new.is_empty():
            by[way] = new.height
            found = pl.concat([found, new.select("request_key", "other")])
    seen = rows.join(found, on="request_key", how="semi")
    completed = _noted(filled(seen, records, found, CLIENT_COLUMNS))
    added = records.join(found.select(pl.col("other").alias("request_key")), on="request_key", how="anti")
    return Matched(completed, _new_only(transaction, added), by)


def _candidates(transaction: Transaction, records: pl.DataFrame) -> pl.DataFrame:
    """Rows of calls, near the records in time where these say when they were made."""
    transaction.look_back("requests")
    select = "SELECT * FROM whole.requests WHERE coalesce(source, '') NOT LIKE 'import:%'"
    if records["quality"].fill_null("").str.contains(RELATIVE, literal=True).any():
        return typed(transaction.query(select))
    window = [records["arrival_unix_ns"].min(), records["finished_unix_ns"].max()]
    low, high = int(str(window[0])) - NEAR_NS, int(str(window[1])) + NEAR_NS
    return typed(transaction.query(f"{select} AND finished_unix_ns BETWEEN ? AND ?", [low, high]))


def _by_trace(rows: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    pairs = rows.select("request_key", "trace_id").join(
        records.select(pl.col("request_key").alias("other"), "trace_id"), on="trace_id", how="inner"
    )
    return _one_to_one(pairs)


def _one_to_one(pairs: pl.DataFrame) -> pl.DataFrame:
    sole = (pl.len().over("request_key") == 1) & (pl.len().over("other") == 1)
    return pairs.filter(sole).select("request_key", "other")


def _by_bench_index(rows: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """`vllm bench` names request i of a run `bench-<run>-<i>`; its records hold i. The run is the one that fits best."""
    numbered = records.select(
        pl.col("request_key").alias("other"),
        pl.col("client_request_id").str.extract(r"^bench-index-(\d+)$").cast(pl.Int64).alias("_index"),
        pl.col("output_tokens").alias("_tokens"),
        pl.col("entry_e2e_s").alias("_entry_s"),
    ).filter(pl.col("_index").is_not_null())
    if numbered.is_empty():
        return numbered.select(pl.col("other").alias("request_key"), "other")
    named = rows.select(
        "request_key",
        "output_tokens",
        "e2e_s",
        pl.col("request_id").str.extract(BENCH_ID, 1).alias("_run"),
        pl.col("request_id").str.extract(BENCH_ID, 2).cast(pl.Int64).alias("_index"),
    ).filter(pl.col("_run").is_not_null())
    pairs = named.join(numbered, on="_index", how="inner").filter(pl.col("output_tokens") == pl.col("_tokens"))
    runs = pairs.group_by("_run").agg(
        pl.len().alias("matches"), (pl.col("_entry_s") - pl.col("e2e_s")).abs().mean().alias("off_s")
    )
    best = runs.filter(pl.col("matches") >= LEAST_RATIO * numbered.height).sort("off_s", "_run").head(1)
    return _one_to_one(pairs.join(best, on="_run", how="semi"))


def _by_time(rows: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """The row with the record's token counts whose interval lies inside the record's; nearest ends first, each once."""
    untold = rows.filter(pl.col("entry_ttft_s").is_null() & pl.col("client_gaps").is_null())
    shift_ns = _shift_ns(untold, records)
    if shift_ns is None:
        shift_ns = _shift_ns(rows, records)
    if shift_ns is None:
        return rows.select("request_key", pl.col("request_key").alias("other")).clear()
    told = records.filter(pl.col("output_tokens").is_not_null() & pl.col("input_tokens").is_not_null()).select(
        pl.col("request_key").alias("other"),
        "input_tokens",
        "output_tokens",
        (pl.col("arrival_unix_ns") + shift_ns).alias("_from"),
        (pl.col("finished_unix_ns") + shift_ns).alias("_to"),
        pl.col("entry_e2e_s").alias("_entry_s"),
    )
    own = rows.select(
        "request_key",
        "input_tokens",
        "output_tokens",
        "arrival_unix_ns",
        "finished_unix_ns",
        "entry_e2e_s",
        "entry_ttft_s",
    )
    if told.height * own.height > PAIRS_LIMIT:
        return rows.select("request_key", pl.col("request_key").alias("other")).clear()
    pairs = (
        own.join(told, on=["input_tokens", "output_tokens"], how="inner")
        .filter(
            (pl.col("arrival_unix_ns") >= pl.col("_from") - SLACK_NS)
            & (pl.col("finished_unix_ns") <= pl.col("_to") + SLACK_NS)
            & (
                pl.col("entry_ttft_s").is_null() | (pl.col("entry_e2e_s") == pl.col("_entry_s"))
            )  # else it has its record
        )
        .with_columns((pl.col("_to") - pl.col("finished_unix_ns")).abs().alias("_off"))
        .sort("_off", "request_key", "other")
    )
    used_rows: set[str] = set()
    used_records: set[str] = set()
    kept = []
    for key, other in pairs.select("request_key", "other").iter_rows():
        if key not in used_rows and other not in used_records:
            used_rows.add(key)
            used_records.add(other)
            kept.append((key, other))
    return pl.DataFrame(kept, schema={"request_key": pl.String, "other": pl.String}, orient="row")


def _shift_ns(rows: pl.DataFrame, records: pl.DataFrame) -> int | None:
    """What turns the records' times into Unix time: 0 where they hold it already.

    Relative times are aligned by the order of the ends, which both sides see within milliseconds; None where the files do not
    fit each other.
    """
    if not records["quality"].fill_null("").str.contains(RELATIVE, literal=True).any():
        return 0
    served = records.filter(pl.col("outcome") == "ok")
    ends, own = served["finished_unix_ns"].sort(), rows["finished_unix_ns"].sort()
    if served.is_empty() or len(ends) != len(own):
        return None
    shifts = (own - ends).sort()
    edge = int((1 - LEAST_RATIO) / 2 * len(shifts))
    if shifts[len(shifts) - 1 - edge] - shifts[edge] > END_SPREAD_NS:
        return None
    return int(shifts[len(shifts) // 2])


def _noted(rows: pl.DataFrame) -> pl.DataFrame:
    """Provenance of what the client's record gave."""
    told = (
        pl.when(pl.col("entry_ttft_s").is_not_null())
        .then(pl.lit('"entry_ttft_s":"measured:client",'))
        .otherwise(pl.lit(""))
    )
    inner = pl.col("provenance").fill_null("{}").str.strip_prefix("{")
    return rows.with_columns((pl.lit("{") + told + inner).str.replace(",}", "}", literal=True).alias("provenance"))


def _new_only(transaction: Transaction, added: pl.DataFrame) -> pl.DataFrame:
    """Importing the same file twice adds nothing."""
    if added.is_empty():
        return added.select(list(FULL_SCHEMA))
    transaction.look_back("requests")
    known = transaction.query(
        "SELECT request_key FROM whole.requests r SEMI JOIN new_rows n USING (request_key)",
        new_rows=added.select("request_key"),
    )
    return added.join(known, on="request_key", how="anti").select(list(FULL_SCHEMA))
