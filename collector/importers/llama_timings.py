"""Answers of llama.cpp's server with their `timings`: prompt and generation, milliseconds. What it waited for stands nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasewise.collector.importers.record import Unusable
from phasewise.collector.importers.record_span import number, span_of, word
from phasewise.collector.records import Span

SCOPE = "llama_cpp.timings"
_KEPT = ("cache_n", "predicted_n", "prompt_ms", "predicted_ms", "predicted_per_token_ms", "draft_n", "draft_n_accepted")
_REMEDY = "write whole answers of the server, one a line"


def recognises(document: dict[str, Any]) -> bool:
    timings = document.get("timings")
    return isinstance(timings, dict) and {"prompt_ms", "predicted_ms"} <= set(timings)


def spans(document: dict[str, Any]) -> Iterator[Span]:
    """It ends when the answer was `created`; without that it ends when the file was written."""
    timings = document.get("timings")
    timings = timings if isinstance(timings, dict) else {}
    for name in ("prompt_ms", "predicted_ms"):
        value = number(timings.get(name))
        if value is None or value < 0:
            raise Unusable(f"timings.{name}", f"is {timings.get(name)!r:.80}, not milliseconds", _REMEDY)
    length_s = (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
    evaluated, reused = number(timings.get("prompt_n")), number(timings.get("cache_n"))
    created = number(document.get("created"))
    end_s = float(created) if created is not None and created > 0 else length_s
    found = {
        "id": word(document.get("id")),
        "model": word(document.get("model")),
        "prompt_n + cache_n": None if evaluated is None else evaluated + (reused or 0),
        **{name: number(timings.get(name)) for name in _KEPT},
    }
    identity = f"{document.get('id')}/{created}/{sorted((k, repr(v)) for k, v in timings.items())}"
    yield span_of(SCOPE, identity, end_s - length_s, end_s, found)
