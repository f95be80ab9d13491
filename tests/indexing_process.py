"""A process that reads a journal into a store to its end, with files small enough that all its habits show: checkpoints,
segments cut to Parquet and deleted. `python indexing_process.py DIR` (for tests that kill it)."""

from __future__ import annotations

import sys
from pathlib import Path

from writing import NOW, plain_attribute, rulebook

from phasewise.collector import store as store_module
from phasewise.collector import writer as writer_module


def run(data: Path) -> None:
    """Everything the journal holds, as if some seconds had passed after each step."""
    store_module.CHECKPOINT_THRESHOLD = "64KB"
    writer_module.READ_ENTRIES = 4
    now = [NOW + 10 * 10**9]
    with store_module.Store(data / "phasewise.duckdb") as store:
        writer = writer_module.Writer(store, data, rulebook(), plain_attribute, clock=lambda: now[0])
        idle = 0
        while idle < 25:  # two and a half minutes: by then every row is final, whenever its neighbours came
            idle = 0 if writer.step() or writer.health()["journal"]["lag_bytes"] else idle + 1  # type: ignore[index]
            now[0] += 6 * 10**9
        store.checkpoint()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
