"""What the vLLM plugin costs an engine: in vLLM's event loop a step, and in the plugin's thread a step, spans and sending included.

    python tests/benchmarks/vllm_plugin.py [--steps 100000]

Steps of 64 sequences, one of which finishes every tenth step, as a server with that many seats hands them over; sent over gRPC to a
receiver in another process that answers at once. CPU seconds, so that a busy machine says the same. Exit code 1 where a span was not
sent.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine_line
from vllm_stats import Details, Done, State, brought

from phasewise.instrumented_engine.vllm.export import open_export
from phasewise.instrumented_engine.vllm.facts import EngineFacts
from phasewise.instrumented_engine.vllm.readings import Reading
from phasewise.instrumented_engine.vllm.sender import Sender
from phasewise.instrumented_engine.vllm.settings import Settings

FACTS = EngineFacts(model="m", details=True, asynchronous=False, kv_blocks_total=10_000)
SEQUENCES = 64
STEP_MS = 20
RECEIVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from live_engine import grpc_receiver
with grpc_receiver() as received:
    print(received.endpoint, flush=True)
    sys.stdin.read()
"""


def readings(steps: int) -> list[Reading]:
    found = []
    for number in range(steps):
        done = [Done(request_id=f"cmpl-{number}-0")] if number % 10 == 0 else []
        state = State(
            SEQUENCES,
            3,
            kv_cache_usage=0.4,
            iteration_details=Details(16, SEQUENCES, SEQUENCES, iteration_index=number),
        )
        outputs = brought(STEP_MS * number, decoded=SEQUENCES, first=1, computed=16, finished_requests=done)
        found.append(Reading(time.time_ns(), state, outputs))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    steps: int = parser.parse_args(arguments).steps
    given = readings(steps)
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, str(Path(__file__).parent.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert receiver.stdout is not None and receiver.stdin is not None
    endpoint = receiver.stdout.readline().strip()
    if not endpoint:
        raise SystemExit(f"the receiver did not start: exit code {receiver.wait()}")
    os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = endpoint
    told = Settings(endpoint=endpoint, queue_answers=steps, delay_s=3600, closing_s=3600)
    sender = Sender(FACTS, told, lambda: open_export(told, FACTS))
    began = time.thread_time()
    for reading in given:
        sender.put(reading)
    in_loop_s = time.thread_time() - began
    before = resource.getrusage(resource.RUSAGE_SELF)
    sender.close()
    after = resource.getrusage(resource.RUSAGE_SELF)
    receiver.stdin.close()
    receiver.wait()
    thread_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    counts = sender.counts
    if counts.failed or counts.dropped or counts.errors or not counts.sent:
        raise SystemExit(f"not everything was sent: {counts}")
    print(machine_line(("phasewise", "grpcio", "opentelemetry-sdk")))
    print(f"{steps} steps of {SEQUENCES} sequences, {counts.sent} spans sent")
    print(f"in vLLM's event loop: {in_loop_s / steps * 1e9:.0f} ns a step")
    print(f"in the plugin's thread: {thread_s / steps * 1e6:.1f} us a step, sending included")
    print(f"of one core at steps of {STEP_MS} ms: {(in_loop_s + thread_s) / steps / (STEP_MS / 1e3):.3%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
