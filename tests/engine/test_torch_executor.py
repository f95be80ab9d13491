"""Greedy output of any batching, chunking, sharing and preemption equals a plain full forward pass, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_runs import CheckedExecutor, MadeUpSteps, Reference, Tally, checked, prompt, request, tiny

from phasewise.instrumented_engine.attention import Kernel
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig, RopeScaling
from phasewise.instrumented_engine.llama.weights import random_llama
from phasewise.instrumented_engine.plan import PromptChunk, StepPlan
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.rules.errors import InputError, MachineError

CONFIG = EngineConfig(block_tokens=4, kv_blocks=400, max_model_tokens=128)
MODEL = random_llama(tiny(), seed=1)
REFERENCE = Reference(MODEL)
KERNELS: tuple[Kernel, ...] = ("naive", "fused")
SHAPES = {
    "one KV head for all": tiny(kv_heads=1),
    "a KV head for each": tiny(kv_heads=4, layers=1),
    "tied": tiny(tied=True),
    "scaled rotary": tiny(rope_scaling=RopeScaling(kind="llama3", factor=8, original_max_tokens=32)),
    "three layers, three query heads a KV head": tiny(layers=3, heads=6, head_dim=8),
}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """Of all random plans of this file together: single runs are too short for a share of 1 %."""
    counted = Tally()
    yield counted
    counted.close("made-up steps")


def specs(rng: random.Random, count: int, output_tokens: int = 12, shared: int = 0) -> list[object]:
    begin = prompt(rng, shared)
    return [request(f"r{i}", begin + prompt(rng, rng.randint(1, 30)), output_tokens) for i in range(count)]


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), shared=st.sampled_from([0, 9, 24]))
@settings(max_examples=40, deadline=None)
def test_any_plan_gives_the_tokens_of_a_full_forward(
    kernel: Kernel, tally: Tally, seed: int, count: int, shared: int
) -> None:
    rng = random.Random(seed)
    executor = CheckedExecutor(TorchExecutor(MODEL, CONFIG, kernel=kernel), REFERENCE, tally)
    done = MadeUpSteps(executor, CONFIG, rng).run(specs(rng, count, shared=shared))  # type: ignore[arg-type]
    assert len(done) == count


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_shape_gives_the_tokens_of_a_full_forward(kernel: Kernel, shape: LlamaConfig) -> None:
    rng, counted = random.Random(7), Tally()
    executor = checked(random_llama(shape, seed=3), CONFIG, counted, kernel)
    MadeUpSteps(executor, CONFIG, rng).run(specs(rng, 10, output_tokens=24, shared=8))  # type: ignore[arg-type]
    counted.close(f"{kernel}")


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 128])
def test_any_block_size(block_tokens: int, tally: Tally) -> None:
    config = EngineConfig(block_tokens=block_tokens, kv_blocks=800, max_model_tokens=128)
    rng = random.Random(block_tokens)
    executor = CheckedExecutor(TorchExecutor(MODEL, config), REFERENCE, tally)
    MadeUpSteps(executor, config, rng).run(specs(rng, 4, shared=16))  # type: ignore[arg-type]
    assert any(recompute for *_, recompute, _ in executor.plans)
    assert any(past for *_, past in executor.plans)


def placed(name: str, tokens: int, blocks: list[int]) -> Sequence:
    sequence = Sequence(request(name, prompt(random.Random(name), tokens), 4))
    sequence.blocks = blocks
    return sequence


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_do_not_depend_on_what_else_is_in_the_step(kernel: Kernel) -> None:
    """Nothing leaks between sequences: neither through the packed axis nor through padding of the block table."""
    alone = TorchExecutor(MODEL, CONFIG, kernel=kernel)
    first = alone.logits(StepPlan(0, chunks=[PromptChunk(placed("a", 9, [5, 1, 7]), 0, 9, True)]))
    crowd = TorchExecutor(MODEL, CONFIG, kernel=kernel)
    others = [PromptChunk(placed(f"x{n}", n, list(range(20 * n, 20 * n + n))), 0, n, True) for n in (1, 13, 6)]
    together = crowd.logits(StepPlan(0, chunks=[*others, PromptChunk(placed("a", 9, [5, 1, 7]), 0, 9, True)]))
    torch.testing.assert_close(together[-1], first[0], rtol=1e-4, atol=1e-4)


def test_the_head_runs_for_prompts_that_end_only() -> None:
    executor = TorchExecutor(MODEL, CONFIG)
    sequence = placed("a", 9, [5, 1, 7])
    assert executor.logits(StepPlan(0, chunks=[PromptChunk(sequence, 0, 5, False)])).shape == (0, 300)
    assert executor.execute(StepPlan(0, chunks=[PromptChunk(sequence, 0, 5, False)])).tokens == []
    assert executor.logits(StepPlan(1, chunks=[PromptChunk(sequence, 5, 4, True)])).shape == (1, 300)


def test_a_step_writes_only_into_the_blocks_of_its_sequences() -> None:
    executor = TorchExecutor(MODEL, CONFIG)
    executor.execute(StepPlan(0, chunks=[PromptChunk(placed("a", 6, [5, 1]), 0, 6, True)]))
    touched = executor.kv.values.abs().sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist()
    assert touched == [1, 5]
    offsets = executor.kv.values[:, :, 1].abs().sum((0, 1, 3, 4)).nonzero().flatten().tolist()
    assert offsets == [0, 1], "six tokens: four in block 5, two in block 1"


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_stays_near_float32(kernel: Kernel) -> None:
    half = random_llama(tiny(), seed=1, dtype="bfloat16")
    for matrix, theirs in zip(half.matrices, MODEL.matrices, strict=True):
        matrix.copy_(theirs)
    executor = TorchExecutor(half, CONFIG, kernel=kernel)
    found = executor.logits(StepPlan(0, chunks=[PromptChunk(placed("a", 9, [5, 1, 7]), 0, 9, True)]))
    exact = TorchExecutor(MODEL, CONFIG).logits(
        StepPlan(0, chunks=[PromptChunk(placed("a", 9, [5, 1, 7]), 0, 9, True)])
    )
    assert executor.kv.values.dtype == torch.bfloat16
    assert float(torch.nn.functional.cosine_similarity(found, exact)) > 0.99


def test_the_step_says_how_long_it_took() -> None:
    outcome = TorchExecutor(MODEL, CONFIG).execute(
        StepPlan(0, chunks=[PromptChunk(placed("a", 9, [5, 1, 7]), 0, 9, True)])
    )
    assert 0 < outcome.duration_ns < 60 * 10**9


def test_sequences_longer_than_the_model_are_refused_at_the_start() -> None:
    with pytest.raises(InputError, match=r"max_model_tokens: 512 is above .* 256"):
        TorchExecutor(MODEL, EngineConfig(max_model_tokens=512))


def test_a_pool_that_does_not_fit_names_the_setting() -> None:
    with pytest.raises(MachineError, match="lower kv_blocks"):
        TorchExecutor(MODEL, EngineConfig(max_model_tokens=128, kv_blocks=10**12))


@pytest.mark.gpu
def test_cuda_gives_the_tokens_of_a_full_forward() -> None:
    rng, counted = random.Random(11), Tally()
    model = random_llama(tiny(head_dim=64, hidden=256), seed=5, device="cuda")
    executor = checked(model, CONFIG, counted)
    MadeUpSteps(executor, CONFIG, rng).run(specs(rng, 10, output_tokens=24, shared=8))  # type: ignore[arg-type]
    counted.close("CUDA, float32")
