"""Steps computed for real, on the CPU or a CUDA device: one packed forward pass over all tokens of a plan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from phasewise.instrumented_engine.attention import ChunkSpan, DecodeGroup, Kernel, PagedKv, StepAttention, causal_mask
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.llama.sampling import choose
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.plan import PromptChunk, StepOutcome, StepPlan
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.torch_import import torch
from phasewise.rules.errors import InputError, MachineError

Ints = npt.NDArray[np.int64]


class TorchExecutor:
    """Executor of `plan.py` over a KV cache of `config.kv_blocks` blocks; where blocks of a sequence lie makes no difference.

    kernel: attention with a full score matrix, or fused. seed: for requests that sample without a seed of their own.
    """

    def __init__(self, model: Llama, config: EngineConfig, *, kernel: Kernel = "fused", seed: int = 0) -> None:
        """Raises InputError where the engine allows longer sequences than the model, MachineError where the pool does not fit."""
        shape = model.config
        if config.max_model_tokens > shape.max_context_tokens:
            raise InputError(
                "engine settings",
                "max_model_tokens",
                f"{config.max_model_tokens} is above what the model was made for, {shape.max_context_tokens}",
                "lower it",
            )
        self.model = model
        self.kernel: Kernel = kernel
        self._seed = seed
        try:
            self.kv = PagedKv(
                shape.layers, config.kv_blocks, config.block_tokens, shape.kv_heads, shape.head_dim,
                model.dtype, str(model.device),
            )  # fmt: skip
        except RuntimeError as problem:  # torch has no narrower error on the CPU
            wanted = shape.kv_bytes_per_token(model.dtype.itemsize) * config.kv_blocks * config.block_tokens
            raise MachineError(
                f"a KV pool of {wanted / 2**30:.1f} GiB does not fit on {model.device} (lower kv_blocks)"
            ) from problem

    def execute(self, plan: StepPlan) -> StepOutcome:
        """The step's tokens, and its time by the wall clock."""
        began = time.perf_counter_ns()
        with torch.inference_mode():
            logits = self.logits(plan)
            tokens = choose(logits, plan.sampled, self._seed) if len(logits) else []
        if not tokens and self.model.device.type == "cuda":
            torch.cuda.synchronize(
                self.model.device
            )  # reading tokens waits for the device; without any, nothing else does
        return StepOutcome(time.perf_counter_ns() - began, tokens)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """One row for each of `plan.sampled`, float32 [R, V]; K and V of the step's tokens are in the cache afterwards."""
        block_tokens, device = self.kv.block_tokens, self.model.device
        parts = [_decode_part(sequence, block_tokens) for sequence in plan.decodes]
        parts += [_chunk_part(chunk, block_tokens) for chunk in plan.chunks]
        step = torch.from_numpy(np.concatenate(parts, axis=1)).to(device)  # one transfer: [3, T]
        tokens, positions, slots = step[0], step[1], step[2]
        chunks, rows = [], list(range(len(plan.decodes)))
        start = len(plan.decodes)
        for chunk in plan.chunks:
            chunks.append(self._span(chunk, start))
            start += chunk.new_tokens
            if chunk.last:
                rows.append(start - 1)
        attention = StepAttention(self.kv, self.kernel, slots, self._groups(plan.decodes), chunks)
        return self.model.forward(tokens, positions, attention, torch.tensor(rows, dtype=torch.int64, device=device))

    def _span(self, chunk: PromptChunk, start: int) -> ChunkSpan:
        device, context = self.model.device, chunk.past_tokens + chunk.new_tokens
        blocks = chunk.sequence.blocks[: -(-context // self.kv.block_tokens)]
        table = torch.tensor(blocks, dtype=torch.int64, device=device)
        allowed = causal_mask(chunk.new_tokens, context, device) if chunk.past_tokens else None
        return ChunkSpan(start, chunk.new_tokens, context, table, allowed)

    def _groups(self, decodes: Items[Sequence]) -> list[DecodeGroup]:
        """By powers of two of their blocks, so that padding to the longest of a group at most doubles what is read."""
        members: dict[int, list[int]] = defaultdict(list)
        used = [sequence.computed_tokens // self.kv.block_tokens + 1 for sequence in decodes]
        for row, blocks in enumerate(used):
            members[(blocks - 1).bit_length()].append(row)
        return [self._group(decodes, rows, max(used[row] for row in rows)) for _, rows in sorted(members.items())]

    def _group(self, decodes: Items[Sequence], rows: list[int], blocks: int) -> DecodeGroup:
        table: Ints = np.zeros((len(rows), blocks), dtype=np.int64)
        contexts: Ints = np.empty(len(rows), dtype=np.int64)
        for at, row in enumerate(rows):
            sequence = decodes[row]
            mine = sequence.blocks[:blocks]
            table[at, : len(mine)] = mine
            contexts[at] = sequence.computed_tokens + 1
        device, longest = self.model.device, int(contexts.max())
        allowed = None
        if int(contexts.min()) < longest:
            seen = np.arange(longest) < contexts[:, None]
            allowed = torch.from_numpy(seen).to(device)[:, None, None]
        where = torch.tensor(rows, dtype=torch.int64, device=device)
        return DecodeGroup(where, torch.from_numpy(table).to(device), longest, allowed)


def _token(sequence: Sequence, position: int) -> int:
    prompt = sequence.spec.prompt
    assert prompt is not None, "a torch executor needs token ids"
    return prompt[position] if position < len(prompt) else sequence.output[position - len(prompt)]


def _decode_part(sequence: Sequence, block_tokens: int) -> Ints:
    """[3, 1]: token, position, slot of the newest token."""
    position = sequence.computed_tokens
    block, offset = divmod(position, block_tokens)
    assert block < len(sequence.blocks), f"{sequence.spec.request_id} decodes without a block for its token"
    slot = sequence.blocks[block] * block_tokens + offset
    return np.array([[_token(sequence, position)], [position], [slot]], dtype=np.int64)


def _chunk_part(chunk: PromptChunk, block_tokens: int) -> Ints:
    """[3, S]: tokens, positions and slots; of the prompt, and after a preemption of what had been generated as well."""
    sequence, past, new = chunk.sequence, chunk.past_tokens, chunk.new_tokens
    prompt = sequence.spec.prompt
    assert prompt is not None, "a torch executor needs token ids"
    tokens = list(prompt[past : past + new])
    if len(tokens) < new:
        begun = max(past - len(prompt), 0)
        tokens += sequence.output[begun : begun + new - len(tokens)]
    assert len(tokens) == new, f"{sequence.spec.request_id} has no {new} tokens after {past}"
    positions = np.arange(past, past + new, dtype=np.int64)
    blocks, offsets = np.divmod(positions, block_tokens)
    assert blocks[-1] < len(sequence.blocks), f"{sequence.spec.request_id} is prefilled without blocks for its tokens"
    slots = np.array(sequence.blocks, dtype=np.int64)[blocks] * block_tokens + offsets
    return np.stack([np.array(tokens, dtype=np.int64), positions, slots])
