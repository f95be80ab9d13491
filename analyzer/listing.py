"""Requests one by one: a page of a sorted list that stays stable while rows arrive, and the neighbours of a request."""

from __future__ import annotations

import base64
import binascii
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from phasewise.analyzer.filters import Condition
from phasewise.rules.errors import InputError
from phasewise.rules.vocabulary import CAUSE_COLUMNS

if TYPE_CHECKING:
    from phasewise.analyzer.replicas import Reader

MOST_ROWS = 1_000
SORT_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "finished": "finished_unix_ns",
        "arrival": "arrival_unix_ns",
        "e2e": "e2e_s",
        "ttft": "ttft_s",
        "tpot": "tpot_s",
        "itl": "itl_p95_s",
        "longest_gap": "longest_gap_s",
        "queue": "queue_s",
        "prefill": "prefill_s",
        "decode": "decode_s",
        "input_tokens": "input_tokens",
        "cached_tokens": "cached_tokens",
        "output_tokens": "output_tokens",
        "preemptions": "preemptions",
        "concurrency": "concurrency_at_arrival",
    }
)
LIST_COLUMNS = (
    "request_key",
    "trace_id",
    "request_id",
    "model",
    "engine",
    "instance",
    "tenant",
    "route",
    "dataset",
    "arrival_unix_ns",
    "finished_unix_ns",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "e2e_s",
    "ttft_s",
    "tpot_s",
    "itl_p95_s",
    "longest_gap_s",
    "queue_s",
    "context_s",
    "prefill_s",
    "combined_s",
    "combined_covers",
    "first_token_s",
    "decode_s",
    "external_s",
    "residual_s",
    "concurrency_at_arrival",
    "preemptions",
    "outcome",
    "finish_reason",
    "primary_class",
    "cause",
    "margin_ratio",
    "final",
)


@dataclass(frozen=True, slots=True)
class Order:
    """key: one of SORT_KEYS. Unknown values come last whichever way."""

    key: str = "finished"
    descending: bool = True

    @property
    def text(self) -> str:
        return f"{self.key}:{'desc' if self.descending else 'asc'}"


def parse_order(text: str | None) -> Order:
    """`key:desc` or `key:asc`; without a direction the largest come first."""
    if not text:
        return Order()
    key, _, direction = text.partition(":")
    if key not in SORT_KEYS:
        close = difflib.get_close_matches(key, SORT_KEYS, n=1)
        raise InputError(
            "sort",
            key,
            "is not a key to sort by",
            f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(SORT_KEYS)}",
        )
    if direction not in ("", "asc", "desc"):
        raise InputError("sort", key, f"unknown direction {direction!r}", "write asc or desc")
    return Order(key, direction != "asc")


@dataclass(frozen=True, slots=True)
class RequestPage:
    """next_cursor: where the following page starts, None after the last row."""

    rows: pl.DataFrame
    next_cursor: str | None


def _cursor(order: Order, row: Mapping[str, object]) -> str:
    text = json.dumps([order.text, row[SORT_KEYS[order.key]], row["request_key"]])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _after(order: Order, cursor: str) -> Condition:
    try:
        told, value, key = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error):
        raise InputError("cursor", cursor[:40], "is not a cursor of this list", "start without one") from None
    if told != order.text or not isinstance(key, str) or isinstance(value, (str, list, dict)):
        raise InputError("cursor", cursor[:40], f"belongs to another order than {order.text}", "start without one")
    column = f'"{SORT_KEYS[order.key]}"'
    if value is None:
        return Condition(f'({column} IS NULL AND "request_key" > ?)', (key,))
    sign = "<" if order.descending else ">"
    return Condition(
        f'({column} {sign} ? OR ({column} = ? AND "request_key" > ?) OR {column} IS NULL)', (value, value, key)
    )


def request_page(
    store: Reader, rows: Condition, order: Order, *, cursor: str | None = None, limit: int = 100
) -> RequestPage:
    """One page. A cursor names the last row seen, so rows that arrive in between move nothing."""
    if not 1 <= limit <= MOST_ROWS:
        raise InputError("limit", str(limit), "is out of range", f"between 1 and {MOST_ROWS}")
    after = _after(order, cursor) if cursor else Condition("TRUE", ())
    column = SORT_KEYS[order.key]
    names = ", ".join(f'"{name}"' for name in (*LIST_COLUMNS, *CAUSE_COLUMNS))
    statement = (
        f'SELECT {names} FROM "requests" WHERE {rows.sql} AND {after.sql} '
        f'ORDER BY "{column}" {"DESC" if order.descending else "ASC"} NULLS LAST, "request_key" LIMIT ?'
    )
    found = store.query(statement, (*rows.parameters, *after.parameters, limit + 1))
    if found.height <= limit:
        return RequestPage(found, None)
    kept = found.head(limit)
    return RequestPage(kept, _cursor(order, kept.row(limit - 1, named=True)))


