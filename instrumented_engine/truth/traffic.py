"""The requests of a scenario, before they are given a time: lengths, prefixes, context, tools, classes."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phasewise.instrumented_engine.recording import Floats, Ints
from phasewise.instrumented_engine.sequence import RequestSpec, ToolCall
from phasewise.instrumented_engine.truth.arrivals import unit_gaps
from phasewise.instrumented_engine.truth.lengths import PrefixedPrompt, block_hashes, lengths
from phasewise.instrumented_engine.truth.machines import BLOCK_TOKENS
from phasewise.instrumented_engine.truth.published import MOONCAKE_BLOCK_TOKENS

START_NS = 1_796_083_200 * 10**9  # 1 December 2026; a virtual clock may begin anywhere after 0


@dataclass(frozen=True, slots=True)
class Source:
    """Where lengths come from and where they are cut: longer prompts than a model takes, answers that only make the run long."""

    name: str
    longest_prompt: int = 16_384
    longest_output: int = 1_024
    shortest_prompt: int = 1
    shortest_output: int = 1


def drawn_lengths(source: Source, rng: np.random.Generator, count: int, folder: Path | None) -> Ints:
    """[count, 2], cut. Rows shorter than the source's shortest are drawn again."""
    table = lengths(source.name, folder)
    rows = table.draw(rng, count)
    for _ in range(40):
        short = np.flatnonzero((rows[:, 0] < source.shortest_prompt) | (rows[:, 1] < source.shortest_output))
        if not len(short):
            break
        rows[short] = table.draw(rng, len(short))
    rows[:, 0] = np.clip(rows[:, 0], source.shortest_prompt, source.longest_prompt)
    rows[:, 1] = np.clip(rows[:, 1], source.shortest_output, source.longest_output)
    return rows


def requests(rows: Ints, longest_output: int) -> tuple[RequestSpec, ...]:
    """Plain requests of these lengths, all at START_NS; a client asks for `longest_output` at most, as clients do."""
    return tuple(
        RequestSpec(
            request_id=f"r{number}",
            arrival_ns=START_NS,
            prompt_tokens=int(prompt),
            max_output_tokens=max(longest_output, int(output)),
            stop_after_tokens=int(output),
        )
        for number, (prompt, output) in enumerate(rows.tolist())
    )


def prefixed(prompts: Items[PrefixedPrompt], longest_prompt: int, longest_output: int) -> tuple[RequestSpec, ...]:
    """Requests whose equal beginnings the engine can share."""
    found = []
    for number, prompt in enumerate(prompts):
        cut = PrefixedPrompt(
            min(prompt.prompt_tokens, longest_prompt), min(prompt.output_tokens, longest_output), prompt.block_ids
        )
        found.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_ns=START_NS,
                prompt_tokens=cut.prompt_tokens,
                max_output_tokens=longest_output,
                stop_after_tokens=cut.output_tokens,
                block_hashes=block_hashes(cut, BLOCK_TOKENS),
            )
        )
    return tuple(found)


def over_documents(rng: np.random.Generator, documents: Ints, questions: Ints) -> list[PrefixedPrompt]:
    """One prompt a row of `questions` (question tokens, answer tokens), each behind one of `documents` (tokens), popular ones more
    often (1/rank). Real traces have no such table: the joint is invented, the lengths are not."""
    blocks = np.maximum(documents // MOONCAKE_BLOCK_TOKENS, 1)
    first_block = np.concatenate(([0], np.cumsum(blocks)))
    weight = 1.0 / np.arange(1, len(documents) + 1)
    chosen = rng.choice(len(documents), size=len(questions), p=weight / weight.sum())
    fresh = int(first_block[-1])
    found = []
    for which, (question, answer) in zip(chosen.tolist(), questions.tolist(), strict=True):
        shared = int(blocks[which])
        own = -(-question // MOONCAKE_BLOCK_TOKENS)
        ids = (*range(int(first_block[which]), int(first_block[which]) + shared), *range(fresh, fresh + own))
        fresh += own
        found.append(PrefixedPrompt(shared * MOONCAKE_BLOCK_TOKENS + question, answer, ids))
    return found


def with_context(specs: tuple[RequestSpec, ...], seconds: Floats) -> tuple[RequestSpec, ...]:
    return tuple(
        replace(spec, context_ns=round(value * 1e9)) for spec, value in zip(specs, seconds.tolist(), strict=True)
    )


def with_tools(
    specs: tuple[RequestSpec, ...],
    rng: np.random.Generator,
    share: float,
    mean_s: float,
    before_share: float,
    most_calls: int,
) -> tuple[RequestSpec, ...]:
    """`share` of the requests call 1 to `most_calls` tools, log-normal of mean `mean_s`, inside the stream at random places;
    `before_share` of the calls come before the request enters the queue instead."""
    found = []
    for spec in specs:
        calls: list[ToolCall] = []
        output = spec.stop_after_tokens or spec.max_output_tokens
        if rng.random() < share:
            for _ in range(int(rng.integers(1, most_calls + 1))):
                duration = max(1, round(skewed(rng, mean_s, 0.8, 1)[0] * 1e9))
                inside = output > 1 and rng.random() >= before_share
                calls.append(ToolCall(int(rng.integers(1, output)) if inside else 0, duration))
        found.append(replace(spec, tools=tuple(sorted(calls, key=lambda call: call.after_tokens or 0))))
    return tuple(found)


def skewed(rng: np.random.Generator, mean: float, sigma: float, count: int) -> Floats:
    """Log-normal of this mean; sigma: standard deviation of the logarithm."""
    return mean * np.exp(rng.standard_normal(count) * sigma - sigma**2 / 2)


def timed(
    specs: tuple[RequestSpec, ...], rate_per_s: float, pattern: str, rng: np.random.Generator, folder: Path | None
) -> tuple[RequestSpec, ...]:
    """Gives each request its arrival, `rate_per_s` on average."""
    gaps = unit_gaps(pattern, rng, len(specs), folder) / rate_per_s
    at_ns = START_NS + np.rint(np.cumsum(gaps) * 1e9).astype(np.int64)
    return tuple(replace(spec, arrival_ns=int(at)) for spec, at in zip(specs, at_ns.tolist(), strict=True))
