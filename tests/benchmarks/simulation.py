"""How many requests of 500 output tokens the simulated engine runs a minute on one core, and with its telemetry built and scanned.

    python tests/benchmarks/simulation.py [--requests 4000]

One H100 SXM with Llama-3.1-8B, 128 seats, prompts of 500 tokens, Poisson arrivals at what it can just serve. The target is 20,000 a
minute and core for the engine. Exit code 1 where a request was not served whole.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine_line

from phasewise.dashboard.commands.engine_recording import Sender, spans_of
from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.simulation import Setup, simulate
from phasewise.rules.load import load_rulebook

OUTPUT_TOKENS = 500
ARRIVALS_PER_S = 18.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    requests: int = parser.parse_args(arguments).requests
    rulebook = load_rulebook()
    setup = Setup(
        EngineConfig(max_num_seqs=128, kv_blocks=20_000),
        Deployment(gpu=rulebook.gpus["h100-sxm"], model=rulebook.models["llama-3.1-8b"]),
    )
    draw = random.Random(1)
    now = 0.0
    arrivals = []
    for number in range(requests):
        now += draw.expovariate(ARRIVALS_PER_S)
        arrivals.append(
            RequestSpec(
                request_id=f"r-{number}",
                arrival_ns=int(now * 1e9),
                prompt_tokens=500,
                max_output_tokens=OUTPUT_TOKENS,
            )
        )
    began = time.process_time()
    recording = simulate(setup, arrivals, seed=1)
    ran_s = time.process_time() - began
    tokens = sum(one.output_tokens for one in recording.finished)
    if tokens != requests * OUTPUT_TOKENS:
        raise SystemExit(
            f"{requests * OUTPUT_TOKENS} tokens were asked for, {tokens} came, in {len(recording.finished)} requests"
        )
    began = time.process_time()
    spans = spans_of(recording, Sender(instance="bench", model="llama-3.1-8b", version="bench"))
    sent_s = time.process_time() - began
    print(f"{machine_line(('phasewise', 'numpy'))}; CPU seconds of one process")
    print(f"{requests} requests of {OUTPUT_TOKENS} tokens in {len(recording.steps)} steps, mean batch "
          f"{tokens / len(recording.steps):.0f}")  # fmt: skip
    print(f"  run                          {ran_s:7.2f} s   {requests / ran_s * 60:10,.0f} requests a minute")
    print(f"  spans built and scanned      {sent_s:7.2f} s   {requests / sent_s * 60:10,.0f} requests a minute, "
          f"{len(spans)} rows")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
