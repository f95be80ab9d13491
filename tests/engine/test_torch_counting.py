"""`rules/counting.py` against what PyTorch really multiplies and moves.

FLOPs come from PyTorch's own counter, which counts every matrix product by its shape. It sees products of whole rectangles: where a
query is masked it was multiplied all the same. So causal pairs are proved exactly where no rectangle is larger than its causal
part (decodes, chunks of one token), and elsewhere the surplus is computed and stated. Bytes come from the sizes of the tensors
that enter the products and the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch_runs import prompt, request, tiny

from phasewise.instrumented_engine.attention import Kernel, PagedKv
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.llama.weights import random_llama
from phasewise.instrumented_engine.plan import PromptChunk, StepPlan
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.rules.counting import (
    Chunk,
    Precision,
    Work,
    attention_flops_per_pair,
    causal_pairs,
    head_weights,
    kv_bytes_per_token,
    linear_weight_bytes_read,
    step_work,
    stored_linear_weights,
    weight_bytes_stored,
)

aten = torch.ops.aten
P32 = Precision(weight_bits=32, kv_bits=32, activation_bits=32)
P16 = Precision(weight_bits=16, kv_bits=16, activation_bits=16)
SHAPES = {
    "grouped, untied": tiny(),
    "grouped, tied": tiny(tied=True),
    "one KV head": tiny(kv_heads=1, layers=3),
    "a KV head each, tied": tiny(kv_heads=4, tied=True),
    "wide heads": tiny(heads=3, kv_heads=1, head_dim=32, hidden=40, ffn=56, vocab=301),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


class Bench:
    """One model with a cache, and steps made by hand."""

    def __init__(self, shape: LlamaConfig, kernel: Kernel = "naive", dtype: str = "float32") -> None:
        self.shape = shape.as_model("tiny", "fp32")
        config = EngineConfig(block_tokens=4, kv_blocks=120, max_model_tokens=256)
        self.executor = TorchExecutor(random_llama(shape, seed=1, dtype=dtype), config, kernel=kernel)
        self._free = iter(range(120))

    def sequence(self, computed: int, more: int) -> Sequence:
        """With `computed` tokens in the cache (zeros there do: shapes are what counts) and blocks for `more`."""
        prompt_tokens = computed + more
        made = Sequence(request("r", prompt(random.Random(1), prompt_tokens), 9))
        made.blocks = [next(self._free) for _ in range(-(-prompt_tokens // 4))]
        made.computed_tokens = computed
        return made

    def plan(self, chunks: Iterable[Chunk] = (), contexts: Iterable[int] = ()) -> StepPlan:
        """The step that `step_work` is asked about with the same arguments."""
        parts = [
            PromptChunk(
                self.sequence(chunk.past_tokens, chunk.new_tokens), chunk.past_tokens, chunk.new_tokens, chunk.last
            )
            for chunk in chunks
        ]
        return StepPlan(0, chunks=parts, decodes=[self.sequence(context - 1, 1) for context in contexts])

    def flops(self, plan: StepPlan) -> tuple[int, int]:
        """(linear layers and head, attention) as PyTorch counts them."""
        fused = aten._scaled_dot_product_flash_attention_for_cpu

        def rectangle(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
            return int(sdpa_flop_count(q, k, v))

        counter = FlopCounterMode(display=False, custom_mapping={fused: rectangle})
        with torch.no_grad(), counter:
            self.executor.logits(plan)
        by_operator = counter.get_flop_counts()["Global"]
        linear = sum(by_operator.pop(name, 0) for name in (aten.mm, aten.addmm))
        attention = sum(by_operator.pop(name, 0) for name in (aten.bmm, fused))
        assert not by_operator, f"products of other kinds: {by_operator}"
        return linear, attention


@shapes
@pytest.mark.parametrize(
    ("chunks", "contexts"),
    [
        ([Chunk(17)], []),
        ([Chunk(17, last=False)], []),
        ([Chunk(5, 12)], []),
        ([], [1]),
        ([], [9, 30, 2]),
        ([Chunk(7), Chunk(3, 4, last=False), Chunk(1, 20)], [5, 6, 41]),
    ],
    ids=["prompt", "chunk that does not end", "last chunk", "first decode", "decodes", "mixed step"],
)
def test_flops_of_linear_layers_and_head_are_exact(
    shape: LlamaConfig, chunks: list[Chunk], contexts: list[int]
) -> None:
    bench = Bench(shape)
    work = step_work(bench.shape, P32, chunks, contexts)
    assert bench.flops(bench.plan(chunks, contexts))[0] == work.linear.flops + work.head.flops


@shapes
@pytest.mark.parametrize("context", [1, 2, 4, 5, 33])
@pytest.mark.parametrize("kernel", ["naive", "fused"])
def test_flops_of_decode_attention_are_exact(shape: LlamaConfig, context: int, kernel: Kernel) -> None:
    """Sequences of equal context, so that no row of the batch is padded: every pair multiplied is one that counts."""
    bench = Bench(shape, kernel)
    expected = step_work(bench.shape, P32, contexts=[context] * 3).attention.flops
    assert bench.flops(bench.plan(contexts=[context] * 3))[1] == expected


@shapes
def test_flops_of_causal_attention_are_exact_token_by_token(shape: LlamaConfig) -> None:
    """A prompt in chunks of one token multiplies no masked pair: its sum is the causal count of the whole prompt."""
    bench = Bench(shape)
    steps = [bench.flops(bench.plan([Chunk(1, past, last=past == 18)]))[1] for past in range(19)]
    assert sum(steps) == step_work(bench.shape, P32, [Chunk(19)]).attention.flops
    assert all(later > sooner for sooner, later in pairwise(steps))


@shapes
@pytest.mark.parametrize("chunk", [Chunk(19), Chunk(6, 13), Chunk(1, 7)])
@pytest.mark.parametrize("kernel", ["naive", "fused"])
def test_attention_of_a_chunk_multiplies_the_rectangle_around_its_causal_pairs(
    shape: LlamaConfig, chunk: Chunk, kernel: Kernel
) -> None:
    """The naive kernel computes masked pairs; for the fused one PyTorch's counter assumes so. The surplus is what is masked."""
    bench = Bench(shape, kernel)
    rectangle = chunk.new_tokens * (chunk.past_tokens + chunk.new_tokens)
    masked = sum(range(chunk.new_tokens))  # of a query: the new tokens after it
    assert rectangle - masked == causal_pairs(chunk.new_tokens, chunk.past_tokens)
    surplus = bench.shape.layers * attention_flops_per_pair(bench.shape) * masked
    expected = step_work(bench.shape, P32, [chunk]).attention.flops + surplus
    assert bench.flops(bench.plan([chunk]))[1] == expected


