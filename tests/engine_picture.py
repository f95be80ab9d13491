"""The trade-offs every serving engine has, on simulated accelerators: what each switch gives, and what it costs.

Each experiment runs the same arrivals, drawn by seed, through several settings and keeps what a user would compare. Times are
seconds of the simulated clock.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from phasewise.instrumented_engine.config import AdmissionControl, EngineConfig, PoolShare
from phasewise.instrumented_engine.executors.time_law import Deployment
from phasewise.instrumented_engine.recording import Recording
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.simulation import Setup, simulate
from phasewise.rules.counting import Precision
from phasewise.rules.load import load_rulebook

WINDOWS_S = (0.0, 0.025, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens_per_s: output tokens over the time from the first arrival to the last end; busy_tokens_per_s: over the time in
    which steps ran. empty_seats: seats of finished sequences, running: sequences at work, both mean over steps. preempted: how often
    a sequence was put back. interactive_ttft_p99_s: of the interactive class where there are classes."""

    name: str
    requests: int
    refused: int
    tokens_per_s: float
    busy_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    interactive_ttft_p99_s: float
    e2e_p99_s: float
    empty_seats: float
    queue_p99_s: float
    running: float
    preempted: int


def outcome(name: str, recording: Recording) -> Outcome:
    done = [one for one in recording.finished if one.first_token_ns is not None and one.finished_ns is not None]
    ttft = np.array([(one.first_token_ns or 0) - one.spec.arrival_ns for one in done]) / 1e9
    e2e = np.array([(one.finished_ns or 0) - one.spec.arrival_ns for one in done]) / 1e9
    queue = np.array([(one.scheduled_ns or 0) - (one.queued_ns or 0) for one in done]) / 1e9
    interactive = np.array([one.spec.request_class != "offline" for one in done])
    columns = recording.step_columns()
    tokens = sum(one.output_tokens for one in done)
    span_s = (max(one.finished_ns or 0 for one in done) - min(one.spec.arrival_ns for one in done)) / 1e9
    return Outcome(
        name=name,
        requests=len(done),
        refused=len(recording.refused),
        tokens_per_s=tokens / span_s,
        busy_tokens_per_s=tokens / float(columns["duration_ns"].sum() / 1e9),
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
        interactive_ttft_p99_s=float(np.quantile(ttft[interactive], 0.99)),
        e2e_p99_s=float(np.quantile(e2e, 0.99)),
        empty_seats=float((columns["slots_reserved"] - columns["running"]).mean()),
        queue_p99_s=float(np.quantile(queue, 0.99)),
        running=float(columns["running"].mean()),
        preempted=sum(one.preemptions for one in done),
    )


def deployment(gpu: str = "h100-sxm", model: str = "llama-3.1-8b") -> Deployment:
    rulebook = load_rulebook()
    return Deployment(gpu=rulebook.gpus[gpu], model=rulebook.models[model], precision=Precision())


def poisson(
    seed: int, requests: int, rate_per_s: float, lengths: Callable[[random.Random, int], tuple[int, int, str]]
) -> list[RequestSpec]:
    """Poisson arrivals; `lengths` draws prompt tokens, output tokens and class of the n-th."""
    draw = random.Random(seed)
    now = 0.0
    specs = []
    for number in range(requests):
        now += draw.expovariate(rate_per_s)
        prompt, output, request_class = lengths(draw, number)
        specs.append(
            RequestSpec(
                request_id=f"r-{number}",
                arrival_ns=int(now * 1e9),
                prompt_tokens=prompt,
                max_output_tokens=4096,
                stop_after_tokens=output,
                request_class=request_class,
            )
        )
    return specs


def mixed_lengths(draw: random.Random, _: int) -> tuple[int, int, str]:
    """Chat-like: lognormal prompt (median 400) and output (median 120, long tail)."""
    prompt = min(3000, max(16, int(draw.lognormvariate(6.0, 0.8))))
    output = min(1500, max(4, int(draw.lognormvariate(4.8, 1.0))))
    return prompt, output, "interactive"


