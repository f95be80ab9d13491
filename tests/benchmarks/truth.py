"""The scoreboard of the diagnosis: scenarios whose truth is known, drawn afresh, against what the analyzer says of them.

    python tests/benchmarks/truth.py [--json] [--seed N] [--scenarios N] [--requests N] [--details FILE] [--workers N]

Each family is drawn as often as the next (70 scenarios: five times each). A scenario is run once on the simulated executor, its
truth is found by reruns, and the run is put to the analyzer twice: as an engine with steps sends it, and as vLLM would have sent it
(spans and scrapes of every 5 s). Each is asked for TTFT, ITL and end to end with a limit that the slowest tenth breaks
(`truth_views.py`); the verdict's primary and cause are compared with the truth of that objective.

Without --json the last line is `name value, ...`, with it a JSON object: scenarios, class_accuracy_steps, class_accuracy_spans,
dominant_right (requests, with steps), abstained (spans only), seed, further figures, and the machine with its versions. Progress goes to stderr. A scenario that
cannot be judged ends the run: a scoreboard with holes says nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from benchmarks.truth_figures import Judged, report, summary
from benchmarks.truth_scenario import Task, judge

from phasewise.instrumented_engine.truth.families import FAMILIES

SCENARIOS = 70
PACKAGES = ("phasewise", "duckdb", "polars", "numpy")
REQUESTS = 1000
WORKERS = 2


def tasks(seed: int, scenarios: int, requests: int) -> list[Task]:
    """Families in turn, each draw with a seed of its own."""
    chance = random.Random(seed)
    families = list(FAMILIES)
    return [Task(families[number % len(families)], chance.randrange(2**31), requests) for number in range(scenarios)]


def judged(wanted: Sequence[Task], workers: int) -> Iterator[Judged]:
    """As they are done. Processes are started afresh: threads of DuckDB and Polars do not survive a fork."""
    if workers == 1:
        yield from map(judge, wanted)
        return
    os.environ.setdefault("POLARS_MAX_THREADS", "1")  # the workers share the cores already
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(judge, task) for task in wanted]):
            yield done.result()


def _watched(found: Iterable[Judged], of: int, details: Path | None) -> Iterator[Judged]:
    """The same, with a line of progress each, and a JSON line each in `details`."""
    started = time.monotonic()
    if details:
        details.write_text("")
    for number, one in enumerate(found, 1):
        right = sum(one.truth[name].kind == one.verdicts["steps"][name].kind for name in one.truth)
        spent = time.monotonic() - started
        print(
            f"{number}/{of} {spent:.0f} s: {one.family}, {one.requests} requests, {right}/{len(one.truth)} right with steps",
            file=sys.stderr,
            flush=True,
        )
        if details:
            with details.open("a") as out:
                out.write(json.dumps(one.row()) + "\n")
        yield one


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--seed", type=int, help="of the draw; without it another one each time")
    parser.add_argument("--scenarios", type=int, default=SCENARIOS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each scenario")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--details", type=Path, help="a JSON line each scenario")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    wanted = tasks(seed, options.scenarios, options.requests)
    found = sorted(
        _watched(judged(wanted, options.workers), len(wanted), options.details),
        key=lambda one: (list(FAMILIES).index(one.family), one.seed),
    )
    print("\n".join(report(found)))
    told = summary(found, seed) | machine(PACKAGES)
    print(json.dumps(told) if options.json else ", ".join(f"{name} {value}" for name, value in told.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
