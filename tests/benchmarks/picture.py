"""Prints the trade-offs of `tests/engine_picture.py` for one seed: `python tests/benchmarks/picture.py [seed]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import machine_line
from engine_picture import EXPERIMENTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", default=11)
    seed: int = parser.parse_args(arguments).seed
    print(f"simulated H100 SXM, Llama-3.1-8B, BF16; seed {seed}; on {machine_line(('phasewise', 'numpy'))}")
    for title, run in EXPERIMENTS.items():
        began = time.perf_counter()
        outcomes = run(seed)
        print(f"\n{title} ({time.perf_counter() - began:.1f} s)")
        print(f"{'':>18} {'served':>7} {'refused':>8} {'tok/s':>8} {'busy tok/s':>11} {'TTFT p50':>9} {'TTFT p99':>9}"
              f" {'chat p99':>9} {'queue p99':>10} {'E2E p99':>8} {'empty':>6} {'running':>8} {'put back':>9}")  # fmt: skip
        for one in outcomes:
            print(f"{one.name:>18} {one.requests:>7} {one.refused:>8} {one.tokens_per_s:>8.0f} {one.busy_tokens_per_s:>11.0f}"
                  f" {one.ttft_p50_s:>8.3f}s {one.ttft_p99_s:>8.3f}s {one.interactive_ttft_p99_s:>8.3f}s"
                  f" {one.queue_p99_s:>9.3f}s {one.e2e_p99_s:>7.2f}s {one.empty_seats:>6.1f} {one.running:>8.1f} {one.preempted:>9}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
