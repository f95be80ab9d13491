"""The real scheduler over the torch executor: whatever it decides, the tokens are those of a plain full forward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch_runs import CheckedExecutor, Reference, StepClock, Tally, prompt, request, tiny

from phasewise.instrumented_engine.attention import Kernel
from phasewise.instrumented_engine.blocks import hash_blocks
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.weights import random_llama
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence, ToolCall

MODEL = random_llama(tiny(), seed=1)
REFERENCE = Reference(MODEL)
ROOMY = EngineConfig(block_tokens=4, kv_blocks=400, max_model_tokens=96, max_num_seqs=16, step_token_budget=128)
TIGHT = replace(ROOMY, kv_blocks=26)
KERNELS: tuple[Kernel, ...] = ("naive", "fused")


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counted = Tally()
    yield counted
    counted.close("the real scheduler")


def hashed(spec: RequestSpec, config: EngineConfig) -> RequestSpec:
    assert spec.prompt is not None
    return replace(spec, block_hashes=hash_blocks(spec.prompt, config.block_tokens))


def serve(
    config: EngineConfig, specs: list[RequestSpec], tally: Tally, kernel: Kernel = "fused"
) -> tuple[list[Sequence], CheckedExecutor]:
    """All requests to their end; checks each token on the way and each output as a whole."""
    executor = CheckedExecutor(TorchExecutor(MODEL, config, kernel=kernel), REFERENCE, tally)
    core = EngineCore(config, executor, StepClock())
    core.run([hashed(spec, config) for spec in specs])
    done = sorted(core.recording.finished, key=lambda sequence: sequence.index)
    assert len(done) == len(specs)
    for sequence in done:
        assert sequence.spec.prompt is not None
        expected = [REFERENCE.at(sequence.spec.prompt, n)[0] for n in range(sequence.spec.max_output_tokens)]
        assert sequence.output == expected
    assert core.scheduler.pool.used_blocks == 0
    return done, executor


def some(seed: int, count: int, output_tokens: int = 20, shared: int = 0) -> list[RequestSpec]:
    rng = random.Random(seed)
    begin = prompt(rng, shared)
    return [request(f"r{i}", begin + prompt(rng, rng.randint(3, 30)), output_tokens) for i in range(count)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_preempted_and_resumed(kernel: Kernel, tally: Tally) -> None:
    done, executor = serve(replace(TIGHT, prefix_sharing=False), some(1, 8), tally, kernel)
    assert sum(sequence.preemptions for sequence in done) > 0
    assert any(recompute for _, _, recompute, _ in executor.plans)


@pytest.mark.parametrize("kernel", KERNELS)
def test_chunked_beside_decodes(kernel: Kernel, tally: Tally) -> None:
    config = replace(ROOMY, step_token_budget=12, prefill_chunk_tokens=5)
    _, executor = serve(config, some(2, 8), tally, kernel)
    assert any(chunks and decodes and past for chunks, decodes, _, past in executor.plans)


@pytest.mark.parametrize("kernel", KERNELS)
def test_prefix_shared_while_its_owner_runs_and_after_it_has_gone(kernel: Kernel, tally: Tally) -> None:
    specs = some(3, 8, shared=21)
    late = [replace(spec, request_id=f"late{i}", arrival_ns=10**12) for i, spec in enumerate(specs[:3])]
    done, _ = serve(replace(ROOMY, step_token_budget=24), specs + late, tally, kernel)
    found = [sequence.cached_tokens or 0 for sequence in done]
    assert sum(found[:8]) > 0, "no prompt found the prefix of one that still runs"
    assert all(tokens >= 20 for tokens in found[8:]), "a prompt came again and its blocks were not found"


def test_prefix_shared_and_preempted_and_evicted(tally: Tally) -> None:
    done, _ = serve(replace(TIGHT, step_token_budget=20), some(4, 14, shared=13), tally)
    assert sum(sequence.preemptions for sequence in done) > 0
    assert sum(sequence.cached_tokens or 0 for sequence in done) > 0


def test_contiguous_layout(tally: Tally) -> None:
    config = replace(ROOMY, kv_layout="contiguous", prefix_sharing=False, kv_blocks=5 * 24)
    _, executor = serve(config, some(5, 9), tally)
    assert max(decodes for _, decodes, *_ in executor.plans) == 5, "24 blocks are reserved for each, 120 there are"


def test_static_batches_of_mixed_lengths(tally: Tally) -> None:
    specs = [replace(spec, max_output_tokens=length) for spec, length in zip(some(6, 9), (3, 20, 7) * 3, strict=True)]
    serve(replace(ROOMY, batching="static", max_num_seqs=4), specs, tally)


def test_urgent_requests_push_others_out(tally: Tally) -> None:
    config = replace(ROOMY, order="priority", preempt_for_priority=True, max_num_seqs=3, prefix_sharing=False)
    calm = [replace(spec, priority=5) for spec in some(7, 4, output_tokens=40)]
    urgent = [replace(spec, request_id=f"urgent{i}", priority=0, arrival_ns=1) for i, spec in enumerate(some(8, 3))]
    done, _ = serve(config, calm + urgent, tally)
    assert sum(sequence.preemptions for sequence in done) > 0


def test_a_tool_inside_the_stream_changes_no_token(tally: Tally) -> None:
    specs = [replace(spec, tools=(ToolCall(after_tokens=6, duration_ns=10**9),)) for spec in some(9, 4)]
    done, _ = serve(ROOMY, specs, tally)
    assert all(sequence.external for sequence in done)


def test_a_stop_token_ends_the_output_there(tally: Tally) -> None:
    spec = some(10, 1)[0]
    assert spec.prompt is not None
    expected = [REFERENCE.at(spec.prompt, n)[0] for n in range(20)]
    stop = expected[5]
    executor = CheckedExecutor(TorchExecutor(MODEL, ROOMY), REFERENCE, tally)
    core = EngineCore(ROOMY, executor, StepClock())
    core.run([replace(spec, stop_token_ids=(stop,))])
    (sequence,) = core.recording.finished
    assert sequence.output == expected[: expected.index(stop) + 1]
    assert sequence.finish_reason == "stop"


@given(
    seed=st.integers(0, 2**20), count=st.integers(2, 9), shared=st.sampled_from([0, 10, 25]),
    blocks=st.integers(24, 60), budget=st.integers(8, 64), chunk=st.sampled_from([None, 3, 16]),
    seats=st.integers(1, 9), block_tokens=st.sampled_from([4, 5, 16]), sharing=st.booleans(),
    eviction=st.sampled_from(["lru", "lfu", "fifo"]), kernel=st.sampled_from(KERNELS),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_settings(
    tally: Tally, seed: int, count: int, shared: int, blocks: int, budget: int, chunk: int | None, seats: int,
    block_tokens: int, sharing: bool, eviction: str, kernel: Kernel,
) -> None:  # fmt: skip
    config = EngineConfig(
        block_tokens=block_tokens, kv_blocks=blocks, max_model_tokens=96, max_num_seqs=seats, step_token_budget=budget,
        prefill_chunk_tokens=chunk, prefix_sharing=sharing, eviction=eviction,  # type: ignore[arg-type]
    )  # fmt: skip
    serve(config, some(seed, count, 12, shared), tally, kernel)
