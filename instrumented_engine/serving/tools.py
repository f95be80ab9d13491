"""Calls to the outside before, inside and after a stream: a command or a Python function by name, timed and limited.

What a tool does wrong stays with the tool: it fails, hangs or writes too much, and the caller gets a `ToolRun` that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phasewise.instrumented_engine.request_telemetry import ToolRun
from phasewise.rules.errors import InputError

When = Literal["before", "inside", "after"]
OUTPUT_LIMIT_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """command: arguments of a process that gets the text on stdin and answers on stdout; or function: text to text, run in a
    thread of its own. timeout_s: then the process is killed; a function cannot be, and is left behind."""

    name: str
    command: tuple[str, ...] = ()
    function: Callable[[str], str] | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Raises InputError naming the tool."""
        if bool(self.command) == (self.function is not None):
            raise InputError("tools", self.name, "has both or neither of command and function", "give one")
        if not 0 < self.timeout_s < math.inf:
            raise InputError(
                "tools", self.name, f"timeout_s {self.timeout_s} is not positive and finite", "give seconds"
            )


@dataclass(frozen=True, slots=True)
class ToolAsk:
    """One call a request asks for. Inside: after so many output tokens, or when the text shows `marker`."""

    name: str
    when: When
    after_tokens: int | None = None
    marker: str | None = None


async def run_tool(tool: Tool, text: str, now_ns: Callable[[], int], runs: list[ToolRun]) -> tuple[ToolRun, str]:
    """Calls it once, adds the run to `runs`, and never raises for what the tool does. Cancelling the caller ends the process."""
    start_ns = now_ns()
    answer, error = "", None
    try:
        async with asyncio.timeout(tool.timeout_s):
            answer = await (
                _in_process(tool.command, text) if tool.function is None else _in_thread(tool.function, text)
            )
    except TimeoutError:
        error = f"no answer within {tool.timeout_s:g} s"
    except (OSError, _Failed) as problem:
        error = str(problem)
    except asyncio.CancelledError:
        runs.append(ToolRun(tool.name, start_ns, now_ns(), "cancelled"))
        raise
    run = ToolRun(tool.name, start_ns, now_ns(), error)
    runs.append(run)
    return run, answer


class _Failed(Exception):
    """The tool ran and says it failed."""


async def _in_process(command: tuple[str, ...], text: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        output = await _talk(process, text.encode())
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code:
        raise _Failed(f"ended with code {code}")
    return output.decode(errors="replace")


async def _talk(process: Process, text: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    writing = asyncio.ensure_future(_feed(process.stdin, text))
    try:
        output = b""
        while chunk := await process.stdout.read(OUTPUT_LIMIT_BYTES):
            output += chunk
            if len(output) > OUTPUT_LIMIT_BYTES:
                raise _Failed(f"wrote more than {OUTPUT_LIMIT_BYTES} bytes")
        return output
    finally:
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing


async def _feed(pipe: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a tool need not read what it is told
        pipe.write(text)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


async def _in_thread(function: Callable[[str], str], text: str) -> str:
    """A daemon thread, not the loop's pool: one that hangs must keep neither the pool nor the process."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[str] = loop.create_future()

    def settle(answer: str | None, problem: str | None) -> None:
        if answered.done():
            return
        if answer is None:
            answered.set_exception(_Failed(problem or "gave no text"))
        else:
            answered.set_result(answer)

    def work() -> None:
        answer: str | None = None
        problem = None
        try:
            answer = function(text)
            if not isinstance(answer, str):
                answer, problem = None, f"gave {type(answer).__name__}, not text"
        except Exception as raised:  # foreign code may raise anything
            problem = f"{type(raised).__name__}: {raised}"
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(settle, answer, problem)

    threading.Thread(target=work, name=f"tool-{getattr(function, '__name__', 'function')}", daemon=True).start()
    return (await answered)[:OUTPUT_LIMIT_BYTES]
