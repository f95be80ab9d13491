"""Runs of the torch executor against a plain full forward pass: the reference, near ties, and a driver of made-up steps.

A token may differ from the reference's only where the reference's two best logits are less than NEAR apart; the reference's token
is then forced, so that one near tie is one difference and not a different text.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from phasewise.instrumented_engine.attention import Kernel
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.plan import PromptChunk, StepOutcome, StepPlan
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.instrumented_engine.torch_import import torch

torch.set_num_threads(1)  # more threads only wait for each other on small matrices or a busy machine
NEAR = 1e-3
MOST_NEAR_RATIO = 0.01


def tiny(**changes: object) -> LlamaConfig:
    """Two layers, two query heads a KV head; vocabulary of 300."""
    filled = {
        "vocab": 300, "hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 80,
        "max_context_tokens": 256, **changes,
    }  # fmt: skip
    return LlamaConfig(**filled)  # type: ignore[arg-type]


def request(name: str, prompt: Iterable[int], output_tokens: int, **changes: object) -> RequestSpec:
    tokens = tuple(prompt)
    filled = {
        "request_id": name, "arrival_ns": 0, "prompt_tokens": len(tokens), "max_output_tokens": output_tokens,
        "prompt": tokens, **changes,
    }  # fmt: skip
    return RequestSpec(**filled)  # type: ignore[arg-type]


def prompt(rng: random.Random, tokens: int, vocab: int = 300) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab) for _ in range(tokens))


@dataclass
class Tally:
    """tokens: compared; near: positions at which the reference itself is nearly tied; differed: where that mattered."""

    tokens: int = 0
    near: int = 0
    differed: int = 0

    def close(self, what: str) -> None:
        """Prints the count and fails above 1 %; a test that compares nothing proves nothing."""
        print(f"{what}: {self.tokens} tokens, {self.near} near ties, {self.differed} differed")
        assert self.tokens > 0
        assert self.near <= MOST_NEAR_RATIO * self.tokens, f"{self.near} of {self.tokens} tokens are near ties"


class Reference:
    """Greedy continuation by full forward passes, kept for prompts that come again."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[tuple[int, int, bool]]] = {}

    def at(self, prompt: tuple[int, ...], position: int) -> tuple[int, int, bool]:
        """(best token, second best, nearly tied) of the output token at `position`."""
        known = self._known.setdefault(prompt, [])
        while len(known) <= position:
            logits = self._model.forward_full([*prompt, *(token for token, *_ in known)])
            known.append(_best(logits[-1]))
        return known[position]

    def learn(self, prompt: tuple[int, ...], guess: list[int]) -> None:
        """Saves passes where the model is large: one pass over prompt and guess tells the best token after each position, which
        counts as far as the guess has itself been the best."""
        known = self._known.setdefault(prompt, [])
        logits = self._model.forward_full([*prompt, *guess])[len(prompt) - 1 :]
        known.clear()
        for position in range(len(guess)):
            known.append(_best(logits[position]))
            if known[-1][0] != guess[position]:
                break


def _best(logits: torch.Tensor) -> tuple[int, int, bool]:
    best, second = logits.topk(2).indices.tolist()
    return best, second, bool(logits[best] - logits[second] < NEAR)


@dataclass
class CheckedExecutor:
    """Runs each step for real and compares every token at once."""

    inner: TorchExecutor
    reference: Reference
    tally: Tally
    plans: list[tuple[int, int, bool, bool]] = field(default_factory=list)  # chunks, decodes, any recompute, any past

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.inner.execute(plan)
        tokens = outcome.tokens
        assert tokens is not None
        assert len(tokens) == len(plan.sampled)
        checked = [self._checked(sequence, token) for sequence, token in zip(plan.sampled, tokens, strict=True)]
        chunks = plan.chunks
        self.plans.append(
            (len(chunks), len(plan.decodes), any(c.recompute for c in chunks), any(c.past_tokens for c in chunks))
        )
        return StepOutcome(outcome.duration_ns, checked)

    def _checked(self, sequence: Sequence, token: int) -> int:
        prompt = sequence.spec.prompt
        assert prompt is not None
        best, second, near = self.reference.at(prompt, len(sequence.output))
        self.tally.tokens += 1
        self.tally.near += near
        if token != best:
            assert near, f"{sequence.spec.request_id}: token {len(sequence.output)} is {token}, reference says {best}"
            assert token == second
            self.tally.differed += 1
        return best


