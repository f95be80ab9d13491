"""Columns for a row from someone else who saw the same call: a client's span in another trace, a plugin's supplement.

They match by identifier: gen_ai.request.id of the engine against the response id or x-request-id of the other side, API prefixes
(`chatcmpl-`) and the prompt index (`-0`) taken off. Only empty columns are filled.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import polars as pl

from phasewise.rules.engine_profile import EngineProfile

NEAR_NS = 3600 * 10**9  # an identifier used again an hour later is another call
SAME_S = 1e-6  # what an engine says twice of one time
CLIENT_COLUMNS = (
    "client_request_id", "model", "finish_reason", "input_tokens", "output_tokens", "cached_tokens", "tenant", "route",
    "entry_e2e_s", "entry_side", "entry_ttft_s", "entry_tpot_s", "client_gaps", "longest_gap_s", "itl_p95_s",
)  # fmt: skip
SUPPLEMENT_COLUMNS = (
    "model", "tenant", "route", "priority", "request_class", "input_tokens", "cached_tokens", "output_tokens",
    "queue_s", "context_s", "prefill_s", "first_token_s", "decode_s", "external_s", "queue_slot_s", "queue_kv_s",
    "queue_budget_s", "queue_window_s", "queue_policy_s", "preemptions", "drafted_tokens", "accepted_tokens",
    "longest_gap_s", "segments", "finish_reason",
)  # fmt: skip


class Identifiers:
    """How the identifiers of all engines are made comparable."""

    def __init__(self, engines: Iterable[EngineProfile]) -> None:
        known = list(engines)
        self._prefixes = sorted({prefix for e in known for prefix in e.id_prefixes}, key=len, reverse=True)
        self._suffixes = sorted({suffix for e in known for suffix in e.id_suffixes}, key=len, reverse=True)

    def bare(self, column: str) -> pl.Expr:
        """The identifier without what an API puts around it."""
        text = pl.col(column)
        stripped = reduce(lambda e, prefix: e.str.strip_prefix(prefix), self._prefixes, text)
        return reduce(lambda e, suffix: e.str.strip_suffix(suffix), self._suffixes, stripped)

    def pairs(self, rows: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
        """request_key of a row and `other` (request_key of the other side) of the same call, near in time, one to one.

        An identifier that several calls of one side share (a client that sets it itself and repeats it) matches nothing; the
        sequences of one call share it by right.
        """
        left = self._keyed(rows)
        right = self._keyed(others).rename(
            {"request_key": "other", "call_key": "_other_call", "arrival_unix_ns": "_other_at"}
        )
        found = left.join(right, on="_id", how="inner").filter(
            (pl.col("arrival_unix_ns") - pl.col("_other_at")).abs() < NEAR_NS
        )
        sole = (pl.col("call_key").n_unique().over("other") == 1) & (
            pl.col("other").n_unique().over("request_key") == 1
        )
        return found.filter(sole).select("request_key", "other").unique()

    def sequences(self, rows: pl.DataFrame, supplements: pl.DataFrame) -> pl.DataFrame:
        """Like `pairs`, `other` being a supplement. One that tells its length is of one sequence: the identifier as it stands, length
        and the engine's end-to-end time must agree, since n sequences of a call share the identifier. Several that agree even so are
        given out in any order if they say the same, and match nothing if not."""
        told = pl.col("output_tokens").is_not_null()
        left = rows.filter(told)
        right = supplements.filter(told).select(
            "request_id",
            "output_tokens",
            pl.col("request_key").alias("other"),
            pl.col("e2e_s").alias("_other_e2e_s"),
            pl.col("arrival_unix_ns").alias("_other_at"),
            pl.struct(SUPPLEMENT_COLUMNS).alias("_says"),
        )
        same = left.join(right, on=["request_id", "output_tokens"], how="inner").filter(
            (pl.col("e2e_s") - pl.col("_other_e2e_s")).abs() < SAME_S,
            (pl.col("arrival_unix_ns") - pl.col("_other_at")).abs() < NEAR_NS,
        )
        alike = same.filter(
            pl.col("other").n_unique().over("request_key") == pl.col("request_key").n_unique().over("other"),
            pl.col("_says").n_unique().over("request_key") == 1,
        )
        place, other_place = (
            pl.col(a).rank("dense").over(b) for a, b in (("other", "request_key"), ("request_key", "other"))
        )
        given = alike.filter(place == other_place).select("request_key", "other")
        return pl.concat([self.pairs(rows, supplements.filter(~told)), given]).unique()

    def _keyed(self, rows: pl.DataFrame) -> pl.DataFrame:
        shared = [
            rows.select("request_key", "call_key", "arrival_unix_ns", self.bare(column).alias("_id"))
            for column in ("request_id", "client_request_id")
        ]
        return pl.concat(shared).filter(pl.col("_id").is_not_null()).unique()


def filled(rows: pl.DataFrame, others: pl.DataFrame, pairs: pl.DataFrame, columns: Iterable[str]) -> pl.DataFrame:
    """`rows` with empty `columns` filled from the row they are paired with."""
    wanted = [name for name in columns if name in others.columns]
    if pairs.is_empty() or not wanted:
        return rows
    donors = others.select(pl.col("request_key").alias("other"), *(pl.col(n).alias(f"_other:{n}") for n in wanted))
    joined = rows.join(pairs, on="request_key", how="left", maintain_order="left").join(
        donors, on="other", how="left", maintain_order="left"
    )
    return joined.with_columns(pl.coalesce(n, f"_other:{n}").alias(n) for n in wanted).select(rows.columns)
