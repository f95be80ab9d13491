"""What all calls of a server share: the engine, its words, its store and tools, and where telemetry goes."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from phasewise.instrumented_engine.blocks import hash_blocks
from phasewise.instrumented_engine.export import SpanExport
from phasewise.instrumented_engine.llama.tokenizer import Tokenizer
from phasewise.instrumented_engine.sequence import RequestSpec
from phasewise.instrumented_engine.serving.context_store import ContextStore
from phasewise.instrumented_engine.serving.openai_api import Generation
from phasewise.instrumented_engine.serving.service import EngineService
from phasewise.instrumented_engine.serving.tools import Tool


class Stoppable(Protocol):
    """A call that is being answered."""

    def stop(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Desk:
    """simulated: tokens are invented, and end by themselves after `output_tokens` on average (None: at their limit).

    fail_on_tool_error: a failing tool ends the request; else it goes on without. saving: turns being written, by tenant and
    conversation; tasks: what outlives its call; calls: those being answered.
    """

    service: EngineService
    tokenizer: Tokenizer
    simulated: bool
    export: SpanExport | None = None
    store: ContextStore | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    fail_on_tool_error: bool = False
    output_tokens: int | None = None
    draining: bool = False
    saving: dict[tuple[str | None, str], asyncio.Task[None]] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    calls: set[Stoppable] = field(default_factory=set)

    def spec(
        self, generation: Generation, request_id: str, index: int, prompt: tuple[int, ...], limit: int, ready_ns: int
    ) -> RequestSpec:
        """One sequence, as it enters the queue at `ready_ns`. index: which of its call's, so that a seed draws each anew."""
        config = self.service.config
        seed = None if generation.seed is None else generation.seed + index
        return RequestSpec(
            request_id=request_id,
            arrival_ns=ready_ns,
            prompt_tokens=len(prompt),
            max_output_tokens=limit,
            prompt=None if self.simulated else prompt,
            block_hashes=hash_blocks(prompt, config.block_tokens) if self.simulated and config.prefix_sharing else (),
            stop_after_tokens=self._ends_after(generation, request_id, seed) if self.simulated else None,
            stop_token_ids=() if generation.ignore_eos else self.tokenizer.stop_ids,
            priority=generation.priority,
            tenant=generation.user,
            request_class=generation.request_class,
            temperature=generation.temperature,
            top_p=generation.top_p,
            seed=seed,
        )

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it beside the call, and holds on to it."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _ends_after(self, generation: Generation, request_id: str, seed: int | None) -> int | None:
        """Geometric, as if each token ended the answer with the same chance."""
        if self.output_tokens is None or generation.ignore_eos:
            return None
        chance = random.Random(request_id if seed is None else seed).random()
        if self.output_tokens == 1:
            return 1
        return 1 + math.floor(math.log(1 - chance) / math.log(1 - 1 / self.output_tokens))
