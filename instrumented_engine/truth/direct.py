"""Direct effects: every admission, batch and preemption stays as it was, only a resource's time leaves the steps.

A request gains what the steps it was part of lose, from its first to its last one, its own waits after a preemption and the tools
inside its stream left out. For the wait from its arrival (or from the end of a tool inside its stream) to the end of the step that
ran then it gains that share of the step's loss. Effects are at least 0, and those of two resources overlap where both could end a step.

Others' prompts: in a step in which the request decodes all prompt tokens go, in one that computes its own prompt all but its own
chunk. A step between its own chunks, or its own tokens, that gave it nothing counts whole where others' prompts were in it: without
them the request would have had its tokens. The step that ran at its arrival counts too: until its end the engine does not look at
the queue, so that wait has no reason of waiting and is not what the engine reports as queue by reason. `compute` is asked of the step
without those tokens: the compute of others' prompts is interference, and counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phasewise.instrumented_engine.executors.time_law import LAW_COLUMNS
from phasewise.instrumented_engine.recording import Floats, Ints
from phasewise.instrumented_engine.truth.parts import (
    AFTER,
    BETWEEN,
    FIRST,
    PARTS,
    PROMPT,
    TOKEN,
    TOKENS,
    TURN,
    first_token_steps,
    gathered,
    membership,
    running_step,
    summed,
)
from phasewise.instrumented_engine.truth.run import PROMPT_COLUMNS, Run

# Taken from the step as it was; compute and others' prompts are handled apart.
STEP_RESOURCES = ("weight_bytes", "kv_bytes", "host", "communication", "cold_start")
RESOURCES = ("compute", *STEP_RESOURCES, "others_prefill", "context", "external")
_EVERY = (PROMPT, TOKEN, BETWEEN, TURN)


@dataclass(frozen=True, slots=True)
class Direct:
    """Seconds a served request would gain, [PARTS, requests] each.

    prompt: in the steps that computed its prompt or recomputed it, and before; token: in those that gave it a token.
    """

    prompt: Mapping[str, Floats]
    token: Mapping[str, Floats]

    def of(self, resource: str) -> Floats:
        return self.prompt[resource] + self.token[resource]


def direct_effects(run: Run) -> Direct:
    """All of RESOURCES."""
    member = membership(run)
    running = running_step(run)
    columns = {name: run.steps[name] for name in LAW_COLUMNS}
    columns["number"] = np.arange(len(run.noise), dtype=np.int64)
    seconds = _timed(run, columns, None, run.noise)
    alone = columns | {name: np.zeros_like(columns[name]) for name in PROMPT_COLUMNS}
    without_prompts = _timed(run, alone, None, run.noise)
    nothing = np.zeros((PARTS, len(run.served)))
    prompt: dict[str, Floats] = {}
    token: dict[str, Floats] = {}

    def waited(saved_s: Floats, part: int) -> Floats:
        use = np.flatnonzero(running.part == part)
        gained = saved_s[running.step[use]] * running.share[use]
        return gathered(run, running.row[use], running.part[use], gained)

    for resource in STEP_RESOURCES:
        saved = np.clip(seconds - _timed(run, columns, resource, run.noise), 0.0, None)
        prompt[resource] = summed(run, member, saved, (PROMPT, BETWEEN)) + waited(saved, FIRST)
        token[resource] = summed(run, member, saved, (TOKEN, TURN)) + waited(saved, TOKENS)

    others, own_compute = _chunk_savings(run, columns, seconds)
    saved = np.clip(seconds - without_prompts, 0.0, None)
    filled = columns["prefill_tokens"] > 0
    whole = np.where(filled, seconds, 0.0)
    prompt["others_prefill"] = others + summed(run, member, whole, (BETWEEN,)) + waited(saved, FIRST)
    token["others_prefill"] = (
        summed(run, member, saved, (TOKEN,)) + summed(run, member, whole, (TURN,)) + waited(saved, TOKENS)
    )
    saved = np.clip(without_prompts - _timed(run, alone, "compute", run.noise), 0.0, None)
    unfilled = np.where(filled, 0.0, saved)  # where prompts were in it, the whole of a step that gave nothing is theirs
    prompt["compute"] = own_compute + summed(run, member, unfilled, (BETWEEN,)) + waited(saved, FIRST)
    token["compute"] = (
        summed(run, member, saved, (TOKEN,)) + summed(run, member, unfilled, (TURN,)) + waited(saved, TOKENS)
    )

    prompt["context"], prompt["external"] = _own_durations(run)
    token["context"] = token["external"] = nothing
    return Direct(prompt, token)


def left_over_s(run: Run) -> Floats:
    """[PARTS, requests]: seconds of the steps a request was part of; what all direct effects of steps are measured against."""
    return summed(run, membership(run), run.steps["duration_ns"] / 1e9, _EVERY)


def _timed(run: Run, columns: Mapping[str, Ints], without: str | None, noise: Floats) -> Floats:
    return run.law.seconds_of(columns, without=without) * noise


def _chunk_savings(run: Run, columns: Mapping[str, Ints], seconds: Floats) -> tuple[Floats, Floats]:
    """By own chunk: what the others' chunks cost the step, and the compute of what is left."""
    row_of = np.full(max((one.index for one in run.served), default=-1) + 1, -1, dtype=np.int64)
    row_of[[one.index for one in run.served]] = np.arange(len(run.served))
    chunks = run.chunks
    known = chunks["request"] < len(row_of)
    row = np.where(known, row_of[np.minimum(chunks["request"], len(row_of) - 1)], -1)
    use = np.flatnonzero(row >= 0)
    step, row = chunks["step"][use], row[use]
    new, past = chunks["new_tokens"][use], chunks["past_tokens"][use]
    own = {name: columns[name][step] for name in ("decode_sequences", "context_tokens")} | {
        "number": step,
        "prefill_tokens": new,
        "prefill_pairs": new * past + new * (new + 1) // 2,
        "prefill_past_tokens": past,
        "chunks": np.ones_like(new),
        "last_chunks": chunks["last"][use],
    }
    left = _timed(run, own, None, run.noise[step])
    without_compute = _timed(run, own, "compute", run.noise[step])
    part = np.where(step <= first_token_steps(run)[row], FIRST, TOKENS).astype(np.int64)
    others = gathered(run, row, part, np.clip(seconds[step] - left, 0.0, None))
    return others, gathered(run, row, part, np.clip(left - without_compute, 0.0, None))


def _own_durations(run: Run) -> tuple[Floats, Floats]:
    """Context stage and tools of each request, as long as they were; tools that overlap are counted once."""
    context = np.zeros((PARTS, len(run.served)))
    external = np.zeros((PARTS, len(run.served)))
    for row, one in enumerate(run.served):
        context[FIRST, row] = one.spec.context_ns / 1e9
        first, last = one.first_token_ns, one.last_token_ns
        reached = 0
        for start, end in sorted(one.external):
            part = FIRST if first is None or start < first else TOKENS if last is None or start < last else AFTER
            external[part, row] += max(0, end - max(start, reached)) / 1e9
            reached = max(reached, end)
    return context, external
