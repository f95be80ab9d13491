"""The class that vLLM asks for: its calls go to a `Sender`, and no exception of ours comes back."""

from __future__ import annotations

import importlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from phasewise.instrumented_engine.vllm.facts import EngineFacts, facts_of
from phasewise.instrumented_engine.vllm.readings import Reading
from phasewise.instrumented_engine.vllm.sender import Sender
from phasewise.instrumented_engine.vllm.settings import Settings, settings_of

if TYPE_CHECKING:
    from phasewise.instrumented_engine.vllm.export import Export

_log = logging.getLogger("vllm.plugins.phasewise")
_DETAILS = (
    "each step's prompt tokens and duration need --enable-logging-iteration-details"
    " (together with --disable-log-stats vLLM does not write them to its log)"
)


class Hook:
    """What vLLM calls. Where sending is off, or cannot be set up, every call does nothing."""

    sender: Sender | None = None

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._engine_index = engine_index

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0, **_: Any
    ) -> None:
        """After every answer of the engine, in vLLM's event loop."""
        sender = self.sender
        if sender is None:
            return
        try:
            sender.put(Reading(time.time_ns(), scheduler_stats, iteration_stats))
        except Exception:
            sender.refused += 1

    def log_engine_initialized(self) -> None:
        """The engine is up, and its configuration whole."""
        try:
            settings = settings_of(os.environ)
            facts = facts_of(self._config, self._engine_index)
            if settings.endpoint is None:
                _log.info("Phasewise sends nothing: no OTLP endpoint, or switched off")
                return
            self.sender = Sender(facts, settings, lambda: _open(settings, facts))
            _log.info("Phasewise sends to %s (PHASEWISE_VLLM=off ends it)", settings.endpoint)
            if not facts.details:
                _log.info("Phasewise: %s", _DETAILS)
        except Exception as problem:
            _log.warning("Phasewise sends nothing: %s", problem)

    def log(self) -> None:
        """Every few seconds, unless vLLM runs with --disable-log-stats: so what is lost is said by the sender."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Nothing to tell."""


def stat_logger() -> type:
    """`Hook` as a subclass of the base class of the vLLM that is installed. Raises ImportError."""
    base = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
    return type("StatLogger", (Hook, base), {"__doc__": Hook.__doc__})


def _open(settings: Settings, facts: EngineFacts) -> Export:
    from phasewise.instrumented_engine.vllm.export import open_export

    return open_export(settings, facts)
