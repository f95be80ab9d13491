"""`vllm bench serve`: its detailed result (one JSON with a list a quantity), or the same as one record a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import ClientRecord, Unusable, gaps, seconds, whole


def recognises(document: dict[str, Any]) -> bool:
    return {"ttfts", "itls", "input_lens"} <= set(document) or {"index", "itl_s", "output_len"} <= set(document)


def records(document: dict[str, Any]) -> Iterator[ClientRecord]:
    """Times are seconds since the run began, so the records are relative."""
    if "ttfts" not in document:
        yield _record(document)
        return
    lists = {
        name: document.get(name) or []
        for name in ("ttfts", "itls", "input_lens", "output_lens", "start_times", "errors")
    }
    count = len(document["ttfts"])
    for index in range(count):
        part = {name: values[index] if index < len(values) else None for name, values in lists.items()}
        itl = part["itls"] or []
        yield _record(
            {
                "index": index,
                "input_len": part["input_lens"],
                "output_len": part["output_lens"],
                "start_s": part["start_times"] or 0.0,
                "ttft_s": part["ttfts"],
                "itl_s": itl,
                "e2e_s": seconds(part["ttfts"], "ttfts") + sum(itl),
                "error": part["errors"],
            }
        )


def _record(line: dict[str, Any]) -> ClientRecord:
    index = line.get("index")
    if not isinstance(index, int):
        raise Unusable("index", f"is {index!r}, not a number", "write the request's number in the run")
    failed = bool(line.get("error"))
    return ClientRecord(
        start_unix_ns=round(seconds(line.get("start_s", 0.0), "start_s") * 1e9),
        e2e_s=seconds(line.get("e2e_s"), "e2e_s"),
        ttft_s=None if failed else seconds(line.get("ttft_s"), "ttft_s"),
        gaps_s=None if failed else gaps(line.get("itl_s"), "itl_s"),
        input_tokens=whole(line.get("input_len")),
        output_tokens=None if failed else whole(line.get("output_len")),
        request_id=f"bench-index-{index}",
        outcome="refused" if failed else "ok",
        is_relative=True,
    )
