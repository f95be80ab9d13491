"""`phasewise engine simulate` and `truth`: a drawn scenario run on a virtual clock, stored to be looked at, or taken apart."""

from __future__ import annotations

import json
import secrets
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from phasewise.dashboard.answers import package_version
from phasewise.dashboard.commands.connection import Server, open_data, server_of
from phasewise.dashboard.commands.engine_recording import Sender, ended_ns, messages_of
from phasewise.dashboard.commands.engine_settings import near
from phasewise.dashboard.commands.progress import progress
from phasewise.dashboard.commands.recording import DATASET, DATASET_FACTS
from phasewise.dashboard.commands.settled_verdict import Shown
from phasewise.dashboard.wording import SIMULATED
from phasewise.rules.errors import InputError

if TYPE_CHECKING:
    from phasewise.instrumented_engine.recording import Recording
    from phasewise.instrumented_engine.telemetry import Value
    from phasewise.instrumented_engine.truth.scenario import Scenario

LIST = "list"
DRAWN = {  # what each family is, not what it is bound by: that follows from its runs
    "prompt_compute": "long prompts, short answers, little load",
    "weight_stream": "few sequences decode on a large model",
    "context_stream": "many questions about long shared documents",
    "launch_bound": "a small model, no graphs, a slow host",
    "split_small": "more devices than the model needs",
    "prompt_interference": "chats decode beside long prompts of others",
    "slow_context": "retrieval in front of the queue",
    "tool_calls": "tools before and inside the stream",
    "cold_start": "a replica that has just started",
    "full_seats": "too few seats, or more load than any number of seats serves",
    "kv_pool": "a KV pool smaller than what the seats would fill",
    "batch_forming": "static batches, or a window before each batch",
    "rationed": "a tight step budget, or tenants, priorities and pools",
    "mixture": "two or three of these at once",
}


def simulate(options: Namespace) -> int:
    """Stores what the engine would have sent, ending now."""
    if options.scenario == LIST:
        return list_families(as_json=options.json)
    scenario = drawn(options)
    with working(f"simulating {scenario.family}"):
        recording = ending_at(scenario, time.time_ns())
    sender = sender_of(scenario)
    arrivals = [one.spec.arrival_ns for one in recording.finished] + [spec.arrival_ns for spec, _ in recording.refused]
    shown = Shown(sender.instance, min(arrivals), ended_ns(recording))
    server = store(options, list(messages_of(recording, sender)))
    told = {
        "scenario": scenario.family,
        "seed": scenario.seed,
        "instance": sender.instance,
        "from_unix_ns": shown.from_unix_ns,
        "to_unix_ns": shown.to_unix_ns,
        "requests": len(recording.finished),
        "refused": len(recording.refused),
        "steps": len(recording.steps),
        "url": shown.page(server) if server else None,
        "notes": dict(scenario.notes),
    }
    if options.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0
    print(
        f"{scenario.family}, seed {scenario.seed}: {told['requests']:,} requests in {told['steps']:,} steps, simulated"
    )
    for name, note in scenario.notes.items():
        print(f"  {name}: {note}")
    window = f"--from {shown.from_unix_ns} --to {shown.to_unix_ns + 1} --filter instance:eq:{shown.instance}"
    print(told["url"] or f"phasewise analyze --data {options.data} {window}")
    return 0


def list_families(*, as_json: bool) -> int:
    """The scenarios there are, in one line each."""
    if as_json:
        print(json.dumps(DRAWN, indent=2, ensure_ascii=False))
        return 0
    width = max(map(len, DRAWN))
    for name, text in DRAWN.items():
        print(f"{name:{width}}  {text}")
    return 0


def drawn(options: Namespace) -> Scenario:
    """The scenario that was asked for; InputError with the nearest names for one that is not there."""
    from phasewise.instrumented_engine.truth.families import FAMILIES, draw

    if options.scenario not in FAMILIES:
        raise InputError("SCENARIO", options.scenario, "is no scenario", near(options.scenario, FAMILIES))
    return draw(options.scenario, options.seed, options.requests)


def ending_at(scenario: Scenario, unix_ns: int) -> Recording:
    """A run of the scenario that ends at a moment. Its own times are arbitrary, and when it ends is known only after it ran, so
    it runs twice: nothing in the engine depends on the hour."""
    from phasewise.instrumented_engine.simulation import simulate as run

    first = run(scenario.setup, scenario.arrivals, seed=scenario.seed)
    shift_ns = unix_ns - ended_ns(first)
    moved = [replace(spec, arrival_ns=spec.arrival_ns + shift_ns) for spec in scenario.arrivals]
    return run(scenario.setup, moved, seed=scenario.seed)


def sender_of(scenario: Scenario) -> Sender:
    """A name of its own for each run, marks that tell its rows from live traffic wherever they are shown, and what a live engine
    tells of its accelerator, without which no roofline is judged."""
    deployment = scenario.setup.deployment
    instance = f"{SIMULATED}{scenario.family}-{scenario.seed}-{secrets.token_hex(3)}"
    count = deployment.tensor_parallel_count
    marks = simulated_marks(
        instance,
        machine=f"{f'{count} x ' if count > 1 else ''}{deployment.gpu.name}",
        model=deployment.model.name,
        load=f"scenario {scenario.family} (seed {scenario.seed})",
    )
    facts: dict[str, Value] = {
        "phasewise.gpu": deployment.gpu.id,
        "phasewise.tensor_parallel_count": count,
        "phasewise.weight_bits": deployment.precision.weight_bits,
        "phasewise.kv_bits": deployment.precision.kv_bits,
    }
    return Sender(instance, deployment.model.id, package_version(), {**marks, **facts})


def simulated_marks(name: str, *, machine: str, model: str, load: str) -> dict[str, str]:
    """Attributes of a process whose time is simulated, so that no page takes its rows for measured ones. name: of the data set."""
    facts = {
        "engine": f"phasewise engine {package_version()}",
        "machine": f"simulated {machine}",
        "model": model,
        "load": load,
        "badge": f"simulated {machine}: {model}, {load}",
    }
    return {DATASET: name, DATASET_FACTS: json.dumps(facts)}


def store(options: Namespace, bodies: list[bytes]) -> Server | None:
    """Into the server that owns the directory, which is returned, or into the directory itself."""
    server = server_of(options)
    with progress("storing", len(bodies)) as advance:
        if server is not None:
            for body in bodies:
                server.send("/api/v1/ingest", body, [("kind", "spans"), ("name", "engine simulate")])
                advance(1)
            return server
        from phasewise.collector.importers import import_bytes

        with open_data(options.data, create=True) as local:
            for body in bodies:
                local.writer.add_import(import_bytes(body, "engine simulate"))
                advance(1)
    return None


@contextmanager
def working(title: str) -> Iterator[None]:
    """A bar that only says that it is at work."""
    with progress(title) as advance:
        advance(0)
        yield
