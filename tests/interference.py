"""The interference ledger of a context that a test made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from analyzer_contexts import make_context
from builders import make_request
from step_contexts import RULES, Steps

from phasewise.analyzer.attribution import attribute_instance
from phasewise.analyzer.blame import divided_ns
from phasewise.analyzer.interference_sights import COLUMN, Sight, sight_of
from phasewise.collector.context import Context
from phasewise.collector.records import Request


def with_answer(context: Context) -> Context:
    """The context's requests with what attribution books to interference, as they are stored."""
    told = attribute_instance(context, RULES).select("request_key", COLUMN)
    rows = context.requests.drop(COLUMN).join(told, on="request_key", how="left", maintain_order="left")
    return replace(context, requests=rows)


def sight(context: Context) -> Sight:
    found = sight_of(with_answer(context), RULES)
    assert found is not None
    return found


def divided(found: Sight, by: Sequence[Request]) -> dict[str, list[int]]:
    """Nanoseconds of each target by culprit (steps and overlap together), the last is unnamed."""
    keys = found.rows.series("request_key").to_list()
    column = np.array([[one.request_key for one in by].index(key) for key in keys], dtype=np.int64)
    ns = divided_ns(found.booked_ns, found.seconds(column, len(by)))
    target = np.arange(len(keys)) if found.rows.target is None else found.rows.target
    return {
        keys[row]: [*(ns[k, 0:-1:2] + ns[k, 1:-1:2]).tolist(), int(ns[k, -1])] for k, row in enumerate(target.tolist())
    }


def linear_steps() -> Steps:
    """Steps of 10 ms and 50 us a prompt token, enough of them to be told."""
    steps = Steps()
    for tokens in (100, 200, 400, 600, 800, 1000, 1200) * 4:
        steps.ran(0.010 + tokens * 50e-6, prefill=tokens)
        steps.ran(0.010, sequences=1, context=500)
    return steps


def overlapping() -> tuple[list[Request], Context]:
    """Four clean decodes of 10 ms a token; one is 0.6 s longer, while a prompt of 300 tokens (0.3 s) and two of 600 and 200 tokens
    at once (0.4 s) are prefilled beside it."""
    clean = [
        make_request(at_s=at_s, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.0, output_tokens=101)
        for at_s in (0.0, 2.0, 4.0, 6.0)
    ]
    held = make_request(
        at_s=10.0, queue_s=0.0, prefill_s=0.1, first_token_s=0.0, decode_s=1.6, output_tokens=101, tenant="chat"
    )
    shape: dict[str, Any] = {"queue_s": 0.0, "first_token_s": 0.0, "decode_s": 0.01, "output_tokens": 2}
    alone = make_request(at_s=10.2, prefill_s=0.3, input_tokens=300, tenant="rag", **shape)
    one = make_request(at_s=10.8, prefill_s=0.4, input_tokens=600, tenant="rag", **shape)
    other = make_request(at_s=10.8, prefill_s=0.4, input_tokens=200, tenant="chat", **shape)
    rows = [held, alone, one, other, *clean]
    return rows, make_context(rows)
