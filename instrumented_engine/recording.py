"""What one run of the engine leaves behind: its requests as they go on the wire, its steps as columns, and who was in which.

The columns hold what a step was made of, so that its time can be asked again with one resource taken away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phasewise.instrumented_engine.plan import StepPlan
from phasewise.instrumented_engine.sequence import Refusal, RequestSpec, Sequence
from phasewise.instrumented_engine.telemetry import StepTelemetry

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

STEP_COLUMNS = (
    "start_ns", "duration_ns", "prefill_tokens", "prefill_pairs", "prefill_past_tokens", "chunks", "last_chunks",
    "decode_sequences", "context_tokens", "running", "waiting_slot", "waiting_kv", "waiting_budget", "waiting_window",
    "waiting_policy", "slots_reserved", "kv_blocks_used", "preemptions", "schedule_ns",
)  # fmt: skip
CHUNK_COLUMNS = ("step", "request", "past_tokens", "new_tokens", "last", "recompute")


@dataclass(frozen=True, slots=True)
class StepComposition:
    """What the time of a step depends on. prefill_pairs: causal (query, key) pairs of the chunks; prefill_past_tokens: cached
    tokens their queries attend to; context_tokens: tokens attended by the decodes, those being produced included."""

    number: int
    prefill_tokens: int
    prefill_pairs: int
    prefill_past_tokens: int
    chunks: int
    last_chunks: int
    decode_sequences: int
    context_tokens: int


def composition(plan: StepPlan) -> StepComposition:
    """Of a plan, before it runs."""
    tokens = pairs = past = last = 0
    for chunk in plan.chunks:
        new, old = chunk.new_tokens, chunk.past_tokens
        tokens += new
        pairs += new * old + new * (new + 1) // 2
        past += old
        last += chunk.last
    context = 0
    for sequence in plan.decodes:
        context += sequence.computed_tokens
    context += len(plan.decodes)
    return StepComposition(plan.number, tokens, pairs, past, len(plan.chunks), last, len(plan.decodes), context)


@dataclass(slots=True)
class Recording:
    """Filled by the core while it runs. scheduler_timed: whether `schedule_ns` was measured (else it is 0 in the columns and
    absent on the wire). steps: rows of STEP_COLUMNS; chunks: rows of CHUNK_COLUMNS (request = index of arrival)."""

    kv_blocks_total: int
    scheduler_timed: bool = True
    steps: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    refused: list[tuple[RequestSpec, Refusal]] = field(default_factory=list)

    def add(self, plan: StepPlan, made_of: StepComposition, running: int, start_ns: int, duration_ns: int) -> None:
        """One executed step. running: sequences that could compute in it, without those that wait for a tool."""
        self.steps.append(
            (
                start_ns, duration_ns, made_of.prefill_tokens, made_of.prefill_pairs, made_of.prefill_past_tokens, made_of.chunks,
                made_of.last_chunks, made_of.decode_sequences, made_of.context_tokens, running, *plan.waiting,
                plan.slots_reserved, plan.kv_blocks_used, len(plan.preempted), plan.schedule_ns,
            )
        )  # fmt: skip
        number = plan.number
        for chunk in plan.chunks:
            self.chunks.append(
                (number, chunk.sequence.index, chunk.past_tokens, chunk.new_tokens, chunk.last, chunk.recompute)
            )

    def step_columns(self) -> dict[str, Ints]:
        """One array a column of STEP_COLUMNS; row = number of the step."""
        return _columns(self.steps, STEP_COLUMNS)

    def chunk_columns(self) -> dict[str, Ints]:
        return _columns(self.chunks, CHUNK_COLUMNS)

    def telemetry(self) -> list[StepTelemetry]:
        """The steps as they go on the wire; the scheduler's own time only where it was measured."""
        names = {
            "start_ns": "start_unix_ns",
            **{name: name for name in StepTelemetry.__dataclass_fields__ if name in STEP_COLUMNS},
        }
        if not self.scheduler_timed:
            del names["schedule_ns"]
        at = [(STEP_COLUMNS.index(ours), theirs) for ours, theirs in names.items()]
        return [StepTelemetry(**{theirs: row[index] for index, theirs in at}) for row in self.steps]


def _columns(rows: list[tuple[int, ...]], names: tuple[str, ...]) -> dict[str, Ints]:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(names))
    return {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(names)}