def chat_beside_jobs(seed: int) -> list[RequestSpec]:
    """500 chat requests at 6 a second, and 400 offline jobs with long prompts that come faster than they can be served."""
    draw = random.Random(seed)
    chat = poisson(seed + 1, 500, 6.0, lambda d, _: (d.randint(100, 500), d.randint(50, 200), "interactive"))
    now = 0.0
    jobs = []
    for number in range(400):
        now += draw.expovariate(20.0)
        jobs.append(
            RequestSpec(
                request_id=f"job-{number}",
                arrival_ns=int(now * 1e9),
                prompt_tokens=draw.randint(3000, 8000),
                max_output_tokens=512,
                stop_after_tokens=draw.randint(150, 400),
                request_class="offline",
                priority=1,
            )
        )
    return sorted([*chat, *jobs], key=lambda one: one.arrival_ns)


def short_answers(draw: random.Random, _: int) -> tuple[int, int, str]:
    return draw.randint(60, 120), 4, "interactive"


def _compare(
    arrivals: Sequence[RequestSpec], settings: Iterable[tuple[str, EngineConfig]], where: Deployment, seed: int
) -> list[Outcome]:
    return [outcome(name, simulate(Setup(config, where), arrivals, seed=seed)) for name, config in settings]


def continuous_against_static(seed: int) -> list[Outcome]:
    """Mixed lengths, more load than a static batch serves."""
    base = EngineConfig(max_num_seqs=32, kv_blocks=8192, step_token_budget=4096)
    return _compare(
        poisson(seed, 400, 12.0, mixed_lengths),
        [
            ("static", dataclasses.replace(base, batching="static", batching_window_s=0.05)),
            ("continuous", base),
        ],
        deployment(),
        seed,
    )


def large_batch_against_pools(seed: int) -> list[Outcome]:
    """Chat goes first in all three; offline jobs with long prompts fill what is left."""
    small = EngineConfig(
        max_num_seqs=16,
        kv_blocks=60000,
        step_token_budget=16384,
        chunked_prefill=False,
        max_model_tokens=16384,
        order="priority",
    )
    large = dataclasses.replace(small, max_num_seqs=128, step_token_budget=65536)
    pools = dataclasses.replace(
        large,
        chunked_prefill=True,
        step_token_budget=1024,
        pools=(
            PoolShare("interactive", ("interactive",), 0.25, 0.1, 0.5, lends=True),
            PoolShare("offline", ("offline",), 0.75, 0.9, 0.5, lends=True),
        ),
    )
    settings = [("small batch", small), ("large batch", large), ("pools and chunks", pools)]
    return _compare(chat_beside_jobs(seed), settings, deployment(), seed)


def unbounded_queue_against_admission(seed: int) -> list[Outcome]:
    """Twice what the engine serves."""
    base = EngineConfig(max_num_seqs=32, kv_blocks=8192)
    admitted = dataclasses.replace(base, admission=AdmissionControl(max_predicted_queue_s=1.0))
    arrivals = poisson(seed, 1500, 40.0, mixed_lengths)
    return _compare(arrivals, [("unbounded", base), ("admission control", admitted)], deployment(), seed)


def window_sweep(seed: int) -> list[Outcome]:
    """Short answers in static batches at low load: what a longer batching window gives and costs."""
    base = EngineConfig(max_num_seqs=64, kv_blocks=8192, batching="static")
    arrivals = poisson(seed, 600, 12.0, short_answers)
    settings = [(f"{window * 1e3:g} ms", dataclasses.replace(base, batching_window_s=window)) for window in WINDOWS_S]
    return _compare(arrivals, settings, deployment(), seed)


def paged_against_contiguous(seed: int) -> list[Outcome]:
    """Mixed lengths, more than either serves, in a KV memory of eight sequences of the longest length allowed. No two prompts
    have anything in common."""
    paged = EngineConfig(max_num_seqs=256, kv_blocks=4096, max_model_tokens=8192)
    contiguous = dataclasses.replace(paged, kv_layout="contiguous", prefix_sharing=False)
    arrivals = poisson(seed, 600, 60.0, mixed_lengths)
    return _compare(arrivals, [("contiguous", contiguous), ("paged", paged)], deployment(), seed)


EXPERIMENTS: dict[str, Callable[[int], list[Outcome]]] = {
    "continuous against static batching, mixed lengths": continuous_against_static,
    "large batch, then separate pools with chunked prefill": large_batch_against_pools,
    "overload: unbounded queue, then admission control": unbounded_queue_against_admission,
    "batching window": window_sweep,
    "KV memory: contiguous ranges, then pages": paged_against_contiguous,
}