def checked(model: Llama, config: EngineConfig, tally: Tally, kernel: Kernel = "fused") -> CheckedExecutor:
    return CheckedExecutor(TorchExecutor(model, config, kernel=kernel), Reference(model), tally)


class StepClock:
    """Virtual time: a step takes as long as it took."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, duration_ns: int) -> None:
        self._now_ns += duration_ns


class MadeUpSteps:
    """Steps no sensible scheduler would make: random chunks, batches, preemptions and block numbers, prefixes shared by block.

    It stands beside the real scheduler so that the executor is proved for any plan.
    """

    def __init__(self, executor: CheckedExecutor, config: EngineConfig, rng: random.Random) -> None:
        self._executor, self._block_tokens, self._rng = executor, config.block_tokens, rng
        self._free = list(range(config.kv_blocks))
        rng.shuffle(self._free)
        self._owners: dict[int, int] = {}  # block -> sequences that use it
        self._step = 0

    def run(self, specs: list[RequestSpec], *, preempt_ratio: float = 0.1) -> list[Sequence]:
        live = [Sequence(spec, index) for index, spec in enumerate(specs)]
        done: list[Sequence] = []
        while live:
            plan = StepPlan(self._step)
            self._step += 1
            for sequence in live:
                if self._rng.random() < 0.3:
                    continue
                if sequence.computed_tokens and self._rng.random() < preempt_ratio:
                    self._preempt(sequence)
                elif sequence.decoding:
                    self._grow(sequence, sequence.computed_tokens + 1)
                    plan.decodes.append(sequence)
                else:
                    plan.chunks.append(self._chunk(sequence, live))
            if not plan.decodes and not plan.chunks:
                continue
            tokens = self._executor.execute(plan).tokens
            assert tokens is not None
            self._complete(plan, list(tokens))
            for sequence in [one for one in live if one.output_tokens == one.spec.max_output_tokens]:
                live.remove(sequence)
                self._release(sequence)
                done.append(sequence)
        assert len(self._free) + len(self._owners) == len(set(self._free)) == len(self._free)
        return done

    def _chunk(self, sequence: Sequence, live: list[Sequence]) -> PromptChunk:
        if not sequence.blocks:
            self._share_prefix(sequence, live)
        past = sequence.computed_tokens
        new = self._rng.randint(1, sequence.target_tokens - past)
        self._grow(sequence, past + new)
        last = past + new == sequence.target_tokens
        return PromptChunk(sequence, past, new, last, recompute=sequence.preemptions > 0)

    def _share_prefix(self, sequence: Sequence, live: list[Sequence]) -> None:
        """Takes over the full blocks another sequence has computed for the same tokens, all but the last token's."""
        mine = self._tokens(sequence)
        for other in live:
            theirs, full = self._tokens(other), 0
            most = min(other.computed_tokens, len(mine) - 1) // self._block_tokens
            while full < most and theirs[: (full + 1) * self._block_tokens] == mine[: (full + 1) * self._block_tokens]:
                full += 1
            if other is not sequence and full:
                sequence.blocks = other.blocks[:full]
                sequence.computed_tokens = full * self._block_tokens
                for block in sequence.blocks:
                    self._owners[block] += 1
                return

    def _tokens(self, sequence: Sequence) -> list[int]:
        assert sequence.spec.prompt is not None
        return [*sequence.spec.prompt, *sequence.output]

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.blocks) * self._block_tokens < tokens:
            block = self._free.pop()
            self._owners[block] = 1
            sequence.blocks.append(block)

    def _release(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                del self._owners[block]
                self._free.insert(0, block)
        sequence.blocks = []

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.preemptions += 1
        sequence.computed_tokens = 0
        sequence.target_tokens = sequence.total_tokens

    def _complete(self, plan: StepPlan, tokens: list[int]) -> None:
        for sequence in plan.decodes:
            sequence.computed_tokens += 1
        for chunk in plan.chunks:
            chunk.sequence.computed_tokens += chunk.new_tokens
        for sequence, token in zip(plan.sampled, tokens, strict=True):
            sequence.output.append(token)
            sequence.output_tokens += 1
