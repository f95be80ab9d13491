"""The demo's live run: the instrumented engine as a process of its own, a load over HTTP, its spans by OTLP, a card.

Few slots and more requests than they can serve, so that there is something to see. Nothing of it may break the demo: what does
not work is said in one line.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.dashboard.commands.connection import Server
from phasewise.dashboard.commands.engine import chosen_executor
from phasewise.dashboard.commands.open_loop import Outcome, Request, drawn, send
from phasewise.dashboard.commands.progress import progress
from phasewise.dashboard.commands.ready_process import ready_process
from phasewise.dashboard.commands.settled_verdict import Shown, settled
from phasewise.rules.errors import MachineError, PhasewiseError
from phasewise.rules.load import load_rulebook

SETTLE_TIMEOUT_S = 30.0
SLOTS = 4
MARGIN_NS = 10**9  # a client has its last token before the engine has noted the end of the request


@dataclass(frozen=True, slots=True)
class Plan:
    """What one executor is given: options of `engine serve`, and the load."""

    options: tuple[str, ...]
    load: tuple[Request, ...]


def plan_of(executor: str) -> Plan:
    """Enough to overload four slots for about ten seconds: a small model on two CPU cores, or an 8B model on a simulated H100."""
    if executor == "torch":
        load = drawn(24, per_s=24, prompt_words=(16, 64), max_tokens=(12, 24), seed=1)
        return Plan(("--executor", "torch"), tuple(load))
    load = drawn(100, per_s=30, prompt_words=(60, 240), max_tokens=(32, 96), seed=1)
    return Plan(("--executor", "simulated", "--gpu", "h100-sxm", "--model", "llama-3.1-8b"), tuple(load))


def run_live(
    stack: contextlib.ExitStack, data: Path, server: Server, otlp_url: str, asked: str, *, stays: bool
) -> None:
    """Starts, loads, judges, prints. The engine serves on until the stack ends where the demo stays."""
    try:
        with contextlib.ExitStack() as own:
            _run(own, data, server, otlp_url, asked, stays=stays)
            if stays:
                stack.push(own.pop_all())
    except PhasewiseError as error:
        print(f"phasewise: the live run of the engine was left out: {error}", file=sys.stderr)
    except Exception as fault:  # whatever it is, the demo has shown what it promised
        told = f"{type(fault).__name__}: {fault}"
        print(f"phasewise: the live run of the engine was left out: {told}", file=sys.stderr)


def _run(own: contextlib.ExitStack, data: Path, server: Server, otlp_url: str, asked: str, *, stays: bool) -> None:
    executor, reason = chosen_executor(asked)
    if reason:
        print(f"live run: {reason}", file=sys.stderr)
    plan = plan_of(executor)
    verb = ["engine", "serve", "--port", "0", "--otlp-endpoint", otlp_url]
    verb += ["--max-num-seqs", str(SLOTS), *plan.options]
    told = own.enter_context(ready_process(verb, data / "engine.log"))
    from_unix_ns = time.time_ns()
    with progress("sending to the engine", len(plan.load)) as advance:
        outcome = send(str(told["url"]), str(told["model"]), plan.load, advance)
    if not outcome.completed:
        raise MachineError(f"none of {outcome.sent} requests was served: {outcome.problem or 'all were refused'}")
    if outcome.completed < outcome.sent:
        why = f", the first: {outcome.problem}" if outcome.problem else ""
        print(f"live run: {outcome.refused} refused, {outcome.failed} failed of {outcome.sent}{why}", file=sys.stderr)
    _show(server, told, outcome, from_unix_ns, time.time_ns() + MARGIN_NS, stays=stays)


def _show(server: Server, told: Mapping[str, Any], outcome: Outcome, since: int, until: int, *, stays: bool) -> None:
    from phasewise.dashboard.cards import card_of
    from phasewise.dashboard.terminal import show

    shown = Shown(str(told["instance"]), since, until)
    verdict = settled(server, shown.query(), outcome.completed, "judging the live run", SETTLE_TIMEOUT_S)
    if verdict.get("requests") != outcome.completed:
        print(f"live run: {verdict.get('requests')} of {outcome.completed} requests arrived as spans", file=sys.stderr)
    show(card_of(verdict, badge=badge(told, outcome)))
    if stays:
        print(f"{shown.page(server)}\nThe engine answers at {told['url']}/v1 until the end.\n", flush=True)
    else:
        print(flush=True)


def badge(told: Mapping[str, Any], outcome: Outcome) -> str:
    """One line that says what was measured and on what. told: the engine's ready line."""
    if told["executor"] == "simulated":
        gpu = load_rulebook().find_gpu(str(told["gpu"]))
        on = f"simulated {gpu.name if gpu else told['gpu']}"
    else:
        on = f"measured on this {'CPU' if told['gpu'] == 'cpu' else told['gpu']}"
    return f"live, {on}: {told['model']}, {SLOTS} slots, {outcome.completed} requests over HTTP"