def test_padding_of_unequal_contexts_is_what_a_batch_multiplies_beyond_the_count() -> None:
    """Contexts of 9 and 12 (three blocks each) decode as one group of 12."""
    bench = Bench(tiny())
    per_pair = bench.shape.layers * attention_flops_per_pair(bench.shape)
    counted = step_work(bench.shape, P32, contexts=[9, 12]).attention.flops
    assert bench.flops(bench.plan(contexts=[9, 12]))[1] == counted + per_pair * 3


# --- bytes ------------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Weights that enter matrix products, each once, and the results of batched products."""

    def __init__(self, matrices: list[Any]) -> None:
        super().__init__()
        self._names = {matrix.data_ptr(): matrix for matrix in matrices}
        self.weights: dict[int, Any] = {}
        self.uses = 0
        self.batched: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.mm.default, aten.addmm.default):
            for argument in args:
                if isinstance(argument, torch.Tensor) and argument.data_ptr() in self._names:
                    self.weights[argument.data_ptr()] = argument
                    self.uses += 1
        if func is aten.bmm.default:
            self.batched.append(result)
        return result

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


def products(bench: Bench, plan: StepPlan) -> Products:
    seen = Products(bench.executor.model.matrices)
    with torch.no_grad(), seen:
        bench.executor.logits(plan)
    return seen


@shapes
@pytest.mark.parametrize(("dtype", "precision"), [("float32", P32), ("bfloat16", P16)])
def test_stored_weight_bytes_are_the_sizes_of_the_matrices(
    shape: LlamaConfig, dtype: str, precision: Precision
) -> None:
    bench = Bench(shape, dtype=dtype)
    model = bench.executor.model
    assert sum(matrix.nbytes for matrix in model.matrices) == weight_bytes_stored(bench.shape, precision)
    norms = (2 * shape.layers + 1) * shape.hidden * model.dtype.itemsize
    assert model.nbytes == weight_bytes_stored(bench.shape, precision) + norms


