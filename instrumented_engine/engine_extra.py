"""The packages of the extra `engine`: imported where they are used, and missed in one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType

from phasewise.rules.errors import MachineError


def extra(module: str, purpose: str) -> ModuleType:
    """The module. Raises MachineError saying what it is for and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        raise MachineError(f"{purpose} needs the package {problem.name} (pip install 'phasewise[engine]')") from problem