def count_requests(store: Reader, rows: Condition) -> int:
    """How many rows a list has."""
    return int(store.query(f'SELECT count(*) AS n FROM "requests" WHERE {rows.sql}', rows.parameters)["n"][0])


def find_requests(store: Reader, identifier: str, limit: int | None = 50) -> pl.DataFrame:
    """Rows by row key, trace id, gen_ai.request.id or the client's request id, oldest first; without columns where there is none.

    Whoever waits for a request asks again and again, of a store that is busy taking it in. So the names alone are looked at first:
    a SELECT of all columns reads each of over a hundred for every row that it has to test. And each name by itself: what a file
    says of one column lets most files be passed over, and says nothing of several columns joined by OR.
    """
    names = ("request_key", "trace_id", "request_id", "client_request_id")
    told = '"request_key", "finished_unix_ns", "arrival_unix_ns"'
    parts = " UNION ".join(f'SELECT {told} FROM "requests" WHERE "{name}" = ?' for name in names)
    order = 'ORDER BY "arrival_unix_ns", "request_key"'
    keys = store.query(
        f'SELECT "request_key", "finished_unix_ns" FROM ({parts}) {order}{"" if limit is None else " LIMIT ?"}',
        (*([identifier] * len(names)), *(() if limit is None else (limit,))),
    )
    if keys.is_empty():
        return pl.DataFrame()
    named = f'"request_key" IN ({", ".join("?" for _ in range(keys.height))})'
    ended = (keys["finished_unix_ns"].min(), keys["finished_unix_ns"].max())
    found = store.query(
        f'SELECT * FROM "requests" WHERE "finished_unix_ns" BETWEEN ? AND ? AND {named} {order}',
        (*ended, *keys["request_key"]),
    )
    if found.height == keys.height:
        return found
    # One of them was written anew in between, with another end.
    return store.query(f'SELECT * FROM "requests" WHERE {named} {order}', tuple(keys["request_key"]))


def neighbours(store: Reader, row: Mapping[str, object], limit: int = 40) -> pl.DataFrame:
    """Requests of the same instance whose prefill overlapped this one's time in the engine, longest prefill first.

    Where an engine does not mark the first scheduling, prefill is taken to end at the first token.
    """
    scheduled = 'coalesce("scheduled_unix_ns", "first_token_unix_ns" - ("prefill_s" * 1e9)::BIGINT)'
    prefilled = f'({scheduled} + ("prefill_s" * 1e9)::BIGINT)'
    statement = (
        f'SELECT "request_key", "trace_id", "input_tokens", "prefill_s", {scheduled} AS "prefill_from_unix_ns", '
        f'{prefilled} AS "prefill_to_unix_ns" FROM "requests" WHERE "instance" IS NOT DISTINCT FROM ? '
        f'AND "request_key" <> ? AND "arrival_unix_ns" < ? AND "finished_unix_ns" > ? AND {scheduled} < ? AND {prefilled} > ? '
        'ORDER BY "prefill_s" DESC, "request_key" LIMIT ?'
    )
    start, end = row["arrival_unix_ns"], row["finished_unix_ns"]
    return store.query(statement, (row["instance"], row["request_key"], end, start, end, start, limit))


def distinct_values(store: Reader, names: Sequence[str], limit: int = 200) -> dict[str, list[str]]:
    """The values seen in a few text columns, for suggestions while typing."""
    allowed = [name for name in names if name in ("model", "instance", "engine", "tenant", "route", "cause", "dataset")]
    found = {}
    for name in allowed:
        statement = (
            f'SELECT "{name}" AS v, count(*) AS n FROM "requests" WHERE "{name}" IS NOT NULL GROUP BY ALL '
            "ORDER BY n DESC, v LIMIT ?"
        )
        found[name] = store.query(statement, (limit,))["v"].to_list()
    return found
