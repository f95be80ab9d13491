"""What the scheduler costs: a running sequence in one step, and 10,000 waiting requests.

    python tests/benchmarks/scheduler.py [--json] [--steps 200] [--rounds 5]

Prints microseconds per running sequence and step (plan and complete, without core and time law), and the milliseconds that
10,000 waiting requests add to a step, absolute and as a part of the step's time of plan and complete. Targets: 3 microseconds;
1 ms, or 2 % of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine

from phasewise.instrumented_engine.config import EngineConfig, PoolShare
from phasewise.instrumented_engine.scheduler import Scheduler
from phasewise.instrumented_engine.sequence import RequestSpec, Sequence

STEP_NS = 20_000_000
RUNNING = 256
WAITING = 10_000
STEPS = 200
ROUNDS = 5
CONFIG = EngineConfig(max_num_seqs=RUNNING, step_token_budget=8192, kv_blocks=60_000, max_model_tokens=1_000_000)
SETTINGS = {
    "fcfs": CONFIG,
    "priority": replace(CONFIG, order="priority"),
    "fair": replace(CONFIG, order="fair"),
    "kv": replace(CONFIG, max_num_seqs=2 * RUNNING, kv_blocks=56_600),
    "window": replace(CONFIG, max_num_seqs=2 * WAITING, batching_window_s=1e6),
    "pools": replace(
        CONFIG,
        pools=(
            PoolShare("interactive", ("interactive",), 0.75, 0.75, 0.75, lends=True),
            PoolShare("offline", ("offline",), 0.25, 0.25, 0.25),
        ),
    ),
}
LONG_TOKENS = 900_000  # a prompt that never finds its blocks beside the running ones: why "kv" waits


def request(number: int, output_tokens: int, prompt_tokens: int = 16) -> Sequence:
    spec = RequestSpec(
        request_id=str(number),
        arrival_ns=0,
        prompt_tokens=prompt_tokens,
        max_output_tokens=output_tokens,
        stop_after_tokens=output_tokens,
        priority=number % 3,
        tenant=f"tenant {number % 50}",
        request_class="interactive" if number % 4 else "offline",
    )
    return Sequence(spec, number)


def waiting_us(name: str, config: EngineConfig, steps: int = STEPS, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median microseconds of plan and complete while RUNNING sequences decode, without and with WAITING in the queue."""
    times: dict[int, list[float]] = {0: [], WAITING: []}
    for _ in range(rounds):
        for waiting, found in times.items():
            scheduler = Scheduler(config)
            for number in range(RUNNING):
                assert scheduler.submit(request(number, 10_000), 0) is None
            now_ns = step(scheduler, round(config.batching_window_s * 1e9))
            for number in range(waiting):
                prompt = LONG_TOKENS if name == "kv" else 16
                assert scheduler.submit(request(RUNNING + number, 2000, prompt), now_ns) is None
            now_ns = step(scheduler, now_ns)
            for _ in range(steps):
                begin = time.perf_counter_ns()
                now_ns = step(scheduler, now_ns)
                found.append((time.perf_counter_ns() - begin) / 1e3)
            assert scheduler.running_count == RUNNING and scheduler.waiting_count == waiting
    return statistics.median(times[0]), statistics.median(times[WAITING])


def step(scheduler: Scheduler, now_ns: int) -> int:
    plan = scheduler.plan(now_ns)
    assert plan is not None
    scheduler.complete(plan, now_ns + STEP_NS, None)
    return now_ns + STEP_NS


def whole_lives_us() -> float:
    """Microseconds per sequence and step of 1,000 requests of 500 tokens from arrival to end, admissions and ends included."""
    scheduler = Scheduler(replace(CONFIG, step_token_budget=2048))
    for number in range(1000):
        scheduler.submit(request(number, 500), 0)
    now_ns, tokens = 0, 0
    begin = time.perf_counter_ns()
    while (plan := scheduler.plan(now_ns)) is not None:
        now_ns += STEP_NS
        scheduler.complete(plan, now_ns, None)
        tokens += len(plan.decodes) + len(plan.chunks)
    return (time.perf_counter_ns() - begin) / tokens / 1e3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each round and setting")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    wants = parser.parse_args(arguments)
    result: dict[str, object] = {
        "benchmark": "scheduler",
        **machine(("phasewise", "numpy")),
        "running": RUNNING,
        "waiting": WAITING,
        "whole_lives_us_per_sequence_step": round(whole_lives_us(), 3),
    }
    for name, config in SETTINGS.items():
        base, loaded = waiting_us(name, config, wants.steps, wants.rounds)
        result[name] = {
            "us_per_sequence_step": round(base / RUNNING, 3),
            "waiting_ms_per_step": round((loaded - base) / 1e3, 4),
            "waiting_ratio_of_20_ms_step": round((loaded - base) * 1e3 / STEP_NS, 5),
        }
    if wants.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
