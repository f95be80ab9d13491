"""kill -9 at a chosen call, without a process: nothing of ours catches what is raised."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


class Killed(BaseException):
    """The process is gone."""


def ending(patched: pytest.MonkeyPatch, dotted: str, after: int) -> None:
    """Lets `after` calls of a function of a module of ours pass, and ends the process before the next one."""
    module = ".".join(dotted.split(".")[:3])
    found: Any = importlib.import_module(module)
    for name in dotted.split(".")[3:]:
        found = getattr(found, name)
    calls = 0

    def call(*positional: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        return found(*positional, **named)

    patched.setattr(dotted, call)
