"""What a family of scenarios draws, and what it draws from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.executors.time_law import Deployment, kv_blocks_for
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.truth.machines import BLOCK_TOKENS
from phasewise.instrumented_engine.truth.traffic import Source, drawn_lengths, requests

MILD = ("poisson", "azure_conv", "mooncake")
ANY = (*MILD, "servegen")
CHAT = ("azure_conv", "servegen_large")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a family has drawn. load: of the capacity; concurrency: else, mean number of requests at once were they alone."""

    deployment: Deployment
    config: EngineConfig
    specs: tuple[RequestSpec, ...]
    pattern: str
    load: float | None = None
    concurrency: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a family draws from."""

    rng: np.random.Generator
    count: int
    folder: Path | None

    def between(self, low: float, high: float) -> float:
        """Log-uniform: loads, delays and sizes are ratios."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def one(self, *choices: str) -> str:
        return str(self.rng.choice(choices))

    def number(self, *choices: int) -> int:
        return int(self.rng.choice(choices))

    def specs(self, source: Source) -> tuple[RequestSpec, ...]:
        return requests(drawn_lengths(source, self.rng, self.count, self.folder), source.longest_output)


def settings_for(at: Deployment, specs: tuple[RequestSpec, ...], **settings: object) -> EngineConfig:
    """Settings with the pool this deployment has, and room for the longest request."""
    longest = max(spec.prompt_tokens + spec.max_output_tokens for spec in specs)
    defaults: dict[str, object] = {
        "block_tokens": BLOCK_TOKENS,
        "kv_blocks": kv_blocks_for(at, BLOCK_TOKENS),
        "max_model_tokens": longest,
    }
    return EngineConfig(**(defaults | settings))  # type: ignore[arg-type]


def mean_tokens(specs: tuple[RequestSpec, ...]) -> float:
    """Mean tokens of a finished request."""
    return float(np.mean([spec.prompt_tokens + (spec.stop_after_tokens or 0) for spec in specs]))
