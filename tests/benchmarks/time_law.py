"""What asking the time law costs: one step at a time, a column of steps, and noise. One process, one core.

python tests/benchmarks/time_law.py [--steps 20000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from benchmarks.machine import machine_line

from phasewise.instrumented_engine.executors.simulated import SimulatedExecutor
from phasewise.instrumented_engine.executors.time_law import Deployment, TimeLaw
from phasewise.instrumented_engine.recording import StepComposition
from phasewise.rules.load import load_rulebook

STEPS = 20_000


def best_of(run: Callable[[], object], times: int = 5) -> float:
    """Seconds of the quickest of `times` runs."""
    found = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - began)
    return found


def measure(at: Deployment, steps_n: int) -> None:
    random = np.random.default_rng(1)
    prompts, batches = random.integers(0, 2048, steps_n).tolist(), random.integers(1, 256, steps_n).tolist()
    steps = [
        StepComposition(number, new, new * 900, 800, int(new > 0), int(new > 400), batch, batch * 1200)
        for number, (new, batch) in enumerate(zip(prompts, batches, strict=True))
    ]
    table = {name: np.array([getattr(step, name) for step in steps]) for name in StepComposition.__slots__}
    law = TimeLaw(at)
    executor = SimulatedExecutor(law, seed=1)

    def one_by_one() -> None:
        fresh = TimeLaw(at)  # its tables of token counts are filled on the way
        for step in steps:
            fresh.seconds(step)

    print(f"{at.model.name} on {at.tensor_parallel_count} x {at.gpu.name}, {steps_n} different steps, us a step")
    for name, run in (
        ("seconds", one_by_one),
        ("seconds_of", lambda: law.seconds_of(table)),
        ("seconds_of without kv_bytes", lambda: law.seconds_of(table, "kv_bytes")),
        ("noise", lambda: executor.noise(table["number"])),
    ):
        print(f"  {name:28s} {best_of(run) / steps_n * 1e6:6.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps_n: int = parser.parse_args(arguments).steps
    rules = load_rulebook()
    print(machine_line(("phasewise", "numpy")))
    for gpu, model, devices in (("h100-sxm", "llama-3.1-8b", 1), ("h200-sxm", "deepseek-v3", 8)):
        measure(Deployment(gpu=rules.gpus[gpu], model=rules.models[model], tensor_parallel_count=devices), steps_n)
    return 0


if __name__ == "__main__":
    sys.exit(main())
