"""The one tree of errors a user can meet; each says what is wrong, where, and what to do about it."""

from __future__ import annotations

from pathlib import Path


class PhasewiseError(Exception):
    """Anything a user can do something about. The command line prints it as one line, without a traceback."""

    exit_code = 2


class RuleError(PhasewiseError):
    """A rule file is wrong; the start is refused."""

    def __init__(self, path: Path | str, key: str, message: str) -> None:
        super().__init__(f"{path}: {key}: {message}")
        self.path = path
        self.key = key


class InputError(PhasewiseError):
    """A file, option or request body cannot be used.

    source: the file or option; field: where in it; remedy: what the user can do; told: all of it but the remedy.
    """

    def __init__(self, source: Path | str, field: str, problem: str, remedy: str = "") -> None:
        where = f"{source}: {field}" if field else str(source)
        self.told = f"{where}: {problem}"
        super().__init__(self.told + (f" ({remedy})" if remedy else ""))
        self.source = source
        self.field = field
        self.remedy = remedy


class MachineError(PhasewiseError):
    """The machine refuses: a busy port, no permission, a locked store, no server, no disk."""

    exit_code = 4


class Stopped(MachineError):
    """An answer was given up although nothing is broken. problem: why; remedy: what to ask instead, or when."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem + (f" ({remedy})" if remedy else ""))
        self.problem = problem
        self.remedy = remedy


class TooSlow(Stopped):
    """It took longer than whoever asked was ready to wait."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"stopped after {limit_s:g} s", "narrow the range or add a filter")
        self.limit_s = limit_s


class TooHeavy(Stopped):
    """It needed more memory, or more room for temporary files, than one question may have."""

    def __init__(self) -> None:
        super().__init__(
            "needs more memory and temporary files than a question may have", "narrow the range or add a filter"
        )


class Cancelled(Stopped):
    """Whoever asked no longer wants it."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class TooBusy(Stopped):
    """Too many questions wait already."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} questions wait already", "ask again in a few seconds")
