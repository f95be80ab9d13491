"""One generation: what was asked, and where it stands. Times are nanoseconds of the engine's clock (Unix time on the wire)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from phasewise.instrumented_engine.telemetry import QUEUE_REASONS


class State(Enum):
    CONTEXT = "context"  # not yet in the queue: history, tokenization, a tool before the stream
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"  # a tool works inside the stream; slot and blocks are kept
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call to the outside. after_tokens: output tokens before it; 0: before the request enters the queue; None: after the
    last token."""

    after_tokens: int | None
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a client asks for.

    prompt: token ids; None in simulation, where only lengths matter. stop_after_tokens: where generation ends by itself, known
    to the simulated executor only: no scheduling decision may look at it. block_hashes: one a full block of the prompt, each
    covering all before it (equal hash = equal prefix). priority: lower goes first. context_ns: time of the context stage.
    temperature 0: greedy; top_p: share of probability to sample from; seed: same seed, same draws, whatever the batch.
    """

    request_id: str
    arrival_ns: int
    prompt_tokens: int
    max_output_tokens: int
    prompt: tuple[int, ...] | None = None
    stop_after_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    block_hashes: tuple[int, ...] = ()
    priority: int = 0
    tenant: str | None = None
    request_class: str | None = None
    context_ns: int = 0
    tools: tuple[ToolCall, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an arrival was not taken (429), and when it is worth trying again. never: it cannot be served by this engine at all
    (400), however long the client waits; retry_after_s is 0 then. kind: which limit it was, one of few words for a label."""

    reason: str
    retry_after_s: float
    never: bool = False
    kind: Literal["queue_full", "queue_time", "kv_use", "never"] = "queue_full"


class Sequence:
    """A request inside the engine; only the scheduler changes it.

    computed_tokens: tokens whose KV lies in `blocks`; after a preemption it starts again at what the prefix cache still holds.
    target_tokens: tokens that must be computed before the next one can be sampled (prompt, and after a preemption what had
    been generated). waits_ns: time in the queue by QUEUE_REASONS; what the sum lacks was the wait for the running step to end.
    segments: [phase, first step, last step] as on the wire, growing.
    """

    __slots__ = (
        "block_hashes", "blocks", "cached_tokens", "chunks", "computed_tokens", "error", "external", "finish_reason",
        "finished_ns", "first_token_ns", "index", "last_token_ns", "longest_gap_ns", "mark", "output", "output_tokens",
        "preempted_ns", "preemptions", "prefilled_ns", "queued_ns", "scheduled_ns", "segments", "spec", "state",
        "target_tokens", "waits_ns",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec, index: int = 0) -> None:
        self.spec = spec
        self.index = index  # order of arrival in this engine
        self.state = State.CONTEXT
        self.blocks: list[int] = []
        self.block_hashes = spec.block_hashes
        self.computed_tokens = 0
        self.target_tokens = spec.prompt_tokens
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission
        self.output_tokens = 0
        self.output: list[int] = []  # token ids; empty in simulation
        self.preemptions = 0
        self.queued_ns: int | None = None
        self.scheduled_ns: int | None = None  # first time
        self.prefilled_ns: int | None = None  # end of the step that finished the prompt
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.preempted_ns: int | None = None
        self.finished_ns: int | None = None
        self.longest_gap_ns = 0
        self.waits_ns = [0] * len(QUEUE_REASONS)
        self.segments: list[list[int]] = []
        self.chunks: list[tuple[int, int]] = []  # the request's own prefill steps, start and end
        self.external: list[tuple[int, int]] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.mark: Any = None  # the scheduler's own note; typed there, since this loop is too hot for checks

    @property
    def decoding(self) -> bool:
        """All tokens but the newest are computed: the next step yields one token."""
        return self.computed_tokens >= self.target_tokens

    @property
    def total_tokens(self) -> int:
        return self.spec.prompt_tokens + self.output_tokens
