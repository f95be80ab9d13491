"""Laws of step time whose answers can be worked out by hand, and requests to run under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phasewise.instrumented_engine.recording import Floats, Ints, StepComposition
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall

MS = 10**6
START_NS = 10**12


@dataclass(frozen=True, slots=True)
class PartsLaw:
    """A step takes the sum of its parts: constants for weights, host and collectives, one amount a computed token, one a token that
    decodes attend to, and an extra for each of the first `cold_steps` steps. A step without tokens takes nothing."""

    weights_s: float = 0.0
    host_s: float = 0.0
    communication_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    cold_s: float = 0.0
    cold_steps: int = 0

    def seconds(self, composition: StepComposition) -> float:
        tokens = composition.prefill_tokens + composition.decode_sequences
        if not tokens:
            return 0.0
        cold_s = self.cold_s if composition.number < self.cold_steps else 0.0
        work_s = tokens * self.token_s + composition.context_tokens * self.context_s
        return self.weights_s + self.host_s + self.communication_s + work_s + cold_s

    def seconds_of(self, columns: Mapping[str, Ints], without: str | None = None) -> Floats:
        tokens = columns["prefill_tokens"] + columns["decode_sequences"]
        number = columns["number"]
        parts = {
            "weight_bytes": np.full(len(tokens), self.weights_s),
            "host": np.full(len(tokens), self.host_s),
            "communication": np.full(len(tokens), self.communication_s),
            "compute": tokens * self.token_s,
            "kv_bytes": columns["context_tokens"] * self.context_s,
            "cold_start": np.where(number < self.cold_steps, self.cold_s, 0.0),
        }
        kept = sum((part for name, part in parts.items() if name != without), start=np.zeros(len(tokens)))
        return np.where(tokens > 0, kept, 0.0)


def spec(
    number: int,
    at_s: float,
    prompt: int,
    output: int,
    *,
    context_s: float = 0.0,
    tools: tuple[ToolCall, ...] = (),
    priority: int = 0,
) -> RequestSpec:
    """A request by its lengths, `at_s` seconds after the start."""
    return RequestSpec(
        request_id=f"r{number}",
        arrival_ns=START_NS + round(at_s * 1e9),
        prompt_tokens=prompt,
        max_output_tokens=output,
        stop_after_tokens=output,
        context_ns=round(context_s * 1e9),
        tools=tools,
        priority=priority,
    )
