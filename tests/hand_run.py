"""A run of six steps written by hand, with every moment a round number of milliseconds after START.

a: 4 tokens, alone at first. b: arrives while a step runs, waits for its end, prompt in two chunks, a tool of 500 ms after its
last token. c: 100 ms of context in front, one token. gone: aborted in its decode. A fifth request is refused.

    step    0      1        2            3             4        5
    ms      0-100  100-150  150-350      350-400       400-450  600-700
    does    a in   a        a, b in      a, b in       b, gone  c in
"""

from __future__ import annotations

from phasewise.instrumented_engine.recording import STEP_COLUMNS, Recording
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence, State, ToolCall

START = 1_795_972_000_000_000_000
MS = 10**6
KV_BLOCKS = 40


def moment(ms: float) -> int:
    return START + round(ms * MS)


def hand_run() -> Recording:
    recording = Recording(kv_blocks_total=KV_BLOCKS)
    for start, end, columns in (
        (0, 100, {"prefill_tokens": 64, "chunks": 1, "last_chunks": 1, "running": 1, "kv_blocks_used": 4}),
        (100, 150, {"decode_sequences": 1, "context_tokens": 65, "running": 1, "kv_blocks_used": 5}),
        (150, 350, {"prefill_tokens": 32, "chunks": 1, "decode_sequences": 1, "running": 2, "kv_blocks_used": 8}),
        (
            350,
            400,
            {
                "prefill_tokens": 16,
                "chunks": 1,
                "last_chunks": 1,
                "decode_sequences": 1,
                "running": 1,
                "waiting_slot": 3,
            },
        ),
        (400, 450, {"decode_sequences": 1, "running": 0, "kv_blocks_used": 4, "preemptions": 2}),
        (600, 700, {"prefill_tokens": 8, "chunks": 1, "last_chunks": 1, "running": 0, "kv_blocks_used": 1}),
    ):
        row = {"start_ns": moment(start), "duration_ns": (end - start) * MS, **columns}
        recording.steps.append(tuple(row.get(name, 0) for name in STEP_COLUMNS))
    recording.finished += [
        _served("a", 0, 64, 4, (0, 0, 0, 100, 100, 400, 400), [[1, 0, 0], [2, 1, 3]]),
        _served("gone", 1, 8, 2, (0, 0, 0, 100, 100, 150, 430), [[1, 0, 0], [2, 1, 1]], finish_reason="abort"),
        _served("c", 4, 8, 1, (500, 600, 600, 700, 700, 700, 700), [[1, 5, 5]], context_ms=100, cached=2),
        _served("b", 2, 48, 2, (120, 120, 150, 400, 400, 450, 950), [[1, 2, 3], [2, 4, 4]], tool_ms=500),
    ]
    refused = RequestSpec(request_id="refused", arrival_ns=moment(380), prompt_tokens=8, max_output_tokens=8)
    recording.refused.append((refused, Refusal("max_num_queued_reqs", 1.0)))
    return recording


def _served(
    name: str, index: int, prompt: int, tokens: int, at_ms: tuple[int, ...], segments: list[list[int]], *,
    finish_reason: str = "length", context_ms: int = 0, tool_ms: int = 0, cached: int = 0,
) -> Sequence:  # fmt: skip
    """at_ms: arrival, queued, scheduled, prompt done, first token, last token, end."""
    spec = RequestSpec(
        request_id=name,
        arrival_ns=moment(at_ms[0]),
        prompt_tokens=prompt,
        max_output_tokens=tokens,
        context_ns=context_ms * MS,
        tools=(ToolCall(None, tool_ms * MS),) if tool_ms else (),
    )
    sequence = Sequence(spec, index)
    sequence.state = State.FINISHED
    sequence.output_tokens = tokens
    sequence.cached_tokens = cached
    (sequence.queued_ns, sequence.scheduled_ns, sequence.prefilled_ns, sequence.first_token_ns, sequence.last_token_ns,
     sequence.finished_ns) = (moment(ms) for ms in at_ms[1:])  # fmt: skip
    sequence.segments = segments
    sequence.finish_reason = finish_reason
    if tool_ms:
        sequence.external.append((moment(at_ms[5]), moment(at_ms[5] + tool_ms)))
    return sequence
