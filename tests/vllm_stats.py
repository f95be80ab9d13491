"""What vLLM 0.32 hands to its stat loggers, with the fields of its own classes; and an export that keeps what it gets."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from phasewise.instrumented_engine.vllm.facts import EngineFacts
from phasewise.instrumented_engine.vllm.readings import Reading
from phasewise.instrumented_engine.vllm.settings import Settings
from phasewise.instrumented_engine.vllm.wire import Draft

START_NS = 1_796_000_000_000_000_000
MS = 1_000_000
PATIENCE_S = 15.0
FACTS = EngineFacts(
    model="m", details=True, asynchronous=False, kv_blocks_total=24, settings={"phasewise.max_num_seqs": 8}
)


@dataclass
class Details:
    num_ctx_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    elapsed_ms: float = 10.0
    iteration_index: int = 0
    is_dummy: bool = False


@dataclass
class State:
    num_running_reqs: int = 1
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: Details | None = None


@dataclass
class Done:
    finish_reason: str = "length"
    request_id: str | None = "cmpl-1-0"
    e2e_latency: float = 1.5
    num_prompt_tokens: int = 20
    num_cached_tokens: int = 16
    num_generation_tokens: int = 8
    num_preemptions: int = 0


@dataclass
class Brought:
    iteration_timestamp: float = 0.0
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    finished_requests: list[Done] = field(default_factory=list)
    num_preempted_reqs: int = 0
    prompt_token_stats: Any = field(default_factory=lambda: SimpleNamespace(computed=0))


def brought(at_ms: float, decoded: int = 0, first: int = 0, computed: int = 0, **more: Any) -> Brought:
    """Outputs of one iteration that ended `at_ms` after the start."""
    return Brought(
        iteration_timestamp=(START_NS + at_ms * MS) / 1e9,
        inter_token_latencies_iter=[0.01] * decoded,
        time_to_first_tokens_iter=[0.1] * first,
        prompt_token_stats=SimpleNamespace(computed=computed),
        **more,
    )


def reading(at_ms: float, state: State | None, outputs: Brought | None) -> Reading:
    return Reading(START_NS + round(at_ms * MS), state, outputs)


def config(**changes: Any) -> SimpleNamespace:
    """A configuration of one engine with 25 blocks, of which 24 are usable; `changes` by section."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {"served_model_name": ["m", "alias"]},
        "cache_config": {"num_gpu_blocks": 25},
        "scheduler_config": {"async_scheduling": False},
        "observability_config": {"enable_logging_iteration_details": True, "otlp_traces_endpoint": "http://x"},
        "parallel_config": {"data_parallel_size": 1, "_api_process_count": 1},
    }
    for name, values in changes.items():
        if isinstance(values, dict):
            sections[name] = sections.get(name, {}) | values
    made = {name: SimpleNamespace(**values) for name, values in sections.items()}
    plain = {name: value for name, value in changes.items() if not isinstance(value, dict)}
    return SimpleNamespace(**({"lora_config": None, "speculative_config": None} | made | plain))


class Kept:
    """An export that keeps what it is given; `hold` until it may go on."""

    def __init__(self, take: bool = True) -> None:
        self.drafts: list[Draft] = []
        self.take = take
        self.going = threading.Event()
        self.going.set()
        self.asked = threading.Event()
        self.ended = False

    def send(self, drafts: list[Draft]) -> int:
        self.asked.set()
        self.going.wait(PATIENCE_S)
        self.drafts += drafts
        return len(drafts) if self.take else 0

    def shutdown(self) -> None:
        self.ended = True


def settings(**changes: Any) -> Settings:
    return Settings(**{"endpoint": "http://x", "delay_s": 0.01, "closing_s": PATIENCE_S, **changes})


def step(number: int, *finished: Done) -> Reading:
    state = State(1, 2, kv_cache_usage=0.5, iteration_details=Details(7, 1, 1, iteration_index=number))
    return reading(20 * number, state, brought(20 * number, decoded=1, finished_requests=list(finished)))
