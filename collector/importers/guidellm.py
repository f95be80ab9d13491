"""GuideLLM's report (`benchmarks.json`): each request of each benchmark with Unix times. Its `queued` is the client's own queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import LONGEST_S, ClientRecord, Unusable, seconds, whole
from phasewise.collector.importers.record_span import number, word

_GROUPS = ("successful", "incomplete", "errored")
_REMEDY = "write the report of guidellm 0.4 or later as JSON, with its requests"


def recognises(document: dict[str, Any]) -> bool:
    benchmarks = document.get("benchmarks")
    first = benchmarks[0] if isinstance(benchmarks, list) and benchmarks else None
    return isinstance(first, dict) and "requests" in first


def records(document: dict[str, Any]) -> Iterator[ClientRecord | Unusable]:
    """Requests that were sent, and what is wrong with those that cannot be used; a request cut off by the end of its benchmark is
    aborted."""
    arguments = document.get("args")
    named = word(arguments.get("model")) if isinstance(arguments, dict) else None
    benchmarks = document.get("benchmarks")
    for number_, benchmark in enumerate(benchmarks if isinstance(benchmarks, list) else []):
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if not isinstance(requests, dict):
            yield Unusable(
                f"benchmarks[{number_}].requests", "is no object of successful, incomplete and errored", _REMEDY
            )
            continue
        for group in _GROUPS:
            found = requests.get(group)
            for index, request in enumerate(found if isinstance(found, list) else []):
                where = f"benchmarks[{number_}].requests.{group}[{index}]"
                try:
                    record = _record(request, group, named)
                except Unusable as error:
                    yield Unusable(f"{where}.{error.field}", error.problem, error.remedy)
                    continue
                if record is not None:
                    yield record


def _record(request: object, group: str, model: str | None) -> ClientRecord | None:
    info = request.get("info", request.get("scheduler_info")) if isinstance(request, dict) else None
    timings = info.get("timings", info.get("request_timings")) if isinstance(info, dict) else None
    if not isinstance(request, dict) or not isinstance(timings, dict):
        raise Unusable("info.timings", "is missing", _REMEDY)
    start, end = number(timings.get("request_start")), number(timings.get("request_end"))
    if start is None and group != "successful":
        return None  # never sent
    if start is None or not 0 < start < LONGEST_S:
        raise Unusable(
            "info.timings.request_start", f"is {timings.get('request_start')!r:.80}, not Unix seconds", _REMEDY
        )
    if end is None:
        end = number(timings.get("resolve_end"))
    if end is None or not start <= end < LONGEST_S:
        raise Unusable(
            "info.timings.request_end", f"is {timings.get('request_end')!r:.80}, not after request_start", _REMEDY
        )
    first, last = number(timings.get("first_token_iteration")), number(timings.get("last_token_iteration"))
    output = whole(request.get("output_tokens")) if group == "successful" else None
    spread = last - first if first is not None and last is not None else None
    return ClientRecord(
        start_unix_ns=round(start * 1e9),
        e2e_s=seconds(end - start, "info.timings.request_end"),
        end_unix_ns=round(end * 1e9),
        ttft_s=None if first is None or first < start else first - start,
        tpot_s=spread / (output - 1) if spread is not None and spread >= 0 and output and output > 1 else None,
        input_tokens=whole(request.get("prompt_tokens")),
        output_tokens=output,
        request_id=word(request.get("response_id")) or word(request.get("request_id")),
        model=model,
        outcome={"successful": "ok", "incomplete": "aborted"}.get(group, "refused"),
    )