@shapes
@pytest.mark.parametrize(
    ("chunks", "contexts"), [([Chunk(9)], []), ([Chunk(9, last=False)], []), ([Chunk(4, 3)], [5, 8, 30])]
)
def test_each_weight_is_read_once_for_all_tokens_of_a_step(
    shape: LlamaConfig, chunks: list[Chunk], contexts: list[int]
) -> None:
    """The head, tied or not, only where a token is sampled; the embedding is looked up and not multiplied."""
    bench = Bench(shape)
    seen = products(bench, bench.plan(chunks, contexts))
    work = step_work(bench.shape, P32, chunks, contexts)
    assert seen.weight_bytes == work.linear.weight_bytes + work.head.weight_bytes
    assert seen.uses == len(seen.weights), "a matrix was multiplied twice in one step"
    tokens = sum(chunk.new_tokens for chunk in chunks) + len(contexts)
    assert work.linear.weight_bytes == linear_weight_bytes_read(bench.shape, P32, tokens)


@shapes
def test_elements_of_layers_and_head(shape: LlamaConfig) -> None:
    bench = Bench(shape)
    model = bench.executor.model
    layers = sum(m.numel() for layer in model.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
    assert layers == stored_linear_weights(bench.shape)
    assert model.head.numel() == head_weights(bench.shape)
    assert (model.head is model.embedding) == shape.tied


@shapes
@pytest.mark.parametrize(("dtype", "precision"), [("float32", P32), ("bfloat16", P16)])
def test_kv_bytes_are_the_size_of_the_cache(shape: LlamaConfig, dtype: str, precision: Precision) -> None:
    bench = Bench(shape, dtype=dtype)
    per_token = kv_bytes_per_token(bench.shape, precision.kv_bits)
    assert bench.executor.kv.nbytes == 120 * 4 * per_token
    assert shape.kv_bytes_per_token(bench.executor.model.dtype.itemsize) == per_token


def moved(bench: Bench, plan: StepPlan, monkeypatch: pytest.MonkeyPatch) -> Work:
    """KV bytes a step writes to the cache, and those it takes from it for tokens of earlier steps."""
    read = written = 0
    gather, write = PagedKv.gather, PagedKv.write

    def counted_gather(self: PagedKv, layer: int, table: Any, tokens: int) -> Any:
        nonlocal read
        both = gather(self, layer, table, tokens)
        read += sum(tensor.nbytes for tensor in both)
        return both

    def counted_write(self: PagedKv, layer: int, slots: Any, k: Any, v: Any) -> None:
        nonlocal written
        written += k.nbytes + v.nbytes
        write(self, layer, slots, k, v)

    monkeypatch.setattr(PagedKv, "gather", counted_gather)
    monkeypatch.setattr(PagedKv, "write", counted_write)
    with torch.no_grad():
        bench.executor.logits(plan)
    return Work(kv_read_bytes=read, kv_write_bytes=written)


@shapes
@pytest.mark.parametrize(
    ("chunks", "contexts"),
    [([], [1, 1]), ([], [12, 12, 12]), ([Chunk(9)], []), ([Chunk(5, 7)], []), ([Chunk(4, 8)], [30])],
)
def test_kv_bytes_moved_are_exact(
    shape: LlamaConfig, chunks: list[Chunk], contexts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gather brings a step's own tokens back together with the past; they are still on the chip and not counted again."""
    bench = Bench(shape)
    found = moved(bench, bench.plan(chunks, contexts), monkeypatch)
    counted = step_work(bench.shape, P32, chunks, contexts).attention
    own = sum(chunk.new_tokens for chunk in chunks if chunk.past_tokens) + len(contexts)
    assert found.kv_write_bytes == counted.kv_write_bytes
    assert found.kv_read_bytes - own * kv_bytes_per_token(bench.shape, 32) == counted.kv_read_bytes


@shapes
@pytest.mark.parametrize("chunk", [Chunk(11), Chunk(5, 8)])
def test_score_bytes_are_the_matrix_between_the_two_products(shape: LlamaConfig, chunk: Chunk) -> None:
    """q k^T writes it and p v reads it: twice its size, for every head and layer."""
    bench = Bench(shape)
    results = products(bench, bench.plan([chunk])).batched
    scores = sum(tensor.nbytes for tensor in results[::2])  # q k^T, p v, q k^T, ...
    assert len(results) == 2 * shape.layers
    assert 2 * scores == step_work(bench.shape, P32, [chunk], kernel="naive").attention.score_bytes


def test_the_fused_kernel_keeps_no_score_matrix() -> None:
    bench = Bench(tiny(), "fused")
    assert not products(bench, bench.plan([Chunk(11)])).batched
    assert step_work(bench.shape, P32, [Chunk(11)]).attention.score_bytes == 0
