"""`vllm bench serve`: its result with `--save-detailed` (one JSON with a list a quantity), or the same as one record a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import ClientRecord, Unusable, gaps, seconds, whole
from phasewise.collector.importers.record_span import word

_LISTS = ("ttfts", "itls", "input_lens", "output_lens", "start_times", "errors")
_SUMMARY = {"request_throughput", "completed", "mean_ttft_ms"}


def recognises(document: dict[str, Any]) -> bool:
    known = set(document)
    return {"ttfts", "itls", "input_lens"} <= known or {"index", "itl_s", "output_len"} <= known or known >= _SUMMARY


def records(document: dict[str, Any]) -> Iterator[ClientRecord | Unusable]:
    """Times are seconds of a clock that began with the machine or the run, so the records are relative."""
    if "index" in document:
        yield _record(document)
        return
    if not isinstance(document.get("ttfts"), list):
        raise Unusable(
            "ttfts", "is missing: this result holds no requests", "run vllm bench serve with --save-detailed"
        )
    lists = {name: document.get(name) or [] for name in _LISTS}
    for name, values in lists.items():
        if not isinstance(values, list):
            raise Unusable(name, f"is {type(values).__name__}, not a list", "write the result as vllm bench writes it")
    for index in range(len(lists["ttfts"])):
        part = {name: values[index] if index < len(values) else None for name, values in lists.items()}
        try:
            yield _of_lists(index, part, word(document.get("model_id")))
        except Unusable as error:
            yield Unusable(f"request {index}, {error.field}", error.problem, error.remedy)


def _of_lists(index: int, part: dict[str, Any], model: str | None) -> ClientRecord:
    itl = gaps(part["itls"], "itls") or []
    return _record(
        {
            "index": index,
            "input_len": part["input_lens"],
            "output_len": part["output_lens"],
            "start_s": part["start_times"] or 0.0,
            "ttft_s": part["ttfts"],
            "itl_s": itl,
            "e2e_s": seconds(part["ttfts"], "ttfts") + sum(itl),
            "error": part["errors"],
            "model": model,
        }
    )


def _record(line: dict[str, Any]) -> ClientRecord:
    index = line.get("index")
    if not isinstance(index, int):
        raise Unusable("index", f"is {index!r:.80}, not a number", "write the request's number in the run")
    failed = bool(line.get("error"))
    return ClientRecord(
        start_unix_ns=round(seconds(line.get("start_s", 0.0), "start_s") * 1e9),
        e2e_s=seconds(line.get("e2e_s"), "e2e_s"),
        ttft_s=None if failed else seconds(line.get("ttft_s"), "ttft_s"),
        gaps_s=None if failed else gaps(line.get("itl_s"), "itl_s"),
        input_tokens=whole(line.get("input_len")),
        output_tokens=None if failed else whole(line.get("output_len")),
        request_id=f"bench-index-{index}",
        model=line.get("model"),
        outcome="refused" if failed else "ok",
        is_relative=True,
    )
