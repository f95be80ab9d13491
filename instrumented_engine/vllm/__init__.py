"""A stat logger for vLLM: sends what vLLM's own spans lack, in the wire format of Phasewise's engine.

vLLM finds it by its entry point (group `vllm.stat_logger_plugins`); installing is all that is to be done:

    pip install --no-deps phasewise      # into vLLM's environment

It needs the standard library and opentelemetry, which vLLM brings. Importing this package imports neither vLLM nor the SDK: the
class is made when somebody asks for it.
"""

from __future__ import annotations

__all__ = ["StatLogger"]


def __getattr__(name: str) -> type:
    """`StatLogger`, a subclass of vLLM's own base class, without which vLLM would not take it. Raises ImportError without vLLM."""
    if name != "StatLogger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phasewise.instrumented_engine.vllm.hook import stat_logger

    made = stat_logger()
    globals()[name] = made
    return made
