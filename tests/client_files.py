"""A record of each client tool, as its files hold it."""

from __future__ import annotations

from typing import Any

from span_tables import at

BASE_S = at(0) / 1e9
BENCH = {
    "index": 0,
    "input_len": 10,
    "output_len": 3,
    "start_s": 0.5,
    "ttft_s": 0.25,
    "itl_s": [0.1, 0.4],
    "e2e_s": 0.75,
    "error": "",
}
OPENAI = {
    "start_unix_ns": at(0),
    "id": "chatcmpl-1",
    "ttft_s": 0.25,
    "itl_s": [0.5],
    "e2e_s": 1.0,
    "usage": {"completion_tokens": 2},
}
AIPERF = {
    "metadata": {"x_request_id": "abc", "request_start_ns": at(0), "request_end_ns": at(2), "was_cancelled": False},
    "metrics": {
        "request_latency": {"value": 1500.0, "unit": "ms"}, "time_to_first_token": {"value": 0.25, "unit": "s"},
        "inter_chunk_latency": {"value": [100.0, 200.0], "unit": "ms"},
        "usage_completion_tokens": {"value": 3, "unit": "tokens"}, "input_sequence_length": {"value": 7, "unit": "tokens"},
    },
}  # fmt: skip

GUIDELLM_TIMINGS = {
    "targeted_start": BASE_S - 1,
    "queued": BASE_S - 2,
    "dequeued": BASE_S - 1,
    "request_start": BASE_S,
    "first_token_iteration": BASE_S + 0.5,
    "last_token_iteration": BASE_S + 2.5,
    "request_end": BASE_S + 2.75,
}


def guidellm(**timings: Any) -> dict[str, Any]:
    return {
        "request_id": "q-1",
        "response_id": "chatcmpl-1",
        "info": {"status": "completed", "timings": GUIDELLM_TIMINGS | timings},
        "prompt_tokens": 64,
        "output_tokens": 5,
        "output": "what the model said",
    }
