"""Per-request records of clients as rows of `requests`: what the user's side saw of each call.

All times are the client's own: `entry_e2e_s`, `entry_ttft_s`, the gaps between its chunks. What lies before the first chunk cannot
be told apart by a client, so a record that stays a row of its own has it as one combined value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from phasewise.collector.client_records import RELATIVE
from phasewise.collector.importers import aiperf, guidellm, openai_client, vllm_bench
from phasewise.collector.importers.lines import Lines
from phasewise.collector.importers.record import LONGEST_S, ClientRecord, Unusable
from phasewise.collector.keys import text_key
from phasewise.collector.records import Request
from phasewise.collector.requests import FULL_SCHEMA


@dataclass(frozen=True, slots=True)
class Reader:
    """A format: how its first object is recognised, and how an object becomes records, or what is wrong with one of many."""

    format: str
    recognises: Callable[[dict[str, Any]], bool]
    records: Callable[[dict[str, Any]], Iterator[ClientRecord | Unusable]]


READERS = (
    Reader("aiperf", aiperf.recognises, aiperf.records),
    Reader("vllm-bench", vllm_bench.recognises, vllm_bench.records),
    Reader("guidellm", guidellm.recognises, guidellm.records),
    Reader("openai-client", openai_client.recognises, openai_client.records),
)


def reader_for(document: dict[str, Any]) -> Reader | None:
    return next((reader for reader in READERS if reader.recognises(document)), None)


def read(reader: Reader, lines: Lines, modified_unix_ns: int, dataset: str | None) -> pl.DataFrame:
    """Rows of `requests`; relative times are placed so that the last call ends at `modified_unix_ns`."""
    records = []
    for place, document in lines:
        try:
            for number, record in enumerate(reader.records(document)):
                if isinstance(record, Unusable):
                    lines.bad(place, record.field, record.problem, record.remedy)
                    continue
                _within(record)
                records.append((f"{place}, {number}" if number else place, record))
                lines.good()
        except Unusable as error:
            lines.bad(place, error.field, error.problem, error.remedy)
    lines.require_some(f"write the records as {reader.format} writes them")
    ends = [r.start_unix_ns + round(r.e2e_s * 1e9) for _, r in records if r.is_relative]
    base = modified_unix_ns - max(ends, default=0)
    rows = [_row(reader.format, lines.name, place, record, base, dataset) for place, record in records]
    return pl.DataFrame(rows, schema=FULL_SCHEMA, orient="row")


def _within(record: ClientRecord) -> None:
    """Raises Unusable for times that no row can hold."""
    if not 0 <= record.start_unix_ns < LONGEST_S * 1e9 or not (record.end_unix_ns or 0) < LONGEST_S * 1e9:
        times = f"begins at {record.start_unix_ns!r:.40} ns and lasts {record.e2e_s!r} s"
        raise Unusable("", times, "write the times as the tool gives them")
    if not (record.ttft_s or 0.0) < LONGEST_S:
        raise Unusable("", f"has its first token after {record.ttft_s!r} s", "write the times as the tool gives them")


def _row(kind: str, name: str, place: str, record: ClientRecord, base: int, dataset: str | None) -> dict[str, object]:
    start = record.start_unix_ns + (base if record.is_relative else 0)
    key = text_key(
        kind, record.request_id or place, str(record.start_unix_ns), record.trace_id or "", f"{record.e2e_s!r}"
    )
    gaps = record.gaps_s
    decode_s = record.e2e_s - record.ttft_s if record.ttft_s is not None else None
    tokens = record.output_tokens
    request = Request(
        request_key=key,
        call_key=key,
        trace_id=record.trace_id,
        client_request_id=record.request_id,
        model=record.model,
        source=f"import:{kind}",
        dataset=dataset,
        input_tokens=record.input_tokens,
        output_tokens=tokens,
        arrival_unix_ns=start,
        finished_unix_ns=record.end_unix_ns or start + round(record.e2e_s * 1e9),
        first_token_unix_ns=None if record.ttft_s is None else start + round(record.ttft_s * 1e9),
        e2e_s=record.e2e_s,
        ttft_s=record.ttft_s,
        decode_s=decode_s,
        tpot_s=decode_s / (tokens - 1) if decode_s is not None and tokens is not None and tokens > 1 else None,
        combined_s=record.ttft_s,
        combined_covers=None if record.ttft_s is None else "Q,C,P,F",
        residual_s=None if record.ttft_s is None else 0.0,
        entry_e2e_s=record.e2e_s,
        entry_side="client",
        entry_ttft_s=record.ttft_s,
        entry_tpot_s=record.tpot_s,
        itl_p95_s=float(np.percentile(gaps, 95)) if gaps else None,
        longest_gap_s=max(gaps) if gaps else None,
        client_gaps=json.dumps(gaps, separators=(",", ":")) if gaps else None,
        provenance='{"e2e_s":"measured:client","ttft_s":"measured:client"}',
        outcome=record.outcome,
        quality=f'["{RELATIVE}"]' if record.is_relative else None,
    )
    return {**dict.fromkeys(FULL_SCHEMA), **asdict(request), "final": False}
