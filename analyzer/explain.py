"""The report of one request: its phases, its partition, and what holds most of its time."""

from __future__ import annotations

import json
from collections.abc import Mapping

from phasewise.analyzer.listing import find_requests
from phasewise.analyzer.outside import outside_s
from phasewise.analyzer.replicas import Reader
from phasewise.analyzer.statistics import rounded
from phasewise.analyzer.wording import request_sentence
from phasewise.rules.load import Rulebook
from phasewise.rules.vocabulary import CAUSES, CLASS_OF_CAUSE, CLASSES, cause_column


def request_report(store: Reader, rulebook: Rulebook, identifier: str) -> list[dict[str, object]]:
    """One object a request that the identifier names: key, gen_ai.request.id, x-request-id or trace id; times in seconds."""
    rows = find_requests(store, identifier, limit=None)
    outside = [outside_s(rows[place]) for place in range(rows.height)]
    return [_request(row, beside, rulebook) for row, beside in zip(rows.iter_rows(named=True), outside, strict=True)]


def _request(row: Mapping[str, object], outside: Mapping[str, float], rulebook: Rulebook) -> dict[str, object]:
    """outside: seconds of the call that pass outside the engine, by cause; the partition is of the engine's time alone."""
    partition = {cause: row[cause_column(cause)] for cause in CAUSES if row[cause_column(cause)]}
    phases = (
        "queue_s",
        "context_s",
        "prefill_s",
        "first_token_s",
        "decode_s",
        "external_s",
        "residual_s",
        "combined_s",
    )
    texts = ("provenance", "segments", "quality", "missing_signals")
    identity = (
        "request_key call_key turn_key trace_id span_id request_id client_request_id engine engine_version service instance "
        "model tenant route priority request_class source dataset outcome finish_reason input_tokens cached_tokens "
        "output_tokens arrival_unix_ns queued_unix_ns scheduled_unix_ns first_token_unix_ns finished_unix_ns "
        "concurrency_at_arrival decode_batch_mean kv_usage_admission_ratio kv_usage_peak_ratio preemptions longest_gap_s final"
    ).split()
    by_class: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for cause, seconds in partition.items():
        assert isinstance(seconds, float)
        by_class[CLASS_OF_CAUSE[cause]] += seconds
    e2e = row["e2e_s"]
    return {
        **{name: row[name] for name in identity},
        "e2e_s": _six(e2e),
        "ttft_s": _six(row["ttft_s"]),
        "tpot_s": _six(row["tpot_s"]),
        "entry_e2e_s": _six(row["entry_e2e_s"]),
        "entry_side": row["entry_side"],
        "entry_before_s": _six(row["entry_before_s"]),
        "entry_ttft_s": _six(row["entry_ttft_s"]),
        "phases": {name: _six(row[name]) for name in phases},
        "combined_covers": row["combined_covers"],
        "partition": {cause: _six(seconds) for cause, seconds in partition.items()},
        "by_class": {name: _six(seconds) for name, seconds in by_class.items() if seconds > 0},
        "outside": {cause: _six(seconds) for cause, seconds in outside.items()},
        "verdict": {
            "primary": row["primary_class"],
            "cause": row["cause"],
            "margin_ratio": _six(row["margin_ratio"]),
            "sentence": request_sentence(row, partition, outside),
        },
        **{name: json.loads(str(row[name])) if row[name] else None for name in texts},
        "provenance_rules": rulebook.version,
    }


def _six(value: object) -> float | None:
    return rounded(value) if isinstance(value, float) else None
