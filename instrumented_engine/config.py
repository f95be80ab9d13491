"""Every switch of the engine's scheduler and memory, in one frozen object built at the edge.

Defaults are those of a continuously batching engine with paged KV. Each technique can be switched alone, so that it can be
ablated. Durations in seconds, sizes in tokens or blocks; a ratio is 0…1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phasewise.rules.errors import InputError

Batching = Literal["continuous", "static"]
Order = Literal["fcfs", "priority", "fair"]
KvLayout = Literal["paged", "contiguous"]
Eviction = Literal["lru", "lfu", "fifo"]


@dataclass(frozen=True, slots=True)
class PoolShare:
    """Seats, blocks and step tokens kept for the requests of some classes; what its owners do not use stays empty unless
    `lends`, then others may use it until an owner waits."""

    name: str
    classes: tuple[str, ...]
    slot_ratio: float
    kv_ratio: float
    budget_ratio: float
    lends: bool = False


@dataclass(frozen=True, slots=True)
class AdmissionControl:
    """Refuse on arrival (429) what is predicted to wait longer, or to need more of the KV pool, than this. None: no limit."""

    max_predicted_queue_s: float | None = None
    max_predicted_kv_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class TenantShare:
    """weight: share of service under contention. reserved_slots: seats nobody else takes."""

    weight: float = 1.0
    reserved_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """max_num_seqs: slots. step_token_budget: tokens (prompt and decode) of one step. prefill_chunk_tokens: most tokens of
    one prompt in one step. max_prefill_tokens: most prompt tokens of a step over all prompts. max_waiting: the bound of the
    queue, beyond it arrivals are refused. kv_blocks: size of the pool. max_model_tokens: prompt and output together, what the
    contiguous layout reserves for every sequence.
    """

    batching: Batching = "continuous"
    max_num_seqs: int = 256
    step_token_budget: int = 2048
    chunked_prefill: bool = True
    prefill_chunk_tokens: int | None = None
    max_prefill_tokens: int | None = None
    batching_window_s: float = 0.0
    order: Order = "fcfs"
    preempt_for_priority: bool = False
    tenants: Mapping[str, TenantShare] = field(default_factory=dict)
    pools: tuple[PoolShare, ...] = ()
    admission: AdmissionControl | None = None
    max_waiting: int | None = None
    kv_layout: KvLayout = "paged"
    block_tokens: int = 16
    kv_blocks: int = 4096
    prefix_sharing: bool = True
    eviction: Eviction = "lru"
    max_model_tokens: int = 8192

    def __post_init__(self) -> None:
        """Raises InputError naming the setting."""
        for name in ("max_num_seqs", "step_token_budget", "block_tokens", "kv_blocks", "max_model_tokens"):
            if getattr(self, name) < 1:
                raise _refused(name, f"{getattr(self, name)} is below 1", "give a positive whole number")
        for name in ("prefill_chunk_tokens", "max_prefill_tokens", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _refused(
                    name, f"{value} is below 1", "give a positive whole number, or leave it out for no limit"
                )
        if self.batching_window_s < 0:
            raise _refused("batching_window_s", f"{self.batching_window_s} is negative", "0 switches the window off")
        if not self.chunked_prefill and self.step_token_budget < self.max_model_tokens:
            raise _refused(
                "step_token_budget",
                f"{self.step_token_budget} is below max_model_tokens {self.max_model_tokens}, so a long prompt never runs",
                "raise it, or allow chunked_prefill",
            )
        for name in ("slot_ratio", "kv_ratio", "budget_ratio"):
            ratios = [getattr(pool, name) for pool in self.pools]
            if sum(ratios) > 1 + 1e-9 or any(ratio <= 0 for ratio in ratios):
                raise _refused("pools", f"{name} are {ratios}", "each above 0, together at most 1")


def _refused(setting: str, problem: str, remedy: str) -> InputError:
    return InputError("engine settings", setting, problem, remedy)
