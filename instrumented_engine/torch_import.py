"""PyTorch, or one sentence that says how to get it. The modules that compute import it from here."""

from __future__ import annotations

from phasewise.rules.errors import MachineError

REMEDY = "pip install 'phasewise[engine]'"

try:
    import torch as torch
    from torch.nn import functional as functional
except ModuleNotFoundError as problem:
    raise MachineError(f"real models need PyTorch, and {problem.name} is not installed ({REMEDY})") from problem

__all__ = ["functional", "torch"]
