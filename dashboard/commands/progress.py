"""Progress on stderr: a bar on a terminal, elsewhere a line every ten seconds. Nothing for what is over in a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 10.0


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with the amount done since the last call; total None: only that it is at work.

    title: may hold a file's name, which is shown as it stands: no markup, and nothing that steers a terminal.
    """
    title = "".join(sign if sign.isprintable() else "?" for sign in title)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    done = 0.0
    said_s = time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, said_s
        done += amount
        now_s = time.monotonic()
        if now_s - said_s >= LINE_EVERY_S:
            said_s = now_s
            share = f" {int(100 * done / total)} %" if total else ""
            print(f"{title}:{share}", file=sys.stderr, flush=True)

    yield advance
