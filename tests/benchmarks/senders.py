"""What few and many senders get from one `receive`, each sending its next body when it is answered: `python tests/benchmarks/senders.py`.

Bodies of 512 spans over gRPC, as an exporter's batches. Figures: spans acknowledged a second, the same per CPU-second of the process, and
how long an answer takes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ingest_load import Generator, Load
from benchmarks.ingest_server import cpu_s
from benchmarks.machine import machine
from receive_process import Receiving, receiving

SENDERS = (1, 2, 4, 8, 32)
_COMPILED_S = 180.0


def figures(running: Receiving, senders: int, seconds: float) -> dict[str, Any]:
    used = cpu_s(running.process.pid)
    sent = Generator(Load(running.grpc_port, seconds, connections=senders, seed=senders)).result()
    used = cpu_s(running.process.pid) - used
    if sent["errors"] or not sent["spans"]:
        raise SystemExit(f"{senders} senders: {sent['errors'] or 'nothing was acknowledged'}")
    return {
        "senders": senders,
        "spans_per_s": round(sent["spans"] / sent["wall_s"]),
        "spans_per_cpu_s": round(sent["spans"] / used),
        "ack_p50_ms": round(sent["ack_p50_ms"], 2),
        "ack_p99_ms": round(sent["ack_p99_ms"], 2),
        "refused": sent["refused"],
    }


def until_compiled(running: Receiving) -> None:
    until = time.monotonic() + _COMPILED_S
    while running.counters()["trace_scanner"]["kind"] != "compiled":
        if time.monotonic() > until:
            raise SystemExit("the scanner was not compiled")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of senders")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "compiled"))
    here = machine(("phasewise", "grpcio", "pyarrow", "numba"))
    found = []
    for senders in SENDERS:
        with tempfile.TemporaryDirectory() as folder, receiving(Path(folder)) as running:
            until_compiled(running)
            found.append(own := figures(running, senders, chosen.seconds))
        print(
            f"{senders:3} senders: {own['spans_per_s']:9,} spans/s, {own['spans_per_cpu_s']:9,} per CPU-second, answered in "
            f"{own['ack_p50_ms']:6.2f} ms (p50), {own['ack_p99_ms']:6.2f} ms (p99), {own['refused']} refused"
        )
    print(json.dumps({"benchmark": "senders", **here, "figures": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
