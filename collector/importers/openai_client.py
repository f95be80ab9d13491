"""JSON lines that a script around the OpenAI client writes: start, end-to-end, TTFT and gaps in seconds, the answer's id and usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import ClientRecord, Unusable, gaps, seconds, whole


def recognises(document: dict[str, Any]) -> bool:
    return {"start_unix_ns", "e2e_s"} <= set(document)


def records(document: dict[str, Any]) -> Iterator[ClientRecord]:
    start = document["start_unix_ns"]
    if not isinstance(start, int):
        raise Unusable("start_unix_ns", f"is {start!r}, not Unix nanoseconds", "write time.time_ns() at the start")
    usage = document.get("usage") or {}
    failed = bool(document.get("error"))
    ttft = document.get("ttft_s")
    yield ClientRecord(
        start_unix_ns=start,
        e2e_s=seconds(document["e2e_s"], "e2e_s"),
        ttft_s=None if ttft is None else seconds(ttft, "ttft_s"),
        gaps_s=gaps(document.get("itl_s"), "itl_s"),
        input_tokens=whole(usage.get("prompt_tokens")),
        output_tokens=whole(usage.get("completion_tokens")),
        request_id=document.get("id") or document.get("x_request_id"),
        trace_id=document.get("trace_id"),
        model=document.get("model"),
        outcome="aborted" if document.get("cancelled") else "refused" if failed else "ok",
    )
