"""Steps of the torch executor, timed: prompt tokens and decoded tokens a second by batch, kernel and data type.

    python tests/benchmarks/torch_steps.py [--model smollm2|PATH] [--dtype float32] [--device cpu] [--context 256] [--batches 1,8,32]

Median of the steps after the first two. Prints machine, threads, model, data type and version with every figure.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine_line

from phasewise.instrumented_engine.attention import Kernel
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.model_files import model_folder
from phasewise.instrumented_engine.llama.weights import load_llama
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.plan import PromptChunk, StepPlan
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence
from phasewise.instrumented_engine.torch_import import torch
from phasewise.rules.errors import PhasewiseError

BLOCK_TOKENS = 16
KERNELS: tuple[Kernel, ...] = ("fused", "naive")


def sequences(count: int, context: int, vocab: int) -> list[Sequence]:
    """With blocks of their own for a prompt of `context` tokens and 64 more."""
    rng, blocks, made = random.Random(1), -(-(context + 64) // BLOCK_TOKENS), []
    for number in range(count):
        prompt = tuple(rng.randrange(vocab) for _ in range(context))
        sequence = Sequence(RequestSpec(request_id=str(number), arrival_ns=0, prompt_tokens=context, max_output_tokens=64, prompt=prompt))  # fmt: skip
        sequence.blocks = list(range(number * blocks, (number + 1) * blocks))
        made.append(sequence)
    return made


def measured(model: Llama, kernel: Kernel, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Prompt tokens a second of one prompt, decoded tokens a second of the batch."""
    made = sequences(batch, context, model.config.vocab)
    blocks = batch * len(made[0].blocks)
    config = EngineConfig(block_tokens=BLOCK_TOKENS, kv_blocks=blocks, max_model_tokens=context + 64)
    executor = TorchExecutor(model, config, kernel=kernel)
    prefill = []
    for sequence in made:
        outcome = executor.execute(StepPlan(0, chunks=[PromptChunk(sequence, 0, context, True)]))
        prefill.append(outcome.duration_ns)
        _take(sequence, context, outcome.tokens)
    decode = []
    for number in range(steps):
        outcome = executor.execute(StepPlan(number, decodes=made))
        decode.append(outcome.duration_ns)
        for row, sequence in enumerate(made):
            _take(sequence, 1, outcome.tokens[row : row + 1] if outcome.tokens else None)
    return context / statistics.median(prefill) * 1e9, batch / statistics.median(decode[2:]) * 1e9


def _take(sequence: Sequence, computed: int, tokens: object) -> None:
    assert isinstance(tokens, list)
    sequence.computed_tokens += computed
    sequence.output.append(tokens[0])
    sequence.output_tokens += 1


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--device", default="cpu")
    options.add_argument("--context", type=int, default=256)
    options.add_argument("--batches", default="1,8,32")
    options.add_argument("--steps", type=int, default=12, help="decoded, more than two")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = options.parse_args(arguments)
    if asked.steps < 3:
        options.error(f"--steps {asked.steps}: the first two are left out, so that at least 3 are needed")
    torch.set_num_threads(asked.threads)
    try:
        model = load_llama(model_folder(asked.model), dtype=asked.dtype, device=asked.device)
    except PhasewiseError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    device = f"{torch.cuda.get_device_name()}, " if asked.device.startswith("cuda") else ""
    print(f"{device}{asked.threads} threads, {asked.model}, {asked.dtype}, context {asked.context}")
    print(machine_line(("phasewise", "torch")))
    print(f"{'kernel':>8} {'batch':>6} {'prompt tok/s':>13} {'decode tok/s':>13}")
    for kernel in KERNELS:
        for batch in (int(size) for size in asked.batches.split(",")):
            prompt, decode = measured(model, kernel, batch, asked.context, asked.steps)
            print(f"{kernel:>8} {batch:>6} {prompt:>13.0f} {decode:>13.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
