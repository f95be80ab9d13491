"""What `expected` of an odd payload says, each key and each word as a check of the outcome: nothing in it passes unread."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pytest
from odd_cases import Outcome, Row, Sent

from phasewise.collector.keys import span_keys
from phasewise.collector.limits import SPAN_LIMITS
from phasewise.rules.vocabulary import CAUSES, cause_column

LONGEST_S = 86_400.0
TOKENS = ("input_tokens", "output_tokens", "cached_tokens")
# Names in a case -> how a row of `requests`, with its span as stored, says it.
VALUES: dict[str, Callable[[Row, Row], Any]] = {
    "duration_ms": lambda row, _: ms(row["e2e_s"]),
    "queue_ms": lambda row, _: ms(row["queue_s"]),
    "ttft_ms": lambda row, _: ms(row["ttft_s"]),
    "tpot_ms": lambda row, _: ms(row["tpot_s"]),
    "prefill_ms": lambda row, _: ms(row["prefill_s"]),
    "decode_ms": lambda row, _: ms(row["decode_s"]),
    "input_tokens": lambda row, _: row["input_tokens"],
    "output_tokens": lambda row, _: row["output_tokens"],
    "cached_tokens": lambda row, _: row["cached_tokens"],
    "cache_hit_ratio": lambda row, _: row["cached_tokens"] / row["input_tokens"],
    "model": lambda row, _: row["model"],
    # No column holds these: they follow from the raw span that the archive keeps, and from its row.
    "cache_creation_tokens": lambda _, raw: created(raw),
    "uncached_tokens": lambda row, raw: row["input_tokens"] - row["cached_tokens"] - (created(raw) or 0),
    "time_to_first_content_ms": lambda _, raw: (first_content(raw) - raw["start_unix_ns"]) / 1e6,
}
PHASES: dict[str, Callable[[Outcome], float | None]] = {
    "external": lambda told: ms(only(told.turns)["external_s"]),
    "llm": lambda told: ms(only(told.turns)["calls_s"]),
    "unattributed": lambda told: ms(only(told.turns)["unattributed_s"]),
    "pre_admission": lambda told: ms(only(told.rows.values())["entry_before_s"]),
    "queue": lambda told: ms(only(told.rows.values())["queue_s"]),
    "total": lambda told: ms(only(told.rows.values())["entry_e2e_s"]),
}


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def only(rows: Any) -> Row:
    (row,) = rows
    assert isinstance(row, dict)
    return row


def created(raw: Row) -> int | None:
    """Prompt tokens that were written into a cache."""
    value = json.loads(raw["attributes"]).get("gen_ai.usage.cache_creation.input_tokens")
    return None if value is None else int(value)


def first_content(raw: Row) -> int:
    """When the first token came that is no reasoning (Unix nanoseconds)."""
    (moment,) = [
        event["unix_ns"] for event in json.loads(raw["events"]) if event["name"] == "gen_ai.content.first_chunk"
    ]
    return int(moment)


def among(value: object, allowed: object) -> bool:
    return value in allowed if isinstance(allowed, list) else value == allowed


def near(found: object, wanted: object) -> bool:
    return bool(found == (wanted if wanted is None or isinstance(wanted, str) else pytest.approx(wanted, rel=5e-3)))


def texts_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from (name, *texts_of(one))
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)


def numbers_of(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from numbers_of(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers_of(one)


def stored(told: Outcome) -> list[Row]:
    """Everything that was kept of a case, and what is said of it."""
    return [*told.spans.values(), *told.rows.values(), *told.turns, told.verdict, *told.reports.values()]


def kept(told: Outcome, chosen: Callable[[Sent], bool] = lambda _: True) -> bool:
    return all(one.span_id in told.spans for one in told.sent if chosen(one))


def booked_queue_s(row: Row) -> float:
    return sum(float(row[cause_column(cause)]) for cause in CAUSES if cause.startswith(("queue.", "kv.wait")))


def judged_queue_s(told: Outcome) -> float:
    """Waiting that the verdict of the window sees, of the time it judges."""
    whole = sum(row["entry_e2e_s"] or row["e2e_s"] or 0.0 for row in told.rows.values())
    shares = told.verdict["affected_shares"]
    return float(whole * sum(share for cause, share in shares.items() if cause.startswith("queue.")))


def said_nothing(one: Sent) -> bool:
    return not any(key.startswith(("gen_ai.usage.", "llm.usage.")) for key in one.keys)


# Failures in words -> what rules them out.
MUST_NOT: dict[str, Callable[[Outcome], bool]] = {
    "reject_request": lambda told: all((one.status, one.rejected) == (200, 0) for one in told.replies),
    "crash": lambda told: told.unharmed and told.broken_traces == 0 and all(one.status < 500 for one in told.replies),
    "http_500": lambda told: all(one.status < 500 for one in (*told.replies, told.cut_reply)),
    "store_nan": lambda told: all(math.isfinite(one) for row in stored(told) for one in numbers_of(row)),
    "store_tokens_as_text": lambda told: all(
        type(value) is int
        for row, span in ((row, told.spans[name]) for name, row in told.rows.items())
        for value in [
            *(row[name] for name in TOKENS if row[name] is not None),
            *(one for key, one in json.loads(span["attributes"]).items() if key.startswith("gen_ai.usage.")),
        ]
    ),
    "store_id_verbatim": lambda told: all(
        re.fullmatch("[0-9a-f]{32}", span["trace_id"]) and re.fullmatch("[0-9a-f]{16}", span["span_id"])
        for span in told.spans.values()
    ),
    "lose_valid_neighbour_without_error": lambda told: (
        kept(told, lambda one: one.has_hex_ids) or any(one.status >= 400 or one.message for one in told.replies)
    ),
    "lose_small_span_with_200": lambda told: kept(told) or any(one.status != 200 for one in told.replies),
    "drop_span": kept,
    "drop_child": lambda told: kept(told, lambda one: bool(one.parent_span_id)),
    "leave_unlinked": lambda told: all(
        row["turn_key"] in {turn["turn_key"] for turn in told.turns}
        for name, row in told.rows.items()
        if told.spans[name]["parent_span_id"] in told.spans
    ),
    "wrap_unsigned": lambda told: all(
        0 <= value <= LONGEST_S
        for row in (*told.rows.values(), *told.turns)
        for name, value in row.items()
        if name in ("e2e_s", "entry_e2e_s", "ttft_s", "tpot_s", "decode_s", "calls_s") and value is not None
    ),
    "negative_queue": lambda told: all(
        (row["queue_s"] or 0.0) >= 0 and booked_queue_s(row) >= 0 for row in told.rows.values()
    ),
    "gap_labelled_queue": lambda told: (
        sum(booked_queue_s(row) for row in told.rows.values()) <= told_queue_s(told) + 1e-9
        and judged_queue_s(told) <= told_queue_s(told) + 1e-9
    ),
    "adjust_raw_times_in_storage": lambda told: all(
        (told.spans[one.span_id]["start_unix_ns"], told.spans[one.span_id]["end_unix_ns"])
        == (one.start_unix_ns, one.end_unix_ns)
        for one in told.sent
    ),
    "double_count": lambda told: (
        told.stored == len({(one.trace_id, one.span_id) for one in told.sent})
        and told.verdict["requests"] == len(told.rows) <= told.stored
    ),
    "treat_missing_as_zero": lambda told: all(
        told.rows[one.span_id][name] is None
        for one in told.sent
        if one.span_id in told.rows and said_nothing(one)
        for name in (*TOKENS, "tpot_s")
    ),
    "tokens_missing_for_legacy": lambda told: all(
        row["input_tokens"] and row["output_tokens"] for row in told.rows.values()
    ),
    "unbounded_memory": lambda told: (
        told.journal_bytes < max(1 << 16, told.sent_bytes // 10)
        and all(len(span["attributes"]) <= 2 * SPAN_LIMITS.list_bytes for span in told.spans.values())
    ),
    "store_invalid_utf8": lambda told: valid_text(told),
    "hit_ratio_above_1": lambda told: all(
        (row["cached_tokens"] or 0) <= (row["input_tokens"] or 0) for row in told.rows.values()
    ),
}
# The same with the number that would give the failure away.
MUST_NOT_NUMBER: dict[str, Callable[[Outcome, float], bool]] = {
    r"input_tokens_(\d+)": lambda told, value: all(row["input_tokens"] != value for row in told.rows.values()),
    r"duration_(\d+)_ms": lambda told, value: all(
        not near(ms(row[name]), value) for row in told.rows.values() for name in ("e2e_s", "entry_e2e_s")
    ),
    r"ttft_(\d+)_used_for_verdict": lambda told, value: engine_ttft_is_not(told, value),
    r"ttft_(\d+)_blamed_on_engine": lambda told, value: (
        engine_ttft_is_not(told, value) and told.verdict["primary"] not in ("queueing", "compute", "kv")
    ),
}


def told_queue_s(told: Outcome) -> float:
    return sum(row["queue_s"] or 0.0 for row in told.rows.values())


def engine_ttft_is_not(told: Outcome, value_ms: float) -> bool:
    statistics = told.verdict["statistics"]["engine"]["ttft"]
    figures = [row["ttft_s"] for row in told.rows.values()] + list(numbers_of(statistics))
    return all(not near(ms(one), value_ms) for one in figures)


def valid_text(told: Outcome) -> bool:
    try:
        for row in stored(told):
            for text in texts_of(row):
                text.encode("utf-8")
            json.loads(row.get("attributes") or "{}")
    except ValueError:
        return False
    return True


def avoids(told: Outcome, word: str) -> bool:
    """Whether a failure did not happen; KeyError for a word that nobody reads."""
    if word in MUST_NOT:
        return MUST_NOT[word](told)
    for pattern, holds in MUST_NOT_NUMBER.items():
        if found := re.fullmatch(pattern, word):
            return holds(told, float(found[1]))
    raise KeyError(word)


def diagnosed(told: Outcome, wanted: dict[str, Any]) -> list[str]:
    """What is wrong with the verdicts: of the request itself, as its page says it, and of a window that holds the case."""
    row = told.about(wanted["span"])
    primaries = {
        "row": row["primary_class"],
        "report": told.reports[row["span_id"]]["verdict"]["primary"],
        "window": told.verdict["primary"],
    }
    offered = {str(one["technique"]) for one in told.verdict["recommend"]}
    readers: dict[str, Callable[[list[str]], list[str]]] = {
        "allowed_primary": lambda names: [f"{at}: {one}" for at, one in primaries.items() if one not in names],
        "must_not_primary": lambda names: [f"{at}: {one}" for at, one in primaries.items() if one in names],
        "must_not_recommend": lambda names: sorted(offered & set(names)),
    }
    return [wrong for key, names in wanted.items() if key != "span" for wrong in readers[key](names)]


def normalized(told: Outcome, wanted: dict[str, Row]) -> list[str]:
    return [
        f"{span}.{name}: {found!r}, not {value!r}"
        for span, values in wanted.items()
        for name, value in values.items()
        if not near(found := VALUES[name](told.rows[span], told.spans[span]), value)
    ]


def flags_of(told: Outcome, span: str) -> set[str]:
    return {*json.loads(told.rows[span]["quality"] or "[]"), *json.loads(told.spans[span]["flags"] or "[]")}


def is_cut(told: Outcome, span: str, key: str) -> bool:
    """Whether of a long value only its length, or its beginning and its length, was kept."""
    value = json.loads(told.spans[span]["attributes"])[key]
    return len(value) <= SPAN_LIMITS.value_bytes + 64 and re.search(r"\d{7}|\d,\d{3},\d{3}", value) is not None


def totals(told: Outcome, wanted: Row) -> bool:
    found = {"requests": len(told.rows)} | {
        name: sum(row[name] for row in told.rows.values()) for name in ("input_tokens", "output_tokens")
    }
    return all(found[name] == value for name, value in wanted.items())


def one_trace(told: Outcome, words: str) -> bool:
    found = re.fullmatch(r"both spans belong to trace ([0-9a-f]{32})", words)
    assert found, words
    return told.stored != 2 or {span["trace_id"] for span in told.spans.values()} == {found[1]}


def longest_ms(told: Outcome) -> float:
    """The highest percentile that the statistics of the window tell."""
    return max(numbers_of({key: one for key, one in told.verdict["statistics"]["engine"]["e2e"].items() if key.startswith("p")})) * 1e3  # fmt: skip


def left_out(told: Outcome, span: str) -> bool:
    row = told.rows[span]
    return (row["e2e_s"], row["ttft_s"], row["tpot_s"]) == (None, None, None)


def roots(told: Outcome) -> list[str]:
    return sorted(name for name, span in told.spans.items() if span["parent_span_id"] not in told.spans)


def root_keys(told: Outcome) -> set[str]:
    names = roots(told)
    traces = [told.spans[name]["trace_id"] for name in names]
    return set(span_keys(pl.Series(traces), pl.Series(names)))


# Key of `expected` -> what is wrong (empty: nothing).
READERS: dict[str, Callable[[Outcome, Any], Any]] = {
    "http_status": lambda told, value: [one.status for one in told.replies if not among(one.status, value)],
    "stored_spans": lambda told, value: (
        [] if among(told.stored, value) and told.stored == told.archived else [told.stored, told.archived]
    ),
    "rejected_spans": lambda told, value: (
        [] if among(sum(one.rejected for one in told.replies), value) else [one.told for one in told.replies]
    ),
    "must_not": lambda told, words: [word for word in words if not avoids(told, word)],
    "normalized": normalized,
    "flags": lambda told, value: [
        f"{span}: {flags_of(told, span)}" for span, flags in value.items() if not set(flags) <= flags_of(told, span)
    ],
    "stats_excluding": lambda told, value: [span for span in value if not left_out(told, span)],
    "p99_duration_ms_max": lambda told, value: [one] if (one := longest_ms(told)) > value else [],
    "diagnosis": diagnosed,
    "residual_client_minus_server_ms": lambda told, value: [
        gap for row in told.rows.values() if not near(gap := (row["entry_e2e_s"] - row["e2e_s"]) * 1e3, value)
    ],
    "totals": lambda told, value: [] if totals(told, value) else [told.rows],
    "traces": lambda told, value: (
        [] if len(found := {span["trace_id"] for span in told.spans.values()}) == value else sorted(found)
    ),
    "roots": lambda told, value: (
        [] if roots(told) == sorted(value) and {t["turn_key"] for t in told.turns} == root_keys(told) else roots(told)
    ),
    "phases_ms": lambda told, value: [
        f"{name}: {found}" for name, wanted in value.items() if not near(found := PHASES[name](told), wanted)
    ],
    "llm_requests": lambda told, value: [] if len(told.rows) == value else sorted(told.rows),
    "if_stored_2": lambda told, words: [] if one_trace(told, words) else sorted(told.spans),
    "attribute_truncated": lambda told, value: [
        f"{span}.{key}" for span, keys in value.items() for key in keys if not is_cut(told, span, key)
    ],
    "must_include": lambda told, value: [span for span in value if span not in told.spans or span not in told.rows],
    "valid_utf8_everywhere": lambda told, value: [] if valid_text(told) == value else ["invalid UTF-8"],
    # In words: "body names the problem; server stays healthy". Of what we refuse so, the half of a body is one.
    "if_400": lambda told, _: [
        one.told for one in (told.cut_reply, *told.replies) if one.status == 400 and not (one.message and told.unharmed)
    ],
}


def read(told: Outcome) -> dict[str, Any]:
    """Each key of `expected` and what is wrong there; KeyError for a key that nobody reads."""
    expected = dict(told.case["expected"])
    where_ok = expected.pop("if_200", {})
    if all(one.status == 200 for one in told.replies):
        expected |= where_ok
    unread = (set(expected) | set(where_ok)) - set(READERS)
    if unread:
        raise KeyError(f"nothing reads {sorted(unread)}")
    return {key: READERS[key](told, value) for key, value in expected.items()}
