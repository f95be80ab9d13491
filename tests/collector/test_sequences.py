"""Several sequences of one call (n > 1), and calls that only look like it."""

from __future__ import annotations

from typing import Any

from span_tables import span_frame
from writing import engine_span, rulebook

from phasewise.collector.normalize import normalize
from phasewise.collector.profiles import Profiles

PROFILES = Profiles(rulebook().engines)


def test_the_sequences_of_one_call_share_its_key() -> None:
    """n > 1: vLLM sends a span each, with one id (or numbered ones), in the caller's trace or each in a trace of its own."""

    def calls(*spans: dict[str, Any]) -> list[str]:
        return normalize(span_frame(spans), PROFILES).requests["call_key"].to_list()

    def sequence(number: int, identifier: str, start_s: float = 0.0, **more: Any) -> dict[str, Any]:
        attributes = {"gen_ai.request.id": identifier}
        return {**engine_span(start_s, 2.0 + number, attributes=attributes), "trace": f"{number:032x}", **more}

    assert len(set(calls(sequence(1, "cmpl-a"), sequence(2, "cmpl-a"), sequence(3, "cmpl-a")))) == 1
    assert len(set(calls(sequence(1, "0_cmpl-a"), sequence(2, "1_cmpl-a")))) == 1
    called: dict[str, Any] = {"parent": "00000000000000ff"}
    same = [dict(sequence(i, "cmpl-a", 0.001 * i, **called), trace="f" * 32) for i in (1, 2)]
    assert len(set(calls(*same))) == 1
    assert len(set(calls(sequence(1, "cmpl-a"), sequence(2, "cmpl-b")))) == 2
    assert len(set(calls(sequence(1, "mine"), sequence(2, "mine", 30.0)))) == 2  # a client that uses its own id again
