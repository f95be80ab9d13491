"""What a step leaves on the sequences that were in it: counters, times, segments. The hottest loop of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Items

from phasewise.instrumented_engine.plan import PromptChunk
from phasewise.instrumented_engine.scheduling.waiting import Place
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.telemetry import DECODE, PREFILL, RECOMPUTE


def decoded(decodes: Items[Sequence], step: int, now_ns: int) -> list[Sequence]:
    """One token each; returns those that have reached their limit."""
    ended = []
    before = step - 1
    for sequence in decodes:
        sequence.computed_tokens += 1
        tokens = sequence.output_tokens = sequence.output_tokens + 1
        last = sequence.last_token_ns
        assert last is not None
        if now_ns - last > sequence.longest_gap_ns:
            sequence.longest_gap_ns = now_ns - last
        sequence.last_token_ns = now_ns
        segment = sequence.segments[-1]
        if segment[2] == before and segment[0] == DECODE:
            segment[2] = step
        else:
            sequence.segments.append([DECODE, step, step])
        if tokens >= sequence.mark.limit:
            ended.append(sequence)
    return ended


def prefilled(chunk: PromptChunk, step: int, start_ns: int, now_ns: int) -> bool:
    """A chunk is computed, and with the last one the next token is there. True: it has reached its limit."""
    sequence = chunk.sequence
    sequence.computed_tokens += chunk.new_tokens
    phase = RECOMPUTE if chunk.recompute else PREFILL
    segments = sequence.segments
    if segments and segments[-1][0] == phase and segments[-1][2] == step - 1:
        segments[-1][2] = step
    else:
        segments.append([phase, step, step])
    if sequence.prefilled_ns is None:
        sequence.chunks.append((start_ns, now_ns))
    if not chunk.last:
        return False
    if sequence.prefilled_ns is None:
        sequence.prefilled_ns = now_ns
    if sequence.first_token_ns is None:
        sequence.first_token_ns = now_ns
    else:
        assert sequence.last_token_ns is not None
        sequence.longest_gap_ns = max(sequence.longest_gap_ns, now_ns - sequence.last_token_ns)
    sequence.last_token_ns = now_ns
    sequence.output_tokens += 1
    place: Place = sequence.mark
    return sequence.output_tokens >= place.limit
