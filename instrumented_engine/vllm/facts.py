"""What vLLM's configuration says of the engine, once. None: this release does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """engine_index: of the data-parallel rank, None where there is one engine; model: as clients call it, None where adapters are
    served under names of their own; kv_blocks_total: usable ones; details: each step's composition comes from the scheduler;
    asynchronous: the next step is scheduled while one runs; one_front_end: no other API server process sees a share of the
    outputs; speculative: a sequence may take several tokens a step; traced: vLLM sends spans itself; settings: resource attributes by
    which the profile of the wire format knows how the engine is set."""

    engine_index: int | None = None
    model: str | None = None
    kv_blocks_total: int | None = None
    details: bool = False
    asynchronous: bool = True
    one_front_end: bool = True
    speculative: bool = False
    traced: bool = True
    settings: Mapping[str, int | bool] = field(default_factory=dict)


_SETTINGS = {
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_model_len": "model_config.max_model_len",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "block_size_tokens": "cache_config.block_size",
    "tensor_parallel_count": "parallel_config.tensor_parallel_size",
}


def facts_of(config: Any, engine_index: int) -> EngineFacts:
    """config: vLLM's VllmConfig, of which no attribute is taken for granted."""
    ranks = _count(config, "parallel_config.data_parallel_size") or 1
    blocks = _count(config, "cache_config.num_gpu_blocks")
    served = _read(config, "model_config.served_model_name")
    name = served[0] if isinstance(served, (list, tuple)) and served else served
    return EngineFacts(
        engine_index=engine_index if ranks > 1 else None,
        model=name if isinstance(name, str) and _read(config, "lora_config") is None else None,
        kv_blocks_total=_usable(blocks, ranks),
        details=_read(config, "observability_config.enable_logging_iteration_details") is True,
        asynchronous=_read(config, "scheduler_config.async_scheduling") is not False,
        one_front_end=(_count(config, "parallel_config._api_process_count") or 1) == 1,
        speculative=_read(config, "speculative_config") is not None,
        traced=bool(_read(config, "observability_config.otlp_traces_endpoint")),
        settings={
            f"phasewise.{name}": value
            for name, path in _SETTINGS.items()
            if type(value := _read(config, path)) in (int, bool)
        },
    )


def _usable(blocks: int | None, ranks: int) -> int | None:
    """The configuration holds the sum over all ranks; one block of each is no place for tokens, and usage is told without it."""
    if not blocks or blocks % ranks or blocks // ranks < 2:
        return None
    return blocks // ranks - 1


def _read(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _count(config: Any, path: str) -> int | None:
    value = _read(config, path)
    return value if type(value) is int else None
